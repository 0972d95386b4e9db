"""Agents made by hand for tests of the broker: raw sockets, and brokers to speak with.

Run as a script, this file is an agent in a process of its own (see `agent_main`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

import msgspec
import zmq

from tensorlease.agents.live import LiveLock
from tensorlease.agents.process import this_process
from tensorlease.broker.config import BrokerConfig, Limits
from tensorlease.broker.queries import Status
from tensorlease.broker.server import Broker
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import decode_from_broker, encode
from tensorlease.protocol.limits import PROTOCOL_VERSION
from tensorlease.protocol.records import Distribution, QueryKind, TakeNote

M = TypeVar("M", bound=m.FromBroker)
SPOKEN = (PROTOCOL_VERSION, PROTOCOL_VERSION)
DEADLINE_S = 10.0


def new_instance() -> str:
    return secrets.token_hex(8)


def worker_hello(
    replica: str = "r0", *, instance: str = "", session: int = 1, locked: bool = False
) -> m.WorkerHello:
    return m.WorkerHello(
        session=session,
        protocol=SPOKEN,
        instance=instance or new_instance(),
        channel="policy",
        replica=replica,
        member=0,
        size=1,
        host="host",
        device="cpu:0",
        processes=[this_process()],
        locked=locked,
        software="test",
        version=0,
        torn=False,
        committed=None,
        round=None,
        out=[],
        mappings=[],
        take=TakeNote([], [], False, []),
    )


def trainer_hello(*, instance: str = "", session: int = 1) -> m.TrainerHello:
    return m.TrainerHello(
        session=session,
        protocol=SPOKEN,
        instance=instance or new_instance(),
        channel="policy",
        group="group",
        rank=0,
        world_size=1,
        distribution=Distribution.COLOCATED,
        host="host",
        device="cpu:0",
        processes=[this_process()],
        locked=False,
        software="test",
        last_call=0,
        rounds=[],
    )


class Raw:
    """A DEALER and nothing else."""

    # All that were made; the fixture closes them, whatever became of the test.
    made: ClassVar[list[Raw]] = []

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], url: str, id: bytes = b"", hwm: int = 0
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        if id:
            self.socket.setsockopt(zmq.ROUTING_ID, id)
        self.socket.connect(url)
        self.made.append(self)

    def send(self, message: m.FromAgent, *body: bytes) -> None:
        self.socket.send_multipart([encode(message), *body])

    def receive_any(self, timeout_s: float = DEADLINE_S) -> tuple[m.FromBroker, bytes]:
        if not self.socket.poll(round(timeout_s * 1000)):
            raise TimeoutError(f"no message in {timeout_s} s")
        frames = self.socket.recv_multipart()
        return decode_from_broker(frames[0]), frames[1] if len(frames) > 1 else b""

    def receive(self, kind: type[M], timeout_s: float = DEADLINE_S) -> M:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            message, _ = self.receive_any(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message

    def join(self, hello: m.TrainerHello | m.WorkerHello) -> m.Welcome:
        self.send(hello)
        message, _ = self.receive_any()
        assert isinstance(message, m.Welcome), message
        return message

    def beat(self) -> None:
        self.send(m.Beat(1))
        self.receive(m.BeatOk)

    def status(self) -> Status:
        return msgspec.json.decode(self.ask(QueryKind.STATUS)[1], type=Status)

    def ask(self, kind: QueryKind, channel: str = "", version: int = 0) -> tuple[m.Reply, bytes]:
        self.send(m.Query(7, kind, channel, version))
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message, body = self.receive_any(max(0.0, deadline - time.monotonic()))
            if isinstance(message, m.Reply):
                return message, body

    def close(self) -> None:
        self.socket.close()


def eventually(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> float:
    """Waits until the condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "the condition never held"
        threading.Event().wait(0.01)
    return time.monotonic() - began


# ---------------------------------------------------------------- brokers and agents


class Threaded:
    """A broker with a loop and a thread of its own."""

    def __init__(self, config: BrokerConfig, environ: dict[str, str] | None = None) -> None:
        self.broker: Broker
        self.loop: asyncio.AbstractEventLoop
        self.error: BaseException | None = None
        self.sent: list[tuple[str, str]] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config, environ or {}))
        self._thread.start()
        assert self._started.wait(DEADLINE_S)

    def _run(self, config: BrokerConfig, environ: dict[str, str]) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.broker = Broker(
                config, environ=environ, seam=lambda what, name: self.sent.append((what, name))
            )
            serving = asyncio.ensure_future(self.broker.serve())
            waiting = asyncio.ensure_future(self.broker.started.wait())
            await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self._started.set()
            await serving

        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001
            self.error = error
        finally:
            self._started.set()

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # It has ended already.
            self.call(self.broker.stop)
        self.join()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def config_for(url: str, limits: Limits | None = None) -> BrokerConfig:
    return BrokerConfig(endpoints=(url,), limits=limits or Limits(max_agents=64))


class Child:
    """A process of ours, ended with the test."""

    def __init__(self, *words: str, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, str(errors)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        _, errors = self.process.communicate()
        # For the report of a test that failed.
        sys.stderr.write(f"pid {self.pid}, exit code {self.process.returncode}:\n{errors}")


Spawn = Callable[..., Child]


def broker_process(spawn: Spawn, url: str, *flags: str, **options: object) -> Child:
    """A broker in its own process; it listens when this returns."""
    child = spawn("-m", "tensorlease.cli", "broker", "--endpoint", url, *flags, **options)
    eventually(lambda: child.process.poll() is not None or listens(url))
    return child


def listens(url: str) -> bool:
    """Whether anybody accepts connections there; a stale socket does not."""
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(url.removeprefix("ipc://"))


def agent_process(
    spawn: Spawn, url: str, replica: str, mode: str = "plain", **more: object
) -> Child:
    """A worker in its own process; its first line says what its Hello was answered."""
    return spawn(__file__, url, replica, mode)


def agent_main(url: str, replica: str, mode: str) -> None:
    """Says Hello (again while refused), prints each message it gets, and answers nothing."""
    instance = new_instance()
    with zmq.Context() as context:
        if mode == "stranger":
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        if mode in ("locked", "leaving"):
            LiveLock(f"{url.removeprefix('ipc://')}.live", instance).acquire()
        locked = mode in ("locked", "leaving")
        agent = Raw(context, url, hwm=1)
        while True:
            agent.send(worker_hello(replica, instance=instance, locked=locked))
            message, _ = agent.receive_any()
            say(f"{type(message).__name__} {instance}")
            if not (isinstance(message, m.Refused) and message.retry and mode == "insist"):
                break
            threading.Event().wait(0.1)
        if mode == "leaving":
            agent.send(m.Bye(1))
        for _ in range(100 if mode == "chatty" else 0):
            agent.send(m.Beat(1))
        while True:
            if not agent.socket.poll(1000):
                agent.send(m.Beat(1))
                continue
            message, _ = agent.receive_any()
            if isinstance(message, m.Offered):
                say(f"Offered {message.number}")
            elif not isinstance(message, m.BeatOk | m.Unmap):
                say(type(message).__name__)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    agent_main(*sys.argv[1:])
