"""Sessions, the poll thread, and what becomes of both: with a real broker, or with none."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.connection import Stage
from tensorlease.protocol.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    NoBrokerError,
    RefusedError,
    TensorleaseError,
)

from .. import procs
from ..broker.raw_agents import Threaded, config_for, eventually
from ..procs import Spawn, Spawned

torch = pytest.importorskip("torch")


@pytest.fixture
def trainer(url: str) -> Iterator[TrainerAgent]:
    with TrainerAgent("policy", endpoint=url, connect_timeout=10.0) as agent:
        yield agent


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


# ---------------------------------------------------------------- no broker


def test_without_a_broker_a_call_says_where_it_looked_and_what_starts_one(url: str) -> None:
    began = time.monotonic()
    with (
        TrainerAgent(endpoint=url, connect_timeout=0.3) as trainer,
        pytest.raises(
            NoBrokerError,
            match=r"(?s)no broker answers at ipc://.*\n  tensorlease broker --endpoint ipc://",
        ),
    ):
        trainer.wait_ready()
    assert time.monotonic() - began < 5.0


def test_without_a_broker_nothing_was_moved_by_register(url: str) -> None:
    weights = torch.ones(4)
    address = weights.data_ptr()
    with TrainerAgent(endpoint=url, connect_timeout=0.1) as trainer:
        with pytest.raises(NoBrokerError):
            trainer.register({"w": weights})
        assert weights.data_ptr() == address


def test_an_agent_waits_for_a_broker_that_starts_late(url: str, trainer: TrainerAgent) -> None:
    done = threading.Event()

    def wait() -> None:
        trainer.register({"w": torch.ones(4)})
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: "tensorlease" in thread_names())
    broker = Threaded(config_for(url))
    assert done.wait(10.0)
    thread.join()
    trainer.close()
    broker.stop()


@pytest.mark.root
def test_a_socket_that_may_not_be_opened_is_said_at_once(url: str, spawn: Spawn) -> None:
    broker = procs.broker_process(spawn, url)
    os.chmod(Path(url.removeprefix("ipc://")).parent, 0o711)
    text, seconds = spawn(as_another_user, url).result()
    assert "permission denied" in text
    assert url.removeprefix("ipc://") in text
    assert seconds < 5.0
    assert broker.alive


def as_another_user(url: str) -> tuple[str, float]:
    # Made before: another user may not read the modules of this Python.
    worker = WorkerAgent(endpoint=url, connect_timeout=20.0)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    began = time.monotonic()
    try:
        worker.attach({"w": torch.ones(1)})
    except NoBrokerError as error:
        return str(error), time.monotonic() - began
    finally:
        worker.close()
    return "it connected", 0.0


def test_an_address_that_cannot_work_is_refused_when_the_agent_is_made() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        WorkerAgent(endpoint="ipc://relative")


def test_closing_without_a_broker_does_not_hang(url: str) -> None:
    trainer = TrainerAgent(endpoint=url, connect_timeout=0.1)
    with pytest.raises(NoBrokerError):
        trainer.wait_ready()
    began = time.monotonic()
    trainer.close()
    assert time.monotonic() - began < 3.0


# ---------------------------------------------------------------- refusals


def test_a_taken_place_is_waited_for_and_then_named(broker: Threaded, url: str) -> None:
    with WorkerAgent(endpoint=url, replica="a") as first:
        first.attach({"w": torch.zeros(1)})
        with (
            WorkerAgent(endpoint=url, replica="a", connect_timeout=0.5) as second,
            pytest.raises(RefusedError, match=rf"held by pid {os.getpid()}") as refused,
        ):
            second.attach({"w": torch.zeros(1)})
        assert refused.value.code == "place-taken"


def test_who_leaves_while_it_asks_for_a_taken_place_has_nobody_to_say_goodbye_to(
    broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerAgent(endpoint=url, replica="a") as first:
        first.attach({"w": torch.zeros(1)})
        second = WorkerAgent(endpoint=url, replica="a", connect_timeout=0.5)
        connection = second._connection
        read = connection._read

        def late(ready: Any) -> None:
            if connection.stage is not Stage.GREETING or connection._core.session.leaving:
                read(ready)

        monkeypatch.setattr(connection, "_read", late)
        with pytest.raises(TensorleaseError):
            second.attach({"w": torch.zeros(1)})
        assert connection.stage is Stage.GREETING
        began = time.monotonic()
        second.close()
        assert time.monotonic() - began < 5.0
        eventually(lambda: connection.stage is Stage.ENDED, 5.0)


def test_a_taken_place_is_given_to_who_waits_when_its_holder_leaves(
    broker: Threaded, url: str
) -> None:
    first = WorkerAgent(endpoint=url, replica="a")
    first.attach({"w": torch.zeros(1)})
    joined = threading.Event()
    with WorkerAgent(endpoint=url, replica="a") as second:

        def join() -> None:
            second.attach({"w": torch.zeros(1)})
            joined.set()

        thread = threading.Thread(target=join)
        thread.start()
        eventually(lambda: second._connection.problem is not None)
        assert not joined.is_set()
        first.close()
        assert joined.wait(10.0)
        thread.join()


def test_a_refusal_for_good_ends_every_call_with_the_brokers_words(
    broker: Threaded, url: str
) -> None:
    with (
        TrainerAgent(endpoint=url, rank=0, world_size=2) as first,
        TrainerAgent(endpoint=url, rank=1, world_size=2, distribution="assembled") as second,
    ):
        first.register({"w": torch.ones(1)})
        for _ in range(2):
            with pytest.raises(RefusedError, match="assembled; group .* is colocated") as refused:
                second.register({"w": torch.ones(1)})
            assert refused.value.code == "distribution"


# ---------------------------------------------------------------- the thread


HEAVY = (
    *("aiohttp", "asyncio", "click", "hypothesis", "numpy", "pickle", "prometheus_client", "rich"),
    *("multiprocessing", "torch", "uvloop", "zmq"),
)
"""What `import tensorlease.agents` must not bring into a process."""
HEAVY_WITH_TORCH = (
    *("aiohttp", "click", "hypothesis", "prometheus_client", "rich", "uvloop", "zmq.asyncio"),
    *("torch.distributed.tensor", "torch.utils.data", "tensorlease.broker"),
)
"""What the two agents must not bring where torch is already, unless that has done so."""


def test_importing_the_agents_starts_nothing_and_brings_nothing_heavy() -> None:
    code = f"""
