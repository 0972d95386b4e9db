"""A trainer of ring rounds as a process of end-to-end tests; see `children.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tensorlease.agents import RingOptions, RoundResult, TrainerAgent
from tensorlease.protocol.errors import TensorleaseError

from .children import Command, TrainerSpec, _controls, say
from .values import BIG_MIB, Part, expected, regions

SLOT = 16 * 2**20 if BIG_MIB else 16 * 1024
"""Bytes of a slot: the largest tensor is cut into several boxes."""


@dataclass(frozen=True)
class RingSpec(TrainerSpec):
    slots: int = 2
    max_quarantine_bytes: int | None = None
    timeout: float = 30.0


class LeavingError(Exception):
    """What a block is left by."""


def trainer(spec: RingSpec) -> None:
    """Says "registered", as a trainer of registered tensors does, and makes ring rounds. Commands:

    `rounds FIRST LAST OPTIONS`: "results" of all; `send VERSION OPTIONS`: "result" of one;
    `leave VERSION COUNT BUSY` raises in the block when it has sent so many tensors: "left"; where
    it is BUSY, not before `raise` is heard; `batches`: "batches" COUNT, of the last round;
    `ready COUNT`: "ready" REPLICAS; `close SECONDS`: ends. `ring` is heard at any time: "ring"
    STATUS; so are those for the seam. What raises is said as "late" TEXT.
    """
    os.environ["TENSORLEASE_SHM_DIR"] = spec.shm_dir

    def heard(command: Command) -> None:
        if command == ("ring",):
            say("ring", agent.ring)
        else:
            todo.put(command)

    agent = TrainerAgent(
        spec.channel,
        rank=spec.rank,
        world_size=spec.world_size,
        group=spec.group,
        endpoint=spec.url,
        device=spec.device,
        distribution=spec.distribution,
        ring=RingOptions(spec.slots, SLOT, spec.max_quarantine_bytes),
    )
    todo, _ = _controls(spec.places, heard)
    pieces = regions(spec.parts)

    def values(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for part in spec.parts:
            yield part.name, expected(version + spec.offset, part)

    batches = 0

    def publish(version: int, options: dict[str, object]) -> RoundResult:
        nonlocal batches
        with agent.open_round(
            version,
            timeout=spec.timeout,
            **options,  # type: ignore[arg-type]
        ) as r:
            r.send_all(values(version), regions=pieces)
        assert r.result is not None
        batches = r.batches
        return r.result

    agent.wait_ready(0, 20.0)
    say("registered", agent.instance)
    while True:
        command = todo.get()
        try:
            match command:
                case ("rounds", first, last, options):
                    say("results", [publish(v, options) for v in range(first, last + 1)])
                case ("send", version, options):
                    say("result", publish(version, options))
                case ("batches",):
                    say("batches", batches)
                case ("leave", version, count, busy):
                    try:
                        with agent.open_round(version, timeout=spec.timeout) as r:
                            for part in spec.parts[:count]:
                                tensor = expected(version + spec.offset, part)
                                r.send(part.name, tensor, region=pieces.get(part.name))
                            if count:
                                r.flush()
                            if busy and todo.get() != ("raise",):
                                raise AssertionError
                            raise LeavingError
                    except LeavingError:
                        say("left")
                case ("ready", count):
                    say("ready", agent.wait_ready(count, 20.0))
                case ("close", seconds):
                    agent.close(seconds)
                    say("closed")
                    return
                case _:
                    raise ValueError(command)
        except TensorleaseError as error:
            say("late", f"{type(error).__name__}: {error}")


def many_tensors(url: str, shm_dir: str, count: int, rounds: int, descriptors: int) -> None:
    """Sends many small tensors with few descriptors; says "round" VERSION, goes on when told."""
    _allow(descriptors, shm_dir)
    parts = [(f"w{i}", torch.full((100,), float(i))) for i in range(count)]
    with TrainerAgent("policy", endpoint=url, ring=RingOptions(2, SLOT)) as agent:
        agent.wait_ready(1, 20.0)
        for version in range(1, rounds + 1):
            for _, tensor in parts:
                tensor.add_(1)
            agent.publish_stream(version, parts, timeout=30.0).raise_for_status()
            say("round", version)


def many_wanted(url: str, shm_dir: str, count: int, rounds: int, descriptors: int) -> float:
    """Takes them; returns the sum of all that it has in the end."""
    from tensorlease.agents import WorkerAgent

    _allow(descriptors, shm_dir)
    wanted = {f"w{i}": torch.zeros(100) for i in range(count)}
    with WorkerAgent("policy", endpoint=url, replica="a") as agent:
        agent.attach(wanted)
        agent.run(until=rounds)
    return float(sum(tensor.double().sum() for tensor in wanted.values()))


def _allow(descriptors: int, shm_dir: str) -> None:
    import resource

    os.environ["TENSORLEASE_SHM_DIR"] = shm_dir
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


__all__ = ["SLOT", "LeavingError", "Part", "RingSpec", "many_tensors", "many_wanted", "trainer"]
