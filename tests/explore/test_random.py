"""Random ways through worlds that are too large to walk through completely."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from .parts import Action, Shape
from .world import MOVES, World

STEPS = 50
_FAULTY = 200
"""Bytes from here on choose a fault (or let time pass), those below what goes on by itself."""


def choose(world: World, byte: int) -> Action | None:
    """Returns the action that this byte stands for; smaller bytes: less goes wrong."""
    found = world.actions()
    moves = [action for action in found if action[0] in MOVES]
    others = [action for action in found if action[0] not in MOVES]
    if moves and (byte < _FAULTY or not others):
        return moves[byte % len(moves)]
    return others[byte % len(others)] if others else None


def run(shape: Shape, choices: Sequence[int]) -> World:
    """Goes this way through the world, then to rest; a promise that breaks names the way."""
    world = World(shape)
    way: list[Action] = []
    plain = world.act

    def act(action: Action) -> None:
        way.append(action)
        plain(action)

    world.act = act  # type: ignore[method-assign]
    try:
        for byte in choices:
            action = choose(world, byte)
            if action is None:
                break
            world.act(action)
        world.end()
    except Exception as error:
        steps = ", ".join(f"{name} {index}" for name, index in way)
        error.add_note(f"shape: {shape}")
        error.add_note(f"way: {steps}")
        raise
    return world


@st.composite
def shapes(draw: st.DrawFn, channels: int = 1) -> Shape:
    """Small worlds of every kind; the simplest is one trainer, one worker and no fault."""
    few = st.integers(0, 1)
    some = st.integers(0, 2)
    workers = draw(st.integers(1, 3))
    registered = draw(st.booleans())
    together = draw(st.booleans())
    replicas = 1 if together else workers
    return Shape(
        "random",
        trainers=draw(st.integers(1, 2)),
        workers=workers,
        batches=draw(st.integers(1, 2)),
        channels=channels,
        together=together,
        registered=registered,
        colocated=draw(st.booleans()),
        min_replicas=draw(st.integers(1, replicas)),
        strict=draw(st.booleans()),
        rounds=draw(st.integers(1, 2)),
        retries=draw(some),
        broker_deaths=draw(some),
        worker_deaths=draw(few),
        trainer_deaths=draw(few),
        expulsions=draw(some),
        drops=draw(some),
        voids=draw(few),
        hook_failures=draw(few),
        misreads=draw(few),
        repeats=draw(some),
        stops=draw(few),
        leaves=draw(few),
        trainer_heirs=draw(few),
        relays=draw(st.sampled_from(["", "named"])),
        worker_heirs=draw(some),
        late=draw(st.booleans()),
        silent_s=draw(st.sampled_from([80_000, 8])),
        kill_stuck=draw(st.booleans()),
    )


ways = st.lists(st.integers(0, 255), min_size=STEPS, max_size=STEPS)
anyhow = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)


@settings(anyhow, max_examples=500, print_blob=True)
@given(shapes(), ways)
def test_promises_hold_whatever_goes_wrong(shape: Shape, choices: list[int]) -> None:
    world = run(shape, choices)
    note(f"ended at version {[app.version for app in world.trainers]}")
    assert world.ledger is not None and not world.ledger.state.peers


@settings(anyhow, max_examples=150, print_blob=True)
@given(shapes(channels=2), ways)
def test_channels_whose_workers_share_processes_do_not_hold_up_each_other(
    shape: Shape, choices: list[int]
) -> None:
    world = run(shape, choices)
    assert world.ledger is not None and not world.ledger.state.peers
