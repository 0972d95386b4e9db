"""Other dtypes for the workers, end to end: in the trainer's shadow, or in the worker's copy."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tensorlease.agents import RowBlocks, TrainerAgent, WorkerAgent
from tensorlease.agents.errors import ExportError
from tensorlease.broker.config import Durations
from tensorlease.protocol.errors import ConfigError, DeadlineError

from ..broker.raw_agents import Threaded, config_for, eventually
from .serving import serving

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.intake import Copied, Intake
    from tensorlease.agents.work import CopyWork

torch = pytest.importorskip("torch")


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url)
    yield agent
    agent.close(timeout=0.5)


@contextmanager
def held_copies(worker: WorkerAgent) -> Iterator[Callable[[], None]]:
    """Holds the worker's copies back until the yielded function is called, or the end."""
    intake: Intake = worker._intake
    copy, go_on = intake.copy, threading.Event()

    def wait(work: CopyWork) -> Copied:
        assert go_on.wait(20.0)
        return copy(work)

    intake.copy = wait  # type: ignore[method-assign]
    try:
        yield go_on.set
    finally:
        go_on.set()
        intake.copy = copy  # type: ignore[method-assign]


def test_originals_may_be_written_as_soon_as_publish_nowait_has_returned(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    source, target = torch.ones(1000), torch.zeros(1000, dtype=torch.bfloat16)
    buffers = trainer.register({"w": source}, dtype=torch.bfloat16)
    assert (buffers.names, buffers.nbytes) == (("w",), 2000)
    worker.attach({"w": target})
    with serving(worker), held_copies(worker) as go_on:
        handle = trainer.publish_nowait(1)
        source.fill_(2)
        assert trainer.may_write()
        assert not handle.released.done
        go_on()
        assert handle.result(20.0).ok
        assert target.eq(1).all()
        assert trainer.publish(2).ok
        assert target.eq(2).all()


@pytest.fixture
def impatient(url: str) -> Iterator[Threaded]:
    """A broker that soon calls a lease stuck whose round is over."""
    made = Threaded(replace(config_for(url), durations=Durations(drain=0.2)))
    yield made
    made.stop()


def test_a_shadow_is_not_filled_while_anybody_may_read_it(impatient: Threaded, url: str) -> None:
    source, target = torch.ones(1000), torch.zeros(1000)
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        trainer.register({"w": source}, shadow=True)
        worker.attach({"w": target})
        with serving(worker), held_copies(worker) as go_on:
            first = trainer.publish_nowait(1, stage_s=0.2)
            assert not first.finished.wait(20.0).ok
            eventually(lambda: first.stuck)  # the round has ended, and its lease has not
            source.fill_(2)
            with pytest.raises(DeadlineError, match=r"version 2 was not opened.*a/0 \(pid \d+\)"):
                trainer.publish_nowait(2, timeout=0.1)
            (memory,) = trainer._registry.find(None)[0]._memory
            shadow = torch.empty(0).set_(memory.storage(0, 4000), 0, (1000,))
            assert shadow.eq(1).all()
            del shadow, memory
            go_on()
            first.released.wait(20.0)
            assert trainer.publish(2).ok
    assert target.eq(2).all()


def test_tensors_with_and_without_a_shadow_go_in_one_round(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    moved, copied = torch.ones(10), torch.ones(10)
    trainer.register({"moved": moved})
    trainer.register({"copied": copied.view(2, 5).t()}, dtype=torch.float16)
    target = {"moved": torch.zeros(10), "copied": torch.zeros(5, 2, dtype=torch.float16)}
    worker.attach(target)
    with serving(worker):
        for version in (1, 2, 3):
            moved.fill_(version)
            copied.copy_(torch.arange(10) * version)
            result = trainer.publish(version).raise_for_status()
            assert result.nbytes == 40 + 20
            assert target["moved"].eq(version).all()
            assert torch.equal(target["copied"].t().reshape(10).float(), copied)
        with held_copies(worker):
            handle = trainer.publish_nowait(4)
            assert not trainer.may_write()  # `moved` is read where it lies
        handle.released.wait(20.0)
        assert trainer.may_write()


def test_threads_that_publish_at_once_never_mix_their_fillings(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    source, target = torch.ones(100_000), torch.zeros(100_000, dtype=torch.bfloat16)
    trainer.register({"w": source}, dtype=torch.bfloat16)
    seen: list[set[float]] = []
    worker.on_commit(lambda _: seen.append(set(target[::1000].tolist())))
    worker.attach({"w": target})
    with serving(worker):
        trainer.wait_ready(1)
        for version in range(1, 6):
            source.fill_(version)
            with ThreadPoolExecutor(3) as pool:
                rounds = [pool.submit(trainer.publish, version) for _ in range(3)]
            assert all(one.result().ok for one in rounds)
    assert all(len(values) == 1 for values in seen)
    assert target.eq(5).all()


async def test_a_coroutine_publishes_shadows_beside_the_event_loop(
    trainer: TrainerAgent, worker: WorkerAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = torch.ones(100), torch.zeros(100, dtype=torch.bfloat16)
    trainer.register({"w": source}, dtype=torch.bfloat16)
    worker.attach({"w": target})
    fill, go_on, begun = trainer._registry.fill, threading.Event(), threading.Event()

    def slowly() -> None:
        begun.set()
        assert go_on.wait(20.0)
        fill()

    monkeypatch.setattr(trainer._registry, "fill", slowly)
    with serving(worker):
        publishing = asyncio.ensure_future(trainer.apublish(1))
        assert await asyncio.to_thread(begun.wait, 20.0)
        # Another round cannot begin meanwhile, and the loop goes on.
        with pytest.raises(DeadlineError, match="another thread publishes"):
            await trainer.apublish(2, timeout=0.1)
        go_on.set()
        assert (await publishing).ok
    assert target.eq(1).all()


def test_a_ring_round_fills_the_shadows_too_and_a_ring_takes_row_blocks(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    copied, sent = torch.ones(4), torch.arange(8.0).view(4, 2)
    trainer.register({"copied": copied}, dtype=torch.float16)
    target = {"copied": torch.zeros(4, dtype=torch.float16), "sent": torch.zeros(4, 2)}
    worker.attach(target, strict=False)
    with serving(worker):
        for version in (1, 2):
            copied.fill_(version)
            with trainer.open_round(version) as r:
                r.send("sent", sent * version, region=RowBlocks((4, 2), [(2, 2), (0, 2)]))
            assert r.result is not None and r.result.ok
            assert target["copied"].eq(version).all()
            assert torch.equal(target["sent"], sent.roll(2, 0) * version)


def test_the_same_version_again_brings_late_ones_what_the_others_got(
    trainer: TrainerAgent, worker: WorkerAgent, url: str
) -> None:
    source, target, late = torch.ones(4), torch.zeros(4), torch.zeros(4)
    trainer.register({"w": source}, shadow=True)
    worker.attach({"w": target})
    with serving(worker):
        assert trainer.publish(1).ok
        source.fill_(2)  # training has gone on
        with WorkerAgent("policy", endpoint=url, replica="late") as other:
            other.attach({"w": late})
            with serving(other):
                trainer.wait_ready(2)
                assert trainer.publish(1).ok
                assert (target[0].item(), late[0].item()) == (1.0, 1.0)
                assert trainer.publish(2).ok
                assert (target[0].item(), late[0].item()) == (2.0, 2.0)


def test_a_version_that_nobody_got_is_filled_anew(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    trainer.register({"w": source}, shadow=True)
    assert not trainer.publish(1, open_s=0.05).ok
    source.fill_(2)
    worker.attach({"w": target})
    with serving(worker):
        assert trainer.publish(1).ok
    assert target.eq(2).all()


def test_a_guarded_step_does_not_wait_for_who_reads_a_shadow_and_late_ones_get_it(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    trainer.register(layer.named_parameters(), shadow=True)
    trainer.guard(optimizer, timeout=0.1)
    target = torch.zeros(4, 4)
    worker.attach({"weight": target})
    with serving(worker), held_copies(worker) as go_on:
        handle = trainer.publish_nowait(1)
        published = layer.weight.detach().clone()
        layer.weight.grad = torch.ones(4, 4)
        optimizer.step()  # though nothing is released
        assert not handle.released.done
        go_on()
        assert handle.result(20.0).ok
    assert torch.equal(target, published)


def test_a_snapshot_of_a_shadow_has_the_originals_as_they_were(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    source, target = torch.ones(1000), torch.zeros(1000, dtype=torch.bfloat16)
    trainer.register({"w": source}, dtype=torch.bfloat16)
    worker.attach({"w": target})
    with serving(worker):
        for version in (1, 2):
            source.fill_(version)
            handle = trainer.publish_nowait(version, snapshot=True)
            source.fill_(-1)
            assert handle.result(20.0).ok
            assert target.eq(version).all()


def test_an_original_that_cannot_be_copied_any_more_opens_no_round(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    trainer.register(layer.named_parameters(), dtype=torch.bfloat16)
    worker.attach({"weight": torch.zeros(4, 4, dtype=torch.bfloat16)})
    good = layer.weight.data
    with serving(worker):
        assert trainer.publish(1).ok
        layer.weight.data = torch.ones(2, 4)
        with pytest.raises(ExportError, match="'weight' was replaced since it was registered"):
            trainer.publish(2)
        layer.weight.data = good.clone()
        assert trainer.publish(2).ok


def test_what_is_unregistered_gives_its_memory_back_and_the_originals_stay(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    source = torch.ones(4)
    buffers = trainer.register({"w": source}, dtype=torch.float16)
    worker.attach({"w": torch.zeros(4, dtype=torch.float16)})
    with serving(worker):
        assert trainer.publish(1).ok
        trainer.unregister(buffers)
        eventually(lambda: not worker._intake._mapped)
        trainer.register({"w": source}, dtype=torch.float16)
        source.fill_(3)
        assert trainer.publish(2).ok
    assert source.dtype is torch.float32


def test_a_cast_that_cannot_be_moves_nothing_and_the_next_registration_works(
    trainer: TrainerAgent,
) -> None:
    tensors = {"w": torch.ones(2), "steps": torch.tensor(3)}
    with pytest.raises(ExportError, match="'steps' is torch.int64 and cannot become"):
        trainer.register(tensors, dtype=torch.bfloat16)
    trainer.register(tensors, dtype={"w": torch.bfloat16})


# ---------------------------------------------------------------- in the worker's copy


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float64", "float8_e4m3fn"])
def test_a_worker_converts_while_it_copies(
    trainer: TrainerAgent, worker: WorkerAgent, given: str
) -> None:
    dtype = getattr(torch, given)
    source = torch.rand(6, 8).to(dtype)
    trainer.register({"w": source, "whole": source.clone(), "count": torch.arange(3)})
    fused = torch.zeros(6, 20)
    target = {"w": fused[:, 4:12], "whole": torch.zeros(6, 8), "count": torch.zeros(3).long()}
    worker.attach(target, cast="worker")
    with serving(worker):
        assert trainer.publish(1).ok
    for name in ("w", "whole"):
        assert torch.equal(target[name], source.to(torch.float32))
    assert target["count"].tolist() == [0, 1, 2]
    assert not fused[:, :4].any() and not fused[:, 12:].any()


@pytest.mark.parametrize(
    ("offered", "wanted", "cast", "text"),
    [
        ("float32", "bfloat16", None, r"attach\(cast='worker'\) converts while it copies"),
        ("float32", "bfloat16", None, r"register\(dtype=torch.bfloat16\) at the trainer"),
        ("int32", "int64", "worker", "both must have one dtype, since only floating ones"),
        ("int32", "float32", "worker", "both must have one dtype, since only floating ones"),
        ("complex64", "complex128", "worker", "since only floating ones are converted"),
        ("float32", "float4_e2m1fn_x2", "worker", "which cannot be converted: torch .* has no"),
    ],
)
def test_a_mismatch_keeps_the_worker_out_by_name_and_says_the_way_out(
    trainer: TrainerAgent, worker: WorkerAgent, offered: str, wanted: str, cast: Any, text: str
) -> None:
    kinds: list[Any] = [getattr(torch, name) for name in (offered, wanted)]
    trainer.register({"w": torch.zeros(4, kinds[0].itemsize).to(kinds[0])})
    target: Tensor = torch.zeros(4 * kinds[0].itemsize * kinds[1].itemsize, dtype=torch.uint8)
    worker.attach({"w": target.view(kinds[1]).view(4, kinds[0].itemsize)}, cast=cast)
    with serving(worker):
        eventually(lambda: trainer.replicas and "rank 0" in trainer.replicas["a"].reason)
    reason = trainer.replicas["a"].reason
    assert f"'w' is {wanted} here and {offered} at rank 0" in reason
    assert re.search(text, reason)


def test_a_cast_that_there_is_not_is_refused(worker: WorkerAgent) -> None:
    cast: Any = "trainer"
    with pytest.raises(ConfigError, match="cast 'trainer': must be 'worker', or None"):
        worker.attach({"w": torch.zeros(1)}, cast=cast)