import sys, threading
import tensorlease.agents
assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)
assert threading.active_count() == 1
assert "TrainerAgent" in dir(tensorlease.agents)
import torch
before = set(sys.modules)
tensorlease.agents.TrainerAgent, tensorlease.agents.WorkerAgent
new = set(sys.modules) - before
assert {{"zmq", "msgspec", "tensorlease.agents.trainer"}} <= new
assert not set({HEAVY_WITH_TORCH}) & new, set({HEAVY_WITH_TORCH}) & new
assert len(new) < 150, len(new)
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_importing_the_agents_makes_no_decoder_and_no_dataclass() -> None:
    code = """
import sys, torch
import tensorlease.agents
tensorlease.agents.TrainerAgent, tensorlease.agents.WorkerAgent
from tensorlease.protocol import codec, tables
for made in (codec._from_agent, codec._from_broker, tables._offer_decoder, tables._batch_decoder):
    assert made.cache_info().currsize == 0, made
mine = [(name, module) for name, module in sys.modules.items() if name.startswith("tensorlease.")]
assert len(mine) > 30
slow = [
    f"{name}.{each}"
    for name, module in mine
    for each, kind in vars(module).items()
    if hasattr(kind, "__dataclass_fields__")
]
assert not slow, slow
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_all_agents_of_a_process_share_one_thread_which_ends_with_the_last(
    broker: Threaded, url: str
) -> None:
    agents = [TrainerAgent(f"channel-{n}", endpoint=url) for n in range(3)]
    assert thread_names().count("tensorlease") == 0
    for agent in agents:
        agent.register({"w": torch.ones(1)})
        assert thread_names().count("tensorlease") == 1
    for agent in agents:
        agent.close()
    eventually(lambda: "tensorlease" not in thread_names())
    with TrainerAgent(endpoint=url) as again:
        again.register({"w": torch.ones(1)})
        assert thread_names().count("tensorlease") == 1


def test_a_closed_agent_says_so(broker: Threaded, url: str) -> None:
    worker = WorkerAgent(endpoint=url)
    worker.attach({"w": torch.ones(1)})
    worker.close()
    worker.close()
    with pytest.raises(ClosedError, match="is closed"):
        worker.step()


def test_who_waits_is_woken_when_the_agent_is_closed(broker: Threaded, url: str) -> None:
    trainer = TrainerAgent(endpoint=url)
    trainer.register({"w": torch.ones(1)})
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            trainer.wait_ready(timeout=60.0)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    trainer.close()
    thread.join(10.0)
    assert len(errors) == 1


def test_an_agent_that_was_never_closed_is_named_and_says_goodbye(
    broker: Threaded, url: str
) -> None:
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(1)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del trainer
        gc.collect()
    assert [str(w.message) for w in caught if "never closed" in str(w.message)]
    eventually(lambda: not broker.broker.ledger.state.peers)
    # It has heard so: else it would look for a broker that the test has ended.
    eventually(lambda: all(thread.name != "tensorlease" for thread in threading.enumerate()))


def test_the_agent_beats_while_a_hook_runs(start_broker: Callable[..., Spawned], url: str) -> None:
    start_broker(beat=0.05, silent=0.4)
    with (
        TrainerAgent(endpoint=url) as trainer,
        WorkerAgent(endpoint=url, replica="a") as worker,
    ):
        trainer.register({"w": torch.ones(1)})
        worker.attach({"w": torch.zeros(1)})
        worker.on_prepare(lambda _: threading.Event().wait(1.2))
        handle = trainer.publish_nowait(1)
        assert worker.wait_for(1, 10.0) == 1
        assert handle.result(10.0).ok


# ---------------------------------------------------------------- loss


def test_a_new_session_follows_when_the_broker_is_killed_and_started_again(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    broker = start_broker(recovery=2.0)
    with (
        TrainerAgent(endpoint=url) as trainer,
        WorkerAgent(endpoint=url, replica="a") as worker,
    ):
        weights, copy = torch.zeros(4), torch.zeros(4)
        trainer.register({"w": weights})
        worker.attach({"w": copy})
        thread = threading.Thread(target=worker.run)
        thread.start()
        for version in range(1, 4):
            weights.fill_(version)
            trainer.publish(version, timeout=20.0).raise_for_status()
            assert copy.tolist() == [version] * 4
            broker.kill()
            eventually(lambda: not trainer.connected and not worker.connected, 2.0)
            broker = start_broker(recovery=2.0)
        weights.fill_(9)
        trainer.publish(9, timeout=20.0).raise_for_status()
        assert copy.tolist() == [9] * 4
        worker.close()
        thread.join()


def test_a_round_that_lost_its_broker_is_finished_by_the_next(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    broker = start_broker(recovery=2.0)
    with (
        TrainerAgent(endpoint=url) as trainer,
        WorkerAgent(endpoint=url, replica="a") as worker,
    ):
        copy = torch.zeros(4)
        trainer.register({"w": torch.ones(4)})
        worker.attach({"w": copy})
        inside, go_on = threading.Event(), threading.Event()

        @worker.on_prepare
        def wait(_: object) -> None:
            inside.set()
            assert go_on.wait(20.0)

        thread = threading.Thread(target=worker.run)
        thread.start()
        handle = trainer.publish_nowait(1)
        assert inside.wait(10.0)
        broker.kill()
        go_on.set()
        start_broker(recovery=2.0)
        assert handle.result(20.0).ok
        handle.released.wait(10.0)
        assert copy.tolist() == [1] * 4
        worker.close()
        thread.join()


def test_a_broker_that_is_stopped_is_noticed_by_its_silence(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    broker = start_broker(beat=0.1, silent=0.5)
    with TrainerAgent(endpoint=url, connect_timeout=1.0) as trainer:
        trainer.register({"w": torch.ones(1)})
        broker.stop()
        eventually(lambda: not trainer.connected)
        with pytest.raises(NoBrokerError):
            trainer.wait_ready(timeout=1.0)
        broker.go_on()
        eventually(lambda: trainer.connected)


def test_what_is_said_while_no_broker_is_there_reaches_none_as_fresh(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    broker = start_broker(beat=0.05, silent=0.5)
    with WorkerAgent(endpoint=url, replica="a") as worker:
        worker.attach({"w": torch.zeros(1)})
        broker.kill()
        eventually(lambda: not worker.connected)
        with worker._connection.acting():
            for _ in range(100):
                worker._core.beat()
        assert not worker._connection._outbox
        session = worker._core.session.number
        start_broker(beat=0.05, silent=0.5)
        eventually(lambda: worker.connected)
        assert worker._core.session.number > session


# ---------------------------------------------------------------- other processes


def fork_and_use(url: str) -> tuple[list[str], bool, bool]:
    """A trainer whose child, forked from a running agent, tries to use it and ends."""
    with TrainerAgent("policy", endpoint=url) as trainer, TrainerAgent("idle", endpoint=url):
        trainer.register({"w": torch.ones(4)})
        segments = os.listdir(os.environ["TENSORLEASE_SHM_DIR"])
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            said = []
            for call in (trainer.wait_ready, trainer.may_write, lambda: trainer.publish(1)):
                try:
                    call()
                except ClosedError as error:
                    said.append(str(error))
            trainer.close()
            os.write(write, "\n".join(said).encode())
            sys.exit(0)
        os.close(write)
        with os.fdopen(read) as answers:
            texts = answers.read().splitlines()
        assert os.waitpid(pid, 0)[1] == 0
        kept = os.listdir(os.environ["TENSORLEASE_SHM_DIR"]) == segments != []
        trainer.register({"v": torch.ones(4)})
        lock = trainer._connection._lock
        return texts, kept and trainer.connected, lock is not None and lock.held


def test_a_forked_child_can_neither_use_nor_end_its_parents_agent(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    texts, kept, held = spawn(fork_and_use, url).result()
    assert len(texts) == 3
    assert all("created in another process" in text for text in texts)
    assert kept
    assert held


def child_agent_of_its_own(url: str) -> bool:
    trainer = TrainerAgent("policy", endpoint=url)
    trainer.register({"w": torch.ones(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        with TrainerAgent("other", endpoint=url) as own:
            own.register({"w": torch.ones(4)})
        sys.exit(0)
    ok = os.waitpid(pid, 0)[1] == 0
    trainer.close()
    return ok


def test_a_forked_child_can_have_an_agent_of_its_own(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    assert spawn(child_agent_of_its_own, url).result() is True


FORGETFUL = """
import os, sys, time, torch
from tensorlease.agents import TrainerAgent, WorkerAgent
trainer = TrainerAgent("policy", endpoint=sys.argv[1])
trainer.register({"w": torch.ones(4)})
worker = WorkerAgent("policy", endpoint=sys.argv[1])
worker.attach({"w": torch.zeros(4)})
handle = trainer.publish_nowait(1, min_replicas=0)
child = os.fork()
if child == 0:
    sys.exit(0)  # its end runs the same hooks, and must not end what is the parent's
