"""What a round costs beside its bytes: 4 KiB to one worker in a process of its own, again and again.

tensorlease run -- python benchmarks/small_rounds.py
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time

import torch

from tensorlease import TrainerAgent, WorkerAgent
from tensorlease.commands.bench.report import machine

CHANNEL = "small-rounds"
LIMIT_S = 60.0
WARMING = 50


def pull() -> None:
    """A process: a worker that takes every version, until it is ended."""
    torch.set_num_threads(1)
    with WorkerAgent(CHANNEL) as worker:
        worker.attach({"w": torch.zeros(1024)})
        worker.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1500)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    process = mp.get_context("spawn").Process(target=pull, daemon=True)
    process.start()
    took: list[float] = []
    with TrainerAgent(CHANNEL) as trainer:
        trainer.register({"w": torch.ones(1024)})
        trainer.wait_ready(1, timeout=LIMIT_S)
        for version in range(1, WARMING + rounds + 1):
            began = time.perf_counter()
            result = trainer.publish(version, timeout=LIMIT_S)
            took.append((time.perf_counter() - began) * 1e6)
            result.raise_for_status()
    process.terminate()
    parts = statistics.quantiles(took[WARMING:], n=20)
    print(machine())
    print(f"{rounds} rounds: median {statistics.median(took[WARMING:]):.0f} us")
    print(f"of 20 the fastest {parts[0]:.0f} us, the slowest {parts[18]:.0f} us")


if __name__ == "__main__":
    main()
