"""No call waits without a limit, also where the broker lives and does not answer."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from tensorlease.agents import RoundHandle, TrainerAgent, WorkerAgent
from tensorlease.agents import agent as agent_module
from tensorlease.agents.connection import Owner
from tensorlease.agents.results import Milestone
from tensorlease.agents.ring_round import RingRound
from tensorlease.protocol.errors import DeadlineError, NoBrokerError, TensorleaseError

from ..broker.raw_agents import eventually
from ..procs import Spawned

torch = pytest.importorskip("torch")

NEVER_WAITS = {
    "TrainerAgent": {"may_write"},
    "WorkerAgent": {"on_abort", "on_commit", "on_prepare", "stop"},
    "RoundHandle": {"fail", "forget", "note_released", "note_stuck", "skip"},
    "Milestone": {"fail", "reach"},
    "RingRound": {"flush", "repeat"},
}
"""Public methods that return at once, whatever the broker does."""
CONNECTS = {
    "TrainerAgent": {"register"},
    "WorkerAgent": {"attach", "attach_loader", "attend", "on_stage"},
}
"""Those that wait for nothing but a broker, within the `connect_timeout` of their agent."""
BY_THEIR_ROUND = {"RingRound": {"send", "send_all"}}
"""Those of a round, whose limit was given to `open_round`."""
UNTIL_STOPPED = {"WorkerAgent": {"run", "versions"}}
"""Those that work until they are told to stop; their documentation says how."""

LIMIT_S = 0.2
SLACK_S = 1.5


def public(kind: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        # What the connection calls is not the application's.
        if not name.startswith("_") and name not in vars(Owner):
            yield name, member


@pytest.mark.parametrize("kind", [TrainerAgent, WorkerAgent, RoundHandle, Milestone, RingRound])
def test_every_public_method_that_waits_takes_a_limit_or_says_what_ends_it(kind: type) -> None:
    at_once = NEVER_WAITS.get(kind.__name__, set())
    connects = CONNECTS.get(kind.__name__, set())
    stopped = UNTIL_STOPPED.get(kind.__name__, set())
    methods = dict(public(kind))
    assert at_once | connects | stopped <= set(methods)
    for name, method in methods.items():
        parameters = inspect.signature(method).parameters
        documented = inspect.getdoc(method) or ""
        if name in stopped:
            assert "`stop`" in documented and "`close`" in documented, name
        elif name in connects:
            assert "connect_timeout" in inspect.signature(kind).parameters
            assert "NoBrokerError" in documented, name
        elif name in BY_THEIR_ROUND.get(kind.__name__, ()):
            assert "timeout" in inspect.signature(TrainerAgent.open_round).parameters
            assert "DeadlineError" in documented or "See `send`" in documented, name
        elif name not in at_once:
            assert "timeout" in parameters, f"{kind.__name__}.{name} has no limit"


def within(call: Callable[[], object], limit_s: float) -> object:
    """What a call returns or raises, which it has to in time."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except TensorleaseError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(limit_s + SLACK_S)
    assert outcome, f"it still waits after {time.monotonic() - began:.1f} s"
    return outcome[0]


def coroutine(made: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
    return lambda: asyncio.run(made())


async def first(worker: WorkerAgent) -> int | None:
    async for version in worker.versions():
        return version
    return None


def test_every_call_returns_or_raises_in_time_while_the_broker_is_stopped(
    start_broker: Callable[..., Spawned], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "GOODBYE_S", LIMIT_S)
    broker = start_broker()
    trainer = TrainerAgent("policy", endpoint=url)
    worker = WorkerAgent("policy", endpoint=url, replica="a")
    buffers = trainer.register({"w": torch.ones(3)})
    worker.attach({"w": torch.zeros(3)})
    # Not before they have found it, which may take long on a busy machine.
    trainer._connect_timeout = worker._connect_timeout = LIMIT_S
    broker.stop()
    handle = trainer.publish_nowait(1)
    late = within(lambda: trainer.publish_nowait(2, timeout=LIMIT_S), LIMIT_S)
    assert isinstance(late, DeadlineError) and "version 2 was not opened" in str(late)
    calls: dict[str, Callable[[], object]] = {
        "publish": lambda: trainer.publish(2, timeout=LIMIT_S),
        "apublish": coroutine(lambda: trainer.apublish(2, timeout=LIMIT_S)),
        "result": lambda: handle.result(LIMIT_S),
        "released": lambda: handle.released.wait(LIMIT_S),
        "wait_writable": lambda: trainer.wait_writable(LIMIT_S),
        "snapshot": lambda: trainer.publish_nowait(2, snapshot=True, timeout=LIMIT_S),
        "void": lambda: trainer.void(handle, timeout=LIMIT_S),
        "wait_ready": lambda: trainer.wait_ready(timeout=LIMIT_S),
        "unregister": lambda: trainer.unregister(buffers, timeout=LIMIT_S),
        "wait_for": lambda: worker.wait_for(1, LIMIT_S),
    }
    for name, call in calls.items():
        assert isinstance(within(call, LIMIT_S), DeadlineError), name
    assert within(lambda: trainer.register({"v": torch.ones(1)}), LIMIT_S) is not None
    assert within(lambda: worker.step(LIMIT_S), LIMIT_S) is None
    assert within(coroutine(lambda: worker.astep(LIMIT_S)), LIMIT_S) is None
    for run in (worker.run, coroutine(lambda: first(worker))):
        threading.Timer(LIMIT_S, worker.stop).start()
        assert within(run, LIMIT_S) in (0, None)
    new = TrainerAgent(endpoint=url, connect_timeout=LIMIT_S)
    other = WorkerAgent(endpoint=url, connect_timeout=LIMIT_S)
    for connect in (new.register, other.attach):
        error = within(partial(connect, {"w": torch.ones(1)}), LIMIT_S)
        assert isinstance(error, NoBrokerError) and "is it stopped?" in str(error)
    for close in (worker.close, trainer.close, new.close, other.close):
        assert within(partial(close, LIMIT_S), 2 * LIMIT_S) is None
    # The goodbyes go on behind, until the broker answers them.
    broker.go_on()
    eventually(lambda: all(thread.name != "tensorlease" for thread in threading.enumerate()))


def test_the_late_answer_to_a_call_that_gave_up_is_not_given_to_the_next(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    broker = start_broker()
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        first_one = trainer.register({"v": torch.ones(3)})
        weights, copy = torch.zeros(3), torch.zeros(3)
        trainer.register({"w": weights})
        worker.attach({"w": copy})
        thread = threading.Thread(target=worker.run)
        thread.start()
        trainer.wait_ready(1, timeout=20.0)
        broker.stop()
        with pytest.raises(DeadlineError):
            trainer.wait_ready(2, timeout=LIMIT_S)
        with pytest.raises(DeadlineError):
            trainer.unregister(first_one, timeout=LIMIT_S)
        abandoned = trainer.publish_nowait(1)
        with pytest.raises(DeadlineError):
            abandoned.result(LIMIT_S)
        broker.go_on()
        for version in range(2, 5):
            weights.fill_(version)
            result = trainer.publish(version, timeout=20.0)
            assert (result.version, result.ok, copy.tolist()) == (version, True, [version] * 3)
        assert abandoned.result(1.0).version == 1
        # Asked again, it is answered anew.
        trainer.unregister(first_one, timeout=10.0)
        assert len(os.listdir(os.environ["TENSORLEASE_SHM_DIR"])) == 1
        worker.stop()
        thread.join(10.0)
        eventually(lambda: trainer.may_write())
