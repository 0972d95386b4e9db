"""Tells the story of one way through a small world, and makes a way shorter.

    .venv/bin/python tests/explore/replay.py "Shape('x', broker_deaths=1)" "publish 0, up 0" [--shrink]

A way is what a failed search or a failed random test prints. Steps that cannot be taken are left
out, so a way may be edited by hand.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "explore"

from .parts import Action, Shape
from .world import World


def parse(way: str) -> list[Action]:
    """Returns the actions of a printed way."""
    steps = [step.rsplit(" ", 1) for step in way.split(", ") if step]
    return [(name, int(index)) for name, index in steps]


def follow(shape: Shape, way: Iterable[Action]) -> World:
    """Takes every step of the way that can be taken, then ends the world (see `World.end`).

    Raises what a step, or the end, raises.
    """
    world = World(shape)
    for action in way:
        if action in world.actions():
            world.act(action)
    world.end()
    return world


def failure(shape: Shape, way: Iterable[Action]) -> str | None:
    """Returns what kind of failure this way ends in, without its details; None: none."""
    try:
        follow(shape, way)
    except Exception as error:  # noqa: BLE001
        text = re.sub(r"[0-9a-f]{4,}|\d", "", str(error)).split("{")[0][:40]
        return f"{type(error).__name__}: {text}"
    return None


def shrink(shape: Shape, way: list[Action]) -> tuple[Shape, list[Action]]:
    """Returns a smaller world and a shorter way that fail in the same manner."""
    wanted = failure(shape, way)
    if wanted is None:
        return shape, way
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(shape):
            if failure(smaller, way) == wanted:
                shape, changed = smaller, True
                break
        length = max(1, len(way) // 2)
        while length:
            start = 0
            while start < len(way):
                shorter = way[:start] + way[start + length :]
                if failure(shape, shorter) == wanted:
                    way, changed = shorter, True
                else:
                    start += length
            length //= 2
    return shape, way


def _smaller(shape: Shape) -> Iterator[Shape]:
    plain = Shape(shape.name, workers=1)
    for name in Shape.__dataclass_fields__:
        value = getattr(shape, name)
        if name != "name" and value != getattr(plain, name):
            yield _with(shape, name, getattr(plain, name))
            if isinstance(value, int) and value > 1 and name != "silent_s":
                yield _with(shape, name, value - 1)


def _with(shape: Shape, name: str, value: object) -> Shape:
    changed: Shape = copy.copy(shape)
    object.__setattr__(changed, name, value)
    return changed


# ---------------------------------------------------------------- the story


def _brief(message: object) -> str:
    text = re.sub(r"epoch='0*(\d+)', to='[0-9a-f]+'(, )?", "", str(message))
    text = re.sub(r"([0-9a-f]{2,3})\1{2,}[0-9a-f]*", r"\1", text)
    return re.sub(r"processes=\[.*?\]\)?", "", text)[:240]


def tell(shape: Shape, way: Iterable[Action]) -> None:
    """Prints each step, what it made the ledger do, and how it ended."""
    world = World(shape)
    plain_run, plain_act, plain_apply = world.run, world.act, world.apply

    def run(effects: Iterable[object], source: int | None = None) -> None:
        listed = list(effects)
        for effect in listed:
            to, message = getattr(effect, "to", ""), getattr(effect, "message", effect)
            if type(message).__name__ not in ("Members", "BeatOk"):
                print(f"        {type(effect).__name__.lower()} {to[:2]} {_brief(message)}")
        plain_run(listed, source)  # type: ignore[arg-type]

    def apply(index: int, effect: object) -> None:
        print(f"        {world.agents()[index].core.me.instance[:2]}: {_brief(effect)}")
        plain_apply(index, effect)  # type: ignore[arg-type]

    def act(action: Action) -> None:
        name, index = action
        more: object = ""
        if name in ("up", "again up"):
            more = _brief(world.links[index].up[0][0])
        elif name in ("down", "again down"):
            more = _brief(world.links[index].down[0][0])
        elif name in ("work", "fail", "misread"):
            core = world.workers[index].core
            more = type(core.running or core.queue[0]).__name__
        print(f"{name} {index}: {more}")
        plain_act(action)

    world.run, world.act, world.apply = run, act, apply  # type: ignore[method-assign]
    for action in way:
        if action in world.actions():
            world.act(action)
        else:
            print(f"({action[0]} {action[1]} cannot happen)")
    print("--- to its end")
    world.end()
    print("--- ended well")


def main() -> None:
    shape: Shape = eval(sys.argv[1], {"Shape": Shape})
    way = parse(sys.argv[2])
    if "--shrink" in sys.argv:
        shape, way = shrink(shape, way)
        print(shape)
        print(", ".join(f"{name} {index}" for name, index in way))
    tell(shape, way)


if __name__ == "__main__":
    main()
