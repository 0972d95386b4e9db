"""Starts the demo's processes, hears what they tell, and ends them: none outlives the demo."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

import msgspec

from tensorlease.protocol.errors import TensorleaseError

from .reports import LIMIT_S, REPLICAS, TRAINERS, Failed, Plan, Report

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_CASCADE_S = 0.5
"""Who dies takes others along (gloo): how long to listen for who was first."""
_GRACE_S = 1.5
"""How long processes may take to end when they are asked to."""


class DemoError(TensorleaseError):
    """The demo cannot go on; says which process failed and how."""


class Child:
    """One process of the demo, by name."""

    def __init__(self, name: str, process: BaseProcess, reports: Connection) -> None:
        self.name = name
        self.process = process
        self.reports: Connection | None = reports
        self.failure = ""
        """What it said of its own failure."""

    def drain(self) -> Iterator[Report]:
        """Yields what it has told and was not heard yet."""
        try:
            while self.reports is not None and self.reports.poll():
                yield msgspec.json.decode(self.reports.recv_bytes(), type=Report)
        except (EOFError, OSError):
            self.reports = None

    @property
    def fate(self) -> str:
        """How it failed; empty while it lives or where it ended well."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"{self.name} (pid {self.process.pid}) was killed by {_signal(-code)}"
        if self.failure:
            return f"{self.name} (pid {self.process.pid}) failed: {self.failure}"
        return f"{self.name} (pid {self.process.pid}) exited with {code}" if code else ""


