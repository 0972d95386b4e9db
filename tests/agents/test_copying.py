"""Runs of bytes, cut into shares."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlease.agents import copying
from tensorlease.agents.copying import Run, copy_runs

torch = pytest.importorskip("torch")


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 8))
def test_shares_are_all_the_bytes_in_order_in_about_equal_parts(
    lengths: list[int], count: int
) -> None:
    runs = [Run(1000 * place, 5000 * place, size) for place, size in enumerate(lengths)]
    shares = copying._shares(runs, count)
    moved = [
        (run.target + byte, run.source + byte)
        for share in shares
        for run in share
        for byte in range(run.nbytes)
    ]
    assert moved == [(r.target + byte, r.source + byte) for r in runs for byte in range(r.nbytes)]
    assert len(shares) <= count
    largest = max((sum(run.nbytes for run in share) for share in shares), default=0)
    assert largest <= -(-sum(lengths) // count)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_run_arrives_whatever_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(copying, "_threads", lambda nbytes: threads)
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    cuts = [0, 1, 70_000, 70_001, 100_003]
    runs = [
        Run(target.data_ptr() + begin, source.data_ptr() + begin, end - begin)
        for begin, end in pairwise(cuts)
    ]
    copy_runs(runs)
    assert torch.equal(source, target)
    copy_runs([])


@pytest.mark.parametrize("what", ["an interrupt", "no thread"])
def test_no_error_leaves_while_another_thread_copies(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(copying, "_threads", lambda nbytes: 3)
    source, begun, ended = torch.ones(300, dtype=torch.uint8), threading.Event(), threading.Event()
    target = torch.zeros_like(source)
    copy, submit = copying._copy, copying._pool.submit

    def slow(runs: Sequence[Run]) -> None:
        begun.set()
        time.sleep(0.3)
        copy(runs)
        ended.set()

    def first_of_all(runs: Sequence[Run]) -> None:
        assert begun.wait(10.0)
        signal.raise_signal(signal.SIGINT)

    def one_alone(*_: object) -> object:
        if begun.is_set():
            raise RuntimeError("can't start new thread")
        future = submit(slow, [Run(target.data_ptr(), source.data_ptr(), 100)])
        assert begun.wait(10.0)
        return future

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if what == "no thread":
            monkeypatch.setattr(copying._pool, "submit", one_alone)
        else:
            main = threading.get_ident()
            monkeypatch.setattr(
                copying,
                "_copy",
                lambda runs: (first_of_all if threading.get_ident() == main else slow)(runs),
            )
        with pytest.raises(RuntimeError if what == "no thread" else KeyboardInterrupt):
            copy_runs([Run(target.data_ptr(), source.data_ptr(), 300)] * 2)
    finally:
        signal.signal(signal.SIGINT, former)
    assert ended.is_set()
