"""What it costs a GPU to go from one process to another: two processes take turns at one copy each.

    python benchmarks/gpu_turns.py --mib 256

The first copies and records an event, the second looks for the event, copies, and waits for its copy.
They tell each other by shared memory, without any message.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LIMIT_S = 60.0
TURNS = 50
_make_event: Callable[..., Any] = torch.cuda.Event


def second(mib: int, word: Any, told: Any) -> None:
    """A process: waits for the event, copies, and says how long either took."""
    source = torch.ones(mib * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    stream = torch.cuda.Stream()
    told.send("ready")
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), told.recv())
    for turn in range(1, TURNS + 1):
        wait_for(word, turn)
        began = time.perf_counter()
        while not event.query():
            pass
        there = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(source)
        stream.synchronize()
        told.send((there - began, time.perf_counter() - there))
        word.value = -turn


def wait_for(word: Any, value: int) -> None:
    """Looks without a pause until the word is this."""
    deadline = time.monotonic() + LIMIT_S
    while word.value != value:
        if time.monotonic() > deadline:
            raise SystemExit(f"the other process has said nothing for {LIMIT_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    mib = parser.parse_args().mib
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU")
    context = mp.get_context("spawn")
    word = context.Value(ctypes.c_int64, 0, lock=False)
    ours, theirs = context.Pipe()
    process = context.Process(target=second, args=(mib, word, theirs), daemon=True)
    process.start()
    source = torch.ones(mib * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    event = _make_event(interprocess=True)
    handle = event.ipc_handle()
    if not ours.poll(LIMIT_S):
        raise SystemExit("the other process does not start")
    ours.recv()
    alone: list[float] = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - began)
    ours.send(handle)
    both: list[float] = []
    parts: list[tuple[float, float]] = []
    for turn in range(1, TURNS + 1):
        began = time.perf_counter()
        target.copy_(source)
        event.record()
        word.value = turn
        wait_for(word, -turn)
        both.append(time.perf_counter() - began)
        parts.append(ours.recv())
    process.join(LIMIT_S)
    kept = slice(TURNS // 5, None)
    copy = statistics.median(alone[kept]) * 1e6
    turn_us = statistics.median(both[kept]) * 1e6
    waited, copied = (statistics.median(part[n] for part in parts[kept]) * 1e6 for n in (0, 1))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {mib} MiB")
    print(f"one copy, alone                    {copy:7.0f} us")
    print(f"a copy by each of two processes    {turn_us:7.0f} us")
    print(f"  the first's, until it is seen    {waited:7.0f} us")
    print(f"  the second's                     {copied:7.0f} us")
    print(f"to go to the other process costs   {(turn_us - 2 * copy) / 2:7.0f} us each time")


if __name__ == "__main__":
    main()