class Processes:
    """The broker, the trainers and the workers. A context manager: leaving it ends them all.

    Args:
        plan: What they are to do.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._directory = Path(plan.directory)
        self.broker = self._start_broker()
        self._broker_fd = os.pidfd_open(self.broker.pid)
        self._interrupted = False
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self) -> None:
        """Starts trainers and workers.

        They are forked from a process that has imported torch, which takes longer than the rest.
        """
        context = get_context("forkserver")
        # torch says so where numpy is missing, which the demo does not need.
        own = os.environ.get("PYTHONWARNINGS", "")
        quiet = "ignore:Failed to initialize NumPy:UserWarning"
        os.environ["PYTHONWARNINGS"] = f"{own},{quiet}" if own else quiet
        # fully_shard imports torch._dynamo, which makes a directory at once.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{self._plan.directory}/inductor"
        modules = ["tensorlease.demo.trainer", "tensorlease.demo.worker"]
        if self._plan.device == "cpu":
            modules.append("torch._dynamo")  # It looks for GPUs: no forked process could use one.
        context.set_forkserver_preload(modules)
        # Ctrl+C is for the demo alone: who is started while it is ignored goes on ignoring it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, self._interrupt)
        places = [("worker", f"{r}/{m}") for r, size in REPLICAS.items() for m in range(size)]
        places += [("trainer", str(rank)) for rank in range(TRAINERS)]
        for kind, place in places:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(self._plan, kind, place, theirs), name=f"{kind} {place}"
            )
            process.start()
            theirs.close()
            self.children.append(Child(f"{kind} {place}", process, mine))

    def _interrupt(self, *_: object) -> None:
        """Ends the demo, even if what is raised here is lost in a destructor."""
        self._interrupted = True
        raise KeyboardInterrupt

    @property
    def pids(self) -> dict[str, int]:
        """The pid of each process by name."""
        pids = {child.name: child.process.pid or 0 for child in self.children}
        return {"broker": self.broker.pid, **pids}

    def reports(self) -> Iterator[tuple[str, Report]]:
        """Yields what the processes tell, with their names, until all have ended well.

        Raises:
            DemoError: One has failed, by name; or none told anything for too long.
        """
        while True:
            # Asked once: one that ends in between would be waited for in neither way.
            alive = [c for c in self.children if c.process.exitcode is None]
            running = [c for c in self.children if c in alive or c.reports]
            if not running:
                return
            if self._interrupted:
                raise KeyboardInterrupt
            waited = [c.reports for c in running if c.reports is not None]
            ends = [c.process.sentinel for c in alive]
            ready = connection.wait([*waited, *ends, self._broker_fd], LIMIT_S + 10)
            if not ready:
                names = ", ".join(f"{child.name}{self._hangs_in(child)}" for child in running)
                raise DemoError(f"nothing was heard for {LIMIT_S + 10:g} s from {names}")
            if self._broker_fd in ready:
                raise DemoError(f"the broker ended with {self.broker.wait()}{self._last_words()}")
            for child in running:
                for report in child.drain():
                    if isinstance(report, Failed):
                        child.failure = report.text
                    yield child.name, report
            if any(child.fate for child in running):
                raise DemoError(self._verdict())

    def end(self) -> None:
        """Ends all that still run: asks, waits, and kills; within about two seconds.

        Ctrl+C and SIGTERM are ignored from here on: there is nothing left that they could hurry.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + _GRACE_S
        for child in self.children:
            if child.process.exitcode is None:
                child.process.terminate()
        for child in self.children:
            child.process.join(max(0.0, deadline - time.monotonic()))
        for child in self.children:
            if child.process.exitcode is None:
                child.process.kill()
            child.process.join(5)
        _end_fork_server()
        self.broker.terminate()
        try:
            self.broker.wait(max(0.3, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.broker.kill()
            self.broker.wait(5)
        os.close(self._broker_fd)

    def _start_broker(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "tensorlease.cli", "broker", "--endpoint"]
        with open(self._directory / "broker.log", "wb") as log:
            return subprocess.Popen(
                [*command, self._plan.endpoint],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C is for the demo, which ends the broker last.
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no thread was started yet
            )

    def _verdict(self) -> str:
        """Says who failed first: a process that was killed takes others along."""
        deadline = time.monotonic() + _CASCADE_S
        for child in self.children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            for report in child.drain():
                if isinstance(report, Failed):
                    child.failure = report.text
        failed = [child for child in self.children if child.fate]
        failed.sort(key=lambda child: (child.process.exitcode or 0) >= 0)
        also = ", ".join(child.name for child in failed[1:])
        return failed[0].fate + (f"; then also {also}" if also else "")

    def _hangs_in(self, child: Child) -> str:
        """Where its main thread is, by what it has written to its log once it was late."""
        kind, _, place = child.name.partition(" ")
        text = _log_of(self._directory, kind, place).read_text(errors="replace")
        frames = text.rpartition("(most recent call first):")[2].split("\n")[1:3]
        return f" (in {' <- '.join(frame.strip() for frame in frames)})" if any(frames) else ""

    def _last_words(self) -> str:
        lines = (self._directory / "broker.log").read_text(errors="replace").splitlines()
        return f": {lines[-1]}" if lines else ""


def _log_of(directory: Path, kind: str, place: str) -> Path:
    return directory / f"{kind}-{place.replace('/', '-')}.log"


def _run(plan: Plan, kind: str, place: str, reports: Connection) -> None:
    """The life of one process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_end_after_parent, daemon=True).start()
    log = os.open(_log_of(Path(plan.directory), kind, place), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch

    torch.set_num_threads(1)

    def tell(report: Report) -> None:
        reports.send_bytes(msgspec.json.encode(report))
        faulthandler.dump_traceback_later(LIMIT_S + 5, file=log)

    try:
        if kind == "trainer":
            from .trainer import train

            train(plan, int(place), tell)
        else:
            from .worker import serve

            replica, _, member = place.partition("/")
            serve(plan, replica, int(member), REPLICAS[replica], tell)
    except Exception as error:  # noqa: BLE001 - told by name, and ends the process
        traceback.print_exc()
        tell(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _end_fork_server() -> None:
    """Kills the process that the others were forked from: it may still be importing torch."""
    with suppress(OSError):  # Where the kernel does not list children, it ends by itself later.
        for task in Path("/proc/self/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _end_after_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def living(pids: Sequence[int]) -> list[int]:
    """Returns those of the processes that still exist."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
