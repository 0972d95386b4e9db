"""The fence: steps that wait for readers, and spans in which who is late is served."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import StillLeasedError, TrainerAgent, WorkerAgent
from tensorlease.protocol.errors import ClosedError, ConfigError, DeadlineError, RefusedError
from tensorlease.protocol.records import Fate, Outcome

from .. import procs
from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawn, Spawned
from .conftest import StartWorker

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from tensorlease.agents.guard import Guard
    from tensorlease.agents.work import CopyWork

torch = pytest.importorskip("torch")


@pytest.fixture
def trainer(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url)
    yield agent
    agent.close(timeout=0.5)


class Gate:
    """A prepare hook that waits until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, _: object) -> None:
        self.entered.set()
        assert self.go_on.wait(20.0)

    def wait_for(self, trainer: TrainerAgent) -> None:
        """Waits until a worker is at it, and the trainer has heard who takes part."""
        assert self.entered.wait(10.0)
        calls = trainer._core.state.calls
        eventually(lambda: all(call.receivers or call.ended for call in calls.values()))


def parameter(value: float = 1.0, count: int = 3) -> Parameter:
    made: Parameter = torch.nn.Parameter(torch.full((count,), value))
    made.grad = torch.ones(count)
    return made


# ---------------------------------------------------------------- guarded steps


def test_a_guarded_step_waits_until_every_worker_has_read(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, target, gate = parameter(5.0), torch.zeros(3), Gate()
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights})
    start_worker("a", {"w": target}, gate)
    trainer.wait_ready()
    trainer.guard(optimizer)
    handle = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert weights.tolist() == [5.0] * 3
    gate.go_on.set()
    stepping.join(10.0)
    assert weights.tolist() == [4.0] * 3
    assert handle.result(10.0).ok
    assert target.tolist() == [5.0] * 3


def test_a_step_that_waited_in_vain_names_the_holder_and_has_not_run(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, gate = parameter(5.0), Gate()
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights})
    worker = start_worker("a", {"w": torch.zeros(3)}, gate)
    trainer.wait_ready()
    trainer.guard(optimizer, timeout=0.1)
    handle = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    with pytest.raises(StillLeasedError, match=r"step did not run.*a/0 \(pid \d+\)") as caught:
        optimizer.step()
    assert weights.tolist() == [5.0] * 3
    assert [holder.instance for holder in caught.value.holders] == [worker.instance]
    assert caught.value.handles == [handle]
    assert isinstance(caught.value, TimeoutError)
    gate.go_on.set()
    handle.released.wait(10.0)
    optimizer.step()
    assert weights.tolist() == [4.0] * 3


def test_a_step_that_cannot_wait_runs_after_void_and_the_next_publish_works(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, target, gate = parameter(5.0), torch.zeros(3), Gate()
    aborted: list[tuple[int, str]] = []
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights})
    worker = start_worker("a", {"w": target}, gate)
    worker.on_abort(lambda info, reason, torn: aborted.append((info.version, reason)))
    trainer.wait_ready()
    trainer.guard(optimizer, timeout=0.1)
    handle = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    with pytest.raises(StillLeasedError, match=r"trainer.void\(1\)"):
        optimizer.step()
    assert trainer.void(handle) is False
    optimizer.step()
    assert weights.tolist() == [4.0] * 3
    result = handle.result(10.0)
    assert (result.outcome, result.receivers["a/0"].fate) == (Outcome.FAILED, Fate.ABORTED)
    assert (worker.version, target.tolist()) == (0, [0.0] * 3)
    gate.go_on.set()
    assert trainer.publish(2, timeout=20.0).ok
    assert [(version, "void" in reason) for version, reason in aborted] == [(1, True)]
    assert target.tolist() == [4.0] * 3


def test_a_worker_that_was_reading_when_a_step_could_not_wait_is_torn_until_the_next_version(
    trainer: TrainerAgent, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, target, reading = parameter(5.0), torch.zeros(3), Gate()
    aborted: list[bool] = []
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights})
    worker = start_worker("a", {"w": target})
    worker.on_abort(lambda info, reason, torn: aborted.append(torn))
    copy = worker._intake.copy

    def copy_slowly(work: CopyWork) -> None:
        reading(work)
        copy(work)

    with monkeypatch.context() as patch:
        patch.setattr(worker._intake, "copy", copy_slowly)
        trainer.wait_ready()
        trainer.guard(optimizer, timeout=0.1)
        handle = trainer.publish_nowait(1)
        reading.wait_for(trainer)
        with pytest.raises(StillLeasedError, match=r"a/0 \(pid"):
            optimizer.step()
        assert trainer.void(1) is False
        optimizer.step()
        reading.go_on.set()
        result = handle.result(10.0)
        assert (result.outcome, result.receivers["a/0"].fate) == (Outcome.FAILED, Fate.ABORTED)
        eventually(lambda: aborted)
    assert aborted == [True]
    assert (worker.torn, worker.version, trainer.last_version) == (True, 0, 0)
    assert trainer.publish(2, timeout=20.0).ok
    assert (worker.torn, worker.version, target.tolist()) == (False, 2, [4.0] * 3)


