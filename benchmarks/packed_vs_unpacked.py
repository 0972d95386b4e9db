"""Compares a ring whose slots are filled with many tensors with one batch for each tensor.

Run: `tensorlease run -- python benchmarks/packed_vs_unpacked.py [--mib 512] [--tensors 2000]`

The same tensors, of mixed dtypes, go from one process to another in rounds that are taken in turn:
packed, as `send` does by itself, and unpacked, by `flush` after each tensor. Measured is the time
from the first `send` to the end of the round: until all is acknowledged and committed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch

from tensorlease import RingOptions, TrainerAgent, WorkerAgent

DTYPES = (torch.bfloat16, torch.float32, torch.int8)
SLOTS = 8


def tensors(mib: int, count: int) -> dict[str, torch.Tensor]:
    """`count` tensors of mixed dtypes, `mib` MiB in all."""
    each = mib * 2**20 // count // 4 * 4
    made = {}
    for place in range(count):
        dtype = DTYPES[place % len(DTYPES)]
        raw = torch.full((each,), place % 251, dtype=torch.uint8)
        made[f"w{place}"] = raw.view(dtype)
    return made


def work(mib: int, count: int, rounds: int) -> None:
    """The worker's process: takes all rounds, then compares."""
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors(mib, count).items()}
    with WorkerAgent(replica="bench") as worker:
        worker.attach(target)
        worker.run(until=rounds)
    for name, tensor in tensors(mib, count).items():
        assert torch.equal(tensor.view(torch.uint8), target[name].view(torch.uint8)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rounds = 2 * (options.rounds + 1)
    worker = multiprocessing.get_context("spawn").Process(
        target=work, args=(options.mib, options.tensors, rounds)
    )
    worker.start()
    source = tensors(options.mib, options.tensors)
    total = sum(tensor.nbytes for tensor in source.values())
    measured: dict[str, list[float]] = {"packed": [], "unpacked": []}
    batches = {"packed": 0, "unpacked": 0}
    ring = RingOptions(num_ipc_handles=SLOTS, slot_bytes=options.mib * 2**20 // SLOTS)
    with TrainerAgent(ring=ring) as trainer:
        trainer.wait_ready(1)
        for version in range(1, rounds + 1):
            how = "packed" if version % 2 else "unpacked"
            with trainer.open_round(version, timeout=600.0) as r:
                start = time.perf_counter()
                for name, tensor in source.items():
                    r.send(name, tensor)
                    if how == "unpacked":
                        r.flush()
            elapsed = time.perf_counter() - start
            assert r.result is not None
            r.result.raise_for_status()
            batches[how] = r.batches
            if version > 2:  # The first of each maps the slots and touches the pages.
                measured[how].append(elapsed)
    worker.join()
    assert worker.exitcode == 0

    print(f"{total / 1e9:.2f} GB in {len(source)} tensors, {SLOTS} slots")
    for how, times in measured.items():
        print(
            f"{how:10} {batches[how]:5} batches  median {statistics.median(times) * 1e3:8.1f} ms"
            f"  least {min(times) * 1e3:8.1f}  greatest {max(times) * 1e3:8.1f}"
        )
    ratio = statistics.median(measured["unpacked"]) / statistics.median(measured["packed"])
    print(f"unpacked takes {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
