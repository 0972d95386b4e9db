"""A process that is measured from outside: a broker, or the relay that it is compared with."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tensorlease.protocol.endpoint import ENDPOINT_VARIABLE
from tensorlease.protocol.errors import DeadlineError, NoBrokerError

START_LIMIT_S = 30.0
STOP_LIMIT_S = 6.0
_LOOK_S = 0.02


class Service:
    """What the kernel says of a running process."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._process = process
        # clock_getcpuclockid(3): the CPU time of all threads of another process.
        self._clock = (~process.pid << 3) | 2

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that all its threads have used."""
        return time.clock_gettime(self._clock)

    @property
    def resident(self) -> int:
        """Bytes of resident memory."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait(self) -> None:
        """Waits until it listens.

        Raises:
            NoBrokerError: It has ended.
            DeadlineError: It takes too long.
        """
        path = self.url.removeprefix("ipc://")
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                if not probe.connect_ex(path):
                    return
            if self._process.poll() is not None:
                code = self._process.returncode
                raise NoBrokerError(f"what is measured ended with code {code} before it listened")
            if time.monotonic() > deadline:
                raise DeadlineError(f"nothing listens at {self.url} after {START_LIMIT_S:g} s")
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def serving(url: str, words: Sequence[str]) -> Iterator[Service]:
    """Runs `python -m` with these words until the block ends; what it logs is not kept."""
    environ = {key: value for key, value in os.environ.items() if key != ENDPOINT_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        service = Service(url, process)
        service.wait()
        yield service
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def broker_words(url: str, agents: int) -> list[str]:
    """The broker with its defaults, but that agents which wait for their turn are not silent."""
    return [
        "tensorlease.cli",
        "broker",
        "--endpoint",
        url,
        "--durations-silent",
        "3600",
        "--limits-max-agents",
        str(max(1024, agents)),
    ]


def relay_words(url: str) -> list[str]:
    """The relay."""
    return ["tensorlease.commands.bench.relay", url]
