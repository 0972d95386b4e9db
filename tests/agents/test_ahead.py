"""Batches that a device has begun before their turn: none is read any more when the worker says so.

A device that copies later than it was told stands in for a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import RingOptions, TrainerAgent, WorkerAgent
from tensorlease.agents.ahead import Ahead
from tensorlease.agents.copy_plan import Copied, CopyPlan
from tensorlease.agents.errors import MappingError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import Threaded, eventually
from .rings import SLOT, Held, Start, same

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

SLOTS = 4


class Device:
    """Copies a batch only when it is waited for; notes who has been begun, and who is done."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []
        self.before_wait: Callable[[int], None] = lambda _: None

    def begin(self, plan: CopyPlan, source: str, numbers: list[int], mapped: Any) -> Later:
        later = Later(self, len(self.begun), plan, (source, numbers, mapped))
        self.begun.append(later.place)
        return later


class Later:
    """What waits for one of them."""

    def __init__(
        self, device: Device, place: int, plan: CopyPlan, what: tuple[str, list[int], Any]
    ) -> None:
        self.device, self.place, self.plan, self.what = device, place, plan, what

    def wait(self) -> Copied:
        self.device.done.append(self.place)
        self.device.before_wait(self.place)
        source, numbers, mapped = self.what
        return self.plan.copy(source, numbers, mapped)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    def begin(self: CopyPlan, source: str, numbers: list[int], mapped: Mapping[int, Any]) -> Later:
        return found.begin(self, source, numbers, mapped)

    monkeypatch.setattr(CopyPlan, "begin", begin)
    return found


@pytest.fixture
def ring(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url, ring=RingOptions(SLOTS, SLOT))
    yield agent
    agent.close(timeout=0.5)


def weights(value: float) -> dict[str, Tensor]:
    """As many as there are slots, each of which fills one."""
    return {f"w{i}": torch.full((SLOT // 4,), value + i) for i in range(SLOTS)}


def begin_all(
    ring: TrainerAgent, start_worker: Start, device: Device
) -> tuple[dict[str, Tensor], WorkerAgent, Held]:
    """A first round, from which the worker knows the batches; the next waits in its hook."""
    target = {name: torch.zeros_like(tensor) for name, tensor in weights(0.0).items()}
    held = Held(going=True)
    worker = start_worker("r", target, held)
    ring.wait_ready(1, timeout=20.0)
    assert ring.publish_stream(1, weights(10.0), timeout=20.0).ok
    assert same(target, weights(10.0))
    device.begun.clear()
    device.done.clear()
    held.go.clear()
    held.came.clear()
    return target, worker, held


def test_all_that_waits_is_begun_before_the_first_is_awaited_and_every_value_arrives(
    ring: TrainerAgent, start_worker: Start, device: Device
) -> None:
    target, worker, held = begin_all(ring, start_worker, device)
    seen: list[int] = []
    device.before_wait = lambda _: seen.append(len(device.begun))
    with ring.open_round(2, timeout=20.0) as r:
        for name, tensor in weights(20.0).items():
            r.send(name, tensor)
        r.flush()
        eventually(lambda: batches_at(worker) == SLOTS)
        held.go.set()
    assert r.result is not None and r.result.ok
    assert seen == [SLOTS] * SLOTS
    assert device.done == list(range(SLOTS))
    assert same(target, weights(20.0))


@pytest.mark.parametrize("how", ["void", "failed"])
def test_a_round_that_ends_meanwhile_is_released_only_when_the_device_reads_nothing_of_it(
    ring: TrainerAgent, start_worker: Start, device: Device, how: str
) -> None:
    target, worker, held = begin_all(ring, start_worker, device)
    reading, go = threading.Event(), threading.Event()
    out: list[int] = []

    def before_wait(place: int) -> None:
        if place == 0:
            reading.set()
            assert go.wait(20.0)
        out.append(ring.ring.out)
        if place == 0 and how == "failed":
            raise MappingError("the first could not be read")

    device.before_wait = before_wait
    round_ = ring.open_round(2, timeout=20.0)

    def send() -> None:
        with round_ as r:
            for name, tensor in weights(20.0).items():
                r.send(name, tensor)
            r.flush()
            eventually(lambda: batches_at(worker) == SLOTS)
            held.go.set()
            assert reading.wait(20.0)
            if how == "void":
                raise KeyError("the trainer gives up")

    if how == "void":
        thread = threading.Thread(target=go_on_when_it_ends, args=(worker, go))
        thread.start()
        with pytest.raises(KeyError):
            send()
        thread.join(20.0)
    else:
        go.set()
        send()
        assert round_.result is not None
        assert round_.result.outcome is Outcome.FAILED
        assert [r.fate for r in round_.result.receivers.values()] == [Fate.EXPELLED]
    eventually(lambda: len(out) == SLOTS)
    # While the device had to be waited for, no slot had come back.
    assert device.begun == sorted(device.done) == list(range(SLOTS))
    assert out == [SLOTS] * SLOTS
    eventually(lambda: ring.ring.out == 0)
    device.before_wait = lambda _: None
    assert ring.publish_stream(3, weights(30.0), timeout=20.0).ok
    assert same(target, weights(30.0))


def batches_at(worker: WorkerAgent) -> int:
    """How many batches of its round have come to a worker."""
    rnd = worker._core.state.round
    return 0 if rnd is None else len(rnd.batches)


def go_on_when_it_ends(worker: WorkerAgent, go: threading.Event) -> None:
    def ends() -> bool:
        rnd = worker._core.state.round
        return rnd is not None and rnd.ending is not None

    eventually(ends)
    go.set()


def test_what_an_interrupt_leaves_is_still_waited_for() -> None:
    class Interrupted:
        waited = 0

        def wait(self) -> None:
            self.waited += 1
            if self.waited == 1:
                raise KeyboardInterrupt

    begun = Interrupted()
    ahead = Ahead()
    ahead._begun[0, 0] = begun  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        ahead.wait()
    assert len(ahead) == 1
    ahead.wait()
    assert (begun.waited, len(ahead)) == (2, 0)