def test_schedulers_and_closures_and_several_optimizers_work_as_ever(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    first, second = parameter(1.0), parameter(2.0)
    sgd, lbfgs = torch.optim.SGD([first], lr=1.0), torch.optim.LBFGS([second], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
    trainer.register({"first": first, "second": second})
    target = {"first": torch.zeros(3), "second": torch.zeros(3)}
    start_worker("a", target)
    guards = [trainer.guard(sgd), trainer.guard(lbfgs)]
    seen: list[float] = []

    def closure() -> float:
        assert trainer._core.leased(trainer._registry.numbers) == []
        lbfgs.zero_grad()
        loss: Tensor = second.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())

    for version in (1, 2, 3):
        handle = trainer.publish_nowait(version)
        sgd.step()
        lbfgs.step(closure)
        scheduler.step()
        assert handle.result(10.0).ok
        seen.append(first[0].item())
    assert seen == [0.0, -0.5, -0.75]
    assert all(guard.active for guard in guards)


def test_whatever_calls_hooks_before_its_steps_can_be_guarded(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights = torch.ones(3)

    class Stepper:
        """An optimizer of somebody's own."""

        def __init__(self) -> None:
            self.hooks: list[Callable[..., None]] = []

        def register_step_pre_hook(self, hook: Callable[..., None]) -> Stepper:
            self.hooks.append(hook)
            return self

        def remove(self) -> None:
            self.hooks.clear()

        def step(self) -> None:
            for hook in self.hooks:
                hook(self)
            weights.add_(1.0)

    gate, stepper = Gate(), Stepper()
    trainer.register({"w": weights})
    start_worker("a", {"w": torch.zeros(3)}, gate)
    trainer.wait_ready()
    guard = trainer.guard(stepper, timeout=0.05)
    trainer.publish_nowait(1)
    gate.wait_for(trainer)
    with pytest.raises(StillLeasedError):
        stepper.step()
    guard.remove()
    assert stepper.hooks == []
    gate.go_on.set()
    with pytest.raises(ConfigError, match=r"a Parameter has no register_step_pre_hook.*wait_writ"):
        trainer.guard(parameter())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_removed_guard_guards_no_more_and_close_removes_all(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    weights, gate = parameter(5.0), Gate()
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": weights})
        start_worker("a", {"w": torch.zeros(3)}, gate)
        trainer.wait_ready()
        with trainer.guard(optimizer, timeout=0.05) as guard:
            handle = trainer.publish_nowait(1)
            gate.wait_for(trainer)
            with pytest.raises(StillLeasedError):
                optimizer.step()
        assert not guard.active
        optimizer.step()  # at the user's own risk
        assert weights.tolist() == [4.0] * 3
        gate.go_on.set()
        handle.result(10.0)
        last = trainer.guard(optimizer)
    assert not last.active
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    optimizer.step()
    with pytest.raises(ClosedError):
        trainer.guard(optimizer)


def test_a_guard_keeps_neither_model_nor_optimizer_nor_trainer_alive(
    broker: Threaded, url: str
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = TrainerAgent("policy", endpoint=url)
    guard = trainer.guard(optimizer)
    alive = weakref.ref(model), weakref.ref(optimizer)
    gc.disable()
    try:
        del model, optimizer
        assert [thing() for thing in alive] == [None, None]
    finally:
        gc.enable()
    trainer.close()
    assert not guard.active
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    made = [TrainerAgent("policy", endpoint=url)]
    made[0].guard(optimizer)
    gone = weakref.ref(made[0])
    with pytest.warns(ResourceWarning, match="never closed"):
        made.clear()
    assert gone() is None
    optimizer.step()


def test_without_a_broker_a_step_waits_up_to_its_limit_and_says_why(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    broker = start_broker(recovery=5.0)
    worker = spawn(serve_slowly, url)
    weights = parameter(5.0)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": weights})
        trainer.wait_ready()
        trainer.guard(optimizer, timeout=0.5)
        handle = trainer.publish_nowait(1)
        assert worker.hear() == "preparing"
        eventually(lambda: trainer._core.state.calls[handle.call].receivers)
        broker.kill()
        eventually(lambda: not trainer.connected)
        began = time.monotonic()
        with pytest.raises(StillLeasedError, match="no broker can say") as caught:
            optimizer.step()
        assert time.monotonic() - began >= 0.5
        assert [holder.pid for holder in caught.value.holders] == [worker.pid]
        assert weights.tolist() == [5.0] * 3
        start_broker(recovery=5.0)
        worker.say("go on")
        assert handle.result(20.0).ok
        optimizer.step()
    assert worker.result() == [5.0] * 3


def serve_slowly(url: str) -> list[float]:
    weights = torch.zeros(3)

    def prepare(_: object) -> None:
        procs.say("preparing")
        procs.hear()

    with WorkerAgent("policy", endpoint=url, replica="a") as worker:
        worker.on_prepare(prepare)
        worker.attach({"w": weights})
        worker.run(until=1)
    return [float(x) for x in weights]


def test_steps_written_by_hand_wait_for_the_same(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, target, gate = torch.full((3,), 5.0), torch.zeros(3), Gate()
    trainer.register({"w": weights})
    start_worker("a", {"w": target}, gate)
    trainer.wait_ready()
    trainer.wait_writable(timeout=0.0)
    handle = trainer.publish_nowait(1)
    gate.wait_for(trainer)
    assert not trainer.may_write()
    with pytest.raises(StillLeasedError, match="must not be written.*a/0"):
        trainer.wait_writable(timeout=0.05)
    gate.go_on.set()
    trainer.wait_writable(timeout=10.0)
    weights.zero_()
    assert handle.result(10.0).ok
    assert target.tolist() == [5.0] * 3


# ---------------------------------------------------------------- who comes late


def test_in_an_unchanged_span_a_worker_that_joins_late_gets_the_last_version(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights = torch.full((3,), 57.0)
    trainer.register({"w": weights})
    assert trainer.publish(57, min_replicas=0).outcome is Outcome.EMPTY
    with trainer.unchanged() as span:
        assert span.version == 57
        for name in ("a", "b"):
            target = torch.zeros(3)
            worker = start_worker(name, {"w": target})
            assert worker.wait_for(57, timeout=10.0) == 57
            assert target.tolist() == [57.0] * 3
        eventually(lambda: len(span.results) == 2)
        assert [list(result.receivers) for result in span.results] == [["a/0"], ["b/0"]]
        assert {result.version for result in span.results} == {57}
        assert not trainer.may_write()
    assert span.version == 0
    assert trainer.last_version == 57
    assert trainer.may_write()


def test_by_whichever_way_a_version_came_both_sides_say_the_same_number(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, target = torch.full((3,), 3.0), torch.zeros(3)
    trainer.register({"w": weights})
    worker = start_worker("a", {"w": target})
    seen: list[tuple[object, object, object, float]] = []

    def ask() -> None:
        current = trainer.replicas["a"].current
        seen.append((worker.version, trainer.last_version, current, target[0].item()))

    assert trainer.publish_nowait(3, snapshot=True).result(10.0).ok
    ask()
    weights.fill_(4.0)
    assert trainer.publish(4).ok
    ask()
    weights.fill_(5.0)
    with trainer.unchanged(5):
        worker.wait_for(5, timeout=10.0)
    ask()
    assert seen == [(3, 3, 3, 3.0), (4, 4, 4, 4.0), (5, 5, 5, 5.0)]
    assert {type(version) for asked in seen for version in asked[:3]} == {int}


def test_outside_of_a_span_a_late_worker_hears_that_it_has_no_version(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    trainer.register({"w": torch.ones(3)})
    trainer.publish(57, min_replicas=0)
    worker = start_worker("a", {"w": torch.zeros(3)})
    trainer.wait_ready()
    began = time.monotonic()
    late = r"not at version 57 after 0.2 s.*at version 0, and no trainer has"
    with pytest.raises(DeadlineError, match=late):
        worker.wait_for(57, timeout=0.2)
    assert time.monotonic() - began < 2.0
    with trainer.unchanged():
        assert worker.wait_for(57, timeout=10.0) == 57


def test_a_trainer_that_starts_from_a_checkpoint_says_what_its_weights_are(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    target = torch.zeros(3)
    trainer.register({"w": torch.full((3,), 57.0)})
    with trainer.unchanged(57):
        worker = start_worker("a", {"w": target})
        assert worker.wait_for(57, timeout=10.0) == 57
    assert target.tolist() == [57.0] * 3
    assert trainer.last_version == 57
    assert trainer.publish(58).ok
    with pytest.raises(ConfigError, match="version 0"):
        trainer.unchanged(0)
    with pytest.raises(RefusedError, match="at version 58 already"), trainer.unchanged(57):
        pass


def test_between_guarded_steps_who_comes_late_is_served_and_the_step_waits_for_it(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights, target, gate = parameter(5.0), torch.zeros(3), Gate()
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights, "frozen": frozen})
    start_worker("first", {"w": torch.zeros(3)})
    trainer.guard(optimizer)
    assert trainer.publish(1).ok
    worker = start_worker("late", {"w": target}, gate)
    gate.wait_for(trainer)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    stepping.join(0.1)
    assert stepping.is_alive()
    gate.go_on.set()
    stepping.join(10.0)
    eventually(lambda: worker.version == 1)
    assert target.tolist() == [5.0] * 3
    # The step has ended the span: the next one to come waits for the next version.
    other = start_worker("later", {"w": torch.zeros(3)})
    trainer.wait_ready(3)
    with pytest.raises(DeadlineError, match="at version 0"):
        other.wait_for(1, timeout=0.2)
    assert trainer.publish(2).ok
    assert other.version == 2


@pytest.mark.parametrize(
    "how", ["a tensor nobody guards", "by request", "may_write", "one removed"]
)
def test_a_trainer_whose_weights_may_change_unguarded_serves_nobody_late(
    how: str, trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    first, second = parameter(1.0), parameter(2.0)
    named = {"first": first, "second": second}
    trainer.register(named)
    trainer.guard(torch.optim.SGD([first], lr=1.0))
    optimizer = torch.optim.SGD([second], lr=1.0)
    guards: list[Guard] = []
    if how != "a tensor nobody guards":
        guards.append(trainer.guard(optimizer, serve_late=how != "by request"))
    trainer.publish(1, min_replicas=0)
    if how == "may_write":
        assert trainer.may_write()
    elif how == "one removed":
        guards[0].remove()
    worker = start_worker("late", {name: torch.zeros(3) for name in named})
    trainer.wait_ready()
    with pytest.raises(DeadlineError):
        worker.wait_for(1, timeout=0.2)


def test_in_a_declared_span_a_guarded_step_is_refused(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights = parameter(5.0)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    trainer.register({"w": weights})
    trainer.guard(optimizer)
    with trainer.unchanged():
        for write in (optimizer.step, trainer.wait_writable):
            with pytest.raises(ConfigError, match="has promised"):
                write()
    assert weights.tolist() == [5.0] * 3
    optimizer.step()
    assert weights.tolist() == [4.0] * 3


def test_leaving_a_span_waits_for_who_is_being_served_or_names_it(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    gate = Gate()
    trainer.register({"w": torch.ones(3)})
    trainer.publish(1, min_replicas=0)
    target = torch.zeros(3)
    with (
        pytest.raises(StillLeasedError, match="version 1 .*who came late is still under way"),
        trainer.unchanged(timeout=0.1),
    ):
        start_worker("a", {"w": target}, gate)
        gate.wait_for(trainer)
    assert not trainer.may_write()
    letting_go = threading.Timer(0.2, gate.go_on.set)
    with trainer.unchanged(timeout=10.0):
        letting_go.start()
    assert trainer.may_write()
    eventually(lambda: trainer.replicas["a"].current == 1)
    assert target.tolist() == [1.0] * 3
    letting_go.join()


def test_a_span_that_an_exception_ends_raises_that_one(
    trainer: TrainerAgent, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    trainer.register({"w": torch.ones(3)})
    trainer.publish(1, min_replicas=0)
    with pytest.raises(KeyError), trainer.unchanged(timeout=0.05):
        start_worker("a", {"w": torch.zeros(3)}, gate)
        gate.wait_for(trainer)
        raise KeyError
    assert "still under way" in caplog.text
    gate.go_on.set()


def test_a_late_worker_that_fails_is_tried_again_and_not_in_a_tight_loop(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    times: list[float] = []

    def prepare(_: object) -> None:
        times.append(time.monotonic())
        if len(times) < 2:
            raise RuntimeError("not now")

    trainer.register({"w": torch.ones(3)})
    trainer.publish(1, min_replicas=0)
    with trainer.unchanged() as span:
        worker = start_worker("a", {"w": torch.zeros(3)}, prepare)
        assert worker.wait_for(1, timeout=20.0) == 1
    assert len(times) == 2
    assert times[1] - times[0] >= 1.0
    assert [result.ok for result in span.results] == [False, True]


def test_a_publish_comes_before_who_is_late(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    weights = torch.full((3,), 1.0)
    target = torch.zeros(3)
    trainer.register({"w": weights})
    trainer.publish(1, min_replicas=0)
    with trainer.unchanged() as span:
        worker = start_worker("a", {"w": target})
        result = trainer.publish(2, timeout=20.0)
        assert result.ok
        assert worker.version == 2
        assert span.version == 2


def test_several_ranks_are_refused_a_span_and_told_the_way_out(url: str) -> None:
    with (
        TrainerAgent("policy", rank=0, world_size=2, endpoint=url) as trainer,
        pytest.raises(ConfigError, match="2 ranks.*publish.the same version. on all ranks"),
    ):
        trainer.unchanged()


def test_a_trainer_may_be_closed_in_its_span(broker: Threaded, url: str) -> None:
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(3)})
    with trainer.unchanged():
        trainer.close()
    with pytest.raises(ClosedError):
        trainer.unchanged()