assert os.waitpid(child, 0)[1] == 0
assert trainer.connected
print(time.monotonic())
"""


@pytest.mark.program
def test_the_interpreters_end_closes_what_is_open_and_does_not_hang(
    start_broker: Callable[..., Spawned], url: str
) -> None:
    start_broker()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", FORGETFUL, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    ending_s = time.monotonic() - float(done.stdout)
    assert ending_s < 25.0
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(1)})
        assert trainer.replicas == {}


def interrupted(url: str) -> str:
    """Serves until a signal; Python's own handler raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with WorkerAgent(endpoint=url, replica="a") as worker:
        worker.attach({"w": torch.zeros(1)})
        try:
            procs.say("serving")
            worker.run()
        except KeyboardInterrupt:
            return "interrupted"
    return "returned"


def test_an_interrupt_passes_through_run_and_the_worker_leaves(
    start_broker: Callable[..., Spawned], spawn: Spawn, url: str
) -> None:
    start_broker()
    worker = spawn(interrupted, url)
    worker.hear()
    worker.signal(signal.SIGINT)
    assert worker.result(10.0) == "interrupted"
    assert worker.join() == 0


async def test_a_coroutine_waits_without_blocking_the_loop(broker: Threaded, url: str) -> None:
    with TrainerAgent(endpoint=url) as trainer:
        await asyncio.to_thread(trainer.register, {"w": torch.ones(1)})
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(DeadlineError, match="no worker has joined"):
            await trainer.apublish(1, timeout=0.5)
        ticking.cancel()
        assert ticks > 5
        trainer.close(timeout=0.1)
