"""What the examples share: a broker of their own, and processes that are asked and answer.

    with private_broker() as url, children() as start:
        worker = start("worker 0", serve, url, 0)    # serve(told, url, 0) runs in a process
        worker.tell("version")
        print(worker.hear())

Processes are forked from one that has imported torch, which saves seconds each, and has never
touched a GPU, so that each may use one. All of them end with the program. What some modules ask of
a GPU while they are imported would end that: name to `children` only what does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing as mp
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch

LIMIT_S = 120.0
"""How long anything may take."""
LOOK_S = 0.02
LEAVE_S = 3.0
"""After the program's end its processes may take so long to end by themselves."""
SUM_ELEMENTS = 2**24
"""Of a tensor on a GPU, summed up at once."""


class ChildError(Exception):
    """A process has failed; says which, and how."""


@contextlib.contextmanager
def private_broker() -> Iterator[str]:
    """Gives the address of a broker that lives as long as the block, and not longer than we do."""
    directory = tempfile.mkdtemp(prefix="tl-", dir="/tmp")
    path = f"{directory}/broker.sock"
    command = [sys.executable, "-P", "-m", "tensorlease.private_broker"]
    words = ["--endpoint", f"ipc://{path}", "--log-level", "error"]
    process = subprocess.Popen(
        [*command, str(os.getpid()), directory, *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl+C is for us, who end it last.
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not _listens(path):
            if process.poll() is not None:
                raise ChildError(f"the broker ended with {process.returncode} before it listened")
            if time.monotonic() > deadline:
                raise ChildError(f"the broker does not listen after {LIMIT_S:g} s")
            time.sleep(LOOK_S)
        yield f"ipc://{path}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(path)


class Child:
    """A process that is told words and answers.

    Args:
        name: What errors call it.
        function: What it runs, with a connection and `args`.
        environ: What its environment has beside ours, before it touches a GPU.
        others: All children of the program, some of which may wait for each other.
    """

    def __init__(
        self,
        name: str,
        environ: Mapping[str, str],
        function: Callable[..., None],
        args: tuple,
        others: list[Child],
    ) -> None:
        context = mp.get_context("forkserver")
        self.name = name
        self._others = others
        # That it ends is no failure.
        self._may_end = False
        self._link, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(theirs, dict(environ), function, args), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, *words: object) -> None:
        """Tells it something; one that has ended does not hear it."""
        with contextlib.suppress(OSError):
            self._link.send(words)

    def hear(self, timeout: float = LIMIT_S) -> object:
        """Returns what it says next.

        Raises:
            ChildError: It, or another, has failed or was killed; or it says nothing in time.
        """
        deadline = time.monotonic() + timeout
        while not self._link.poll():
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildError(f"{self.name} (pid {self.pid}) said nothing for {timeout:g} s")
            living = [each for each in self._others if each is not self and not each._may_end]
            wait([self._link, *(each._process.sentinel for each in living)], left)
            for each in living if not self._link.poll() else ():
                each._require_alive()
        try:
            kind, words = self._link.recv()
        except (EOFError, OSError):
            self._process.join(LIMIT_S)
            code = self._process.exitcode
            raise ChildError(f"{self.name} (pid {self.pid}) ended with {code}") from None
        if kind == "raised":
            raise ChildError(f"{self.name} (pid {self.pid}) failed:\n{words}")
        return words

    def _require_alive(self) -> None:
        """Raises `ChildError`, with what it has said of it, if it has failed."""
        if not self.ended(0.0):
            return
        code, self._may_end = self._process.exitcode, True
        if not code:
            return
        while self._link.poll():
            self.hear()  # Also raises what it has raised.
        raise ChildError(f"{self.name} (pid {self.pid}) ended with {code}")

    def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        self._may_end = True
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(LIMIT_S)

    def leave(self) -> None:
        """It ends by itself when it hears that nobody tells it anything any more."""
        self._link.close()

    def ended(self, timeout: float) -> bool:
        """Whether it has ended, or does within `timeout` seconds."""
        self._process.join(timeout)
        return not self._process.is_alive()

    def signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self._process.is_alive():
            os.kill(self.pid, number)


def _live(
    link: Connection,
    environ: dict[str, str],
    function: Callable[..., None],
    args: tuple,
) -> None:
    os.environ.update(environ)
    threading.Thread(target=_end_with_program, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the program, which ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        function(Told(link), *args)
    except EOFError:
        pass  # The program has ended.
    except Exception:  # noqa: BLE001 - told, and ends the process
        with contextlib.suppress(OSError):
            link.send(("raised", traceback.format_exc()))
        sys.exit(1)


def _end_with_program() -> None:
    """Ends this process when the program has ended, whatever it waits for: others' collectives, say."""
    program = mp.parent_process()
    assert program is not None
    program.join()
    time.sleep(LEAVE_S)
    os._exit(1)


class Told:
    """A child's side of its connection."""

    def __init__(self, link: Connection) -> None:
        self._link = link

    def waiting(self, timeout: float = 0.0) -> bool:
        """Whether there is something to hear, or nobody to say it any more."""
        return self._link.poll(timeout)

    def hear(self) -> tuple:
        """Returns what it is told next; raises `EOFError` when the program has ended."""
        return self._link.recv()

    def say(self, words: object) -> None:
        """Answers."""
        self._link.send(("said", words))


@contextlib.contextmanager
def children(*imported: str) -> Iterator[Callable[..., Child]]:
    """Gives the function that starts processes, and ends them all.

    Args:
        imported: Modules that the process which they are forked from imports beside torch.
    """
    preload = ["torch", "tensorlease.agents", *imported]
    mp.get_context("forkserver").set_forkserver_preload(preload)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    made: list[Child] = []

    def start(
        name: str,
        function: Callable[..., None],
        *args: object,
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        made.append(Child(name, environ or {}, function, args, made))
        return made[-1]

    try:
        yield start
    finally:
        for child in made:
            child.leave()
        # Some wait for others, and hear it late.
        for number, grace_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
            deadline = time.monotonic() + grace_s
            for child in made:
                child.ended(max(0.0, deadline - time.monotonic()))
            for child in made:
                child.signal(number)
        for child in made:
            child.ended(LIMIT_S)


def end_at_sigterm() -> None:
    """SIGTERM ends the program as an error would: what it has started is ended first."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Once is enough.
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs the program; Ctrl+C ends it without a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def digest(tensor: torch.Tensor) -> str:
    """Returns what a tensor's bytes decide: SHA-256, or on a GPU a sum of all bits by place."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        held = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
        return hashlib.sha256(held).hexdigest()
    total = 0
    for begin in range(0, flat.numel(), SUM_ELEMENTS):
        part = flat[begin : begin + SUM_ELEMENTS].long()
        places = torch.arange(1, part.numel() + 1, device=part.device)
        total += (begin + 1) * int((part * places).sum())
    return f"{total:x}"
