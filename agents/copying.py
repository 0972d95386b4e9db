"""Copies many runs of bytes between CPU tensors, at the speed of the memory.

Torch's `copy_` of one run after another starts and joins its threads for each of them: 300 copies
of 3.5 MB took 160 ms on two idle cores and 1,800 ms when a core was shared, where one thread's
memcpy takes 200 ms. Here a few threads take equal shares of all the bytes and meet once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from .interrupts import HeldBack

MAX_THREADS: Final = 8
SHARE_BYTES: Final = 4 * 2**20
"""A further thread is worth it for this many bytes."""


class Run(NamedTuple):
    """Neighbouring bytes to copy: addresses and length."""

    target: int
    source: int
    nbytes: int


def as_one(last: Run, run: Run) -> Run | None:
    """Returns two runs as one, if the second begins where the first ends, on both sides."""
    if (last.source + last.nbytes, last.target + last.nbytes) != (run.source, run.target):
        return None
    return Run(last.target, last.source, last.nbytes + run.nbytes)


class Runs:
    """Runs of bytes that are copied again and again: how threads share them is worked out once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._nbytes = sum(run.nbytes for run in runs)
        self._threads = 0
        self._shares: list[list[Run]] = []

    def __len__(self) -> int:
        return len(self._runs)

    def copy(self) -> None:
        """Copies every run; the memory must be mapped meanwhile. Does not hold the GIL."""
        threads = _threads(self._nbytes)
        if threads != self._threads:
            # The process may be given more cores, or fewer, at any time.
            self._threads, self._shares = threads, _shares(self._runs, threads)
        shares = self._shares
        if not shares:
            return
        if len(shares) == 1:
            _copy(shares[0])
            return
        # The caller is one of the threads; all are waited for before any error leaves, an
        # interrupt's say: then the memory may be unmapped.
        with HeldBack():
            waiting: list[Future[None]] = []
            try:
                waiting.extend(_pool.submit(_copy, share) for share in shares[1:])
                _copy(shares[0])
            finally:
                wait(waiting)
        for done in waiting:
            done.result()


def copy_runs(runs: Sequence[Run]) -> None:
    """Copies every run, once; see `Runs.copy`."""
    if len(runs) == 1 and runs[0].nbytes < 2 * SHARE_BYTES:
        _copy(runs)  # Nothing is to be shared out.
    else:
        Runs(runs).copy()


def _copy(runs: Sequence[Run]) -> None:
    for target, source, nbytes in runs:
        ctypes.memmove(target, source, nbytes)  # lets go of the GIL


def _threads(nbytes: int) -> int:
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), nbytes // SHARE_BYTES))


def _shares(runs: Sequence[Run], count: int) -> list[list[Run]]:
    """Cuts the runs into `count` shares of about as many bytes each; runs may be cut in two."""
    total = sum(run.nbytes for run in runs)
    size = -(-total // count) if total else 0
    shares: list[list[Run]] = []
    share: list[Run] = []
    room = size
    for target, source, nbytes in runs:
        while nbytes:
            part = min(nbytes, room)
            share.append(Run(target, source, part))
            target, source, nbytes, room = target + part, source + part, nbytes - part, room - part
            if not room:
                shares.append(share)
                share, room = [], size
    if share:
        shares.append(share)
    return shares


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="tensorlease-copy")


_pool = _new_pool()


def _start_anew() -> None:
    global _pool
    _pool = _new_pool()  # a forked child has none of the parent's threads


os.register_at_fork(after_in_child=_start_anew)
