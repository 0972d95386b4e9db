"""Asynchronous training under the fence: steps a second with workers pulling every step, and with none.

One trainer process, workers in processes of their own, and a broker, on one machine. The two ways
take turns within one run: some steps that publish each version to all workers, then as many that
publish nothing, and so on. The guard stays in place in both.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event

import torch

from tensorlease import TrainerAgent, WorkerAgent
from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.server import Broker

GOAL = 0.97
LIMIT_S = 120.0


def network(width: int, layers: int, device: str) -> torch.nn.Module:
    """Layers of equal width: `width` * `width` + `width` float32 weights each."""
    return torch.nn.Sequential(
        *(
            module
            for _ in range(layers)
            for module in (torch.nn.Linear(width, width), torch.nn.ReLU())
        )
    ).to(device)


def serve_broker(url: str, ready: Event) -> None:
    """A process: the broker."""

    async def main() -> None:
        broker = Broker(BrokerConfig(endpoints=(url,)), environ={})
        serving = asyncio.ensure_future(broker.serve())
        await broker.started.wait()
        ready.set()
        await serving

    asyncio.run(main())


def pull(url: str, replica: str, width: int, layers: int, device: str) -> None:
    """A process: a worker that takes every version, until it is ended."""
    torch.set_num_threads(1)
    with WorkerAgent("benchmark", replica=replica, endpoint=url) as worker:
        worker.attach(network(width, layers, device).state_dict())
        worker.run()


class Training:
    """The training loop, and what it measures."""

    def __init__(self, trainer: TrainerAgent, options: argparse.Namespace) -> None:
        self.trainer = trainer
        self.device = torch.device(options.device)
        self.model = network(options.width, options.layers, options.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(options.batch, options.width, device=self.device)
        self.version = 0
        # Seconds that steps waited for workers.
        self.waited_s = 0.0
        self._began = 0.0
        trainer.register(self.model.named_parameters())
        # Hooks run in the order of their registration: the guard's is between these two.
        self.optimizer.register_step_pre_hook(self._begin)
        trainer.guard(self.optimizer, timeout=LIMIT_S)
        self.optimizer.register_step_pre_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.waited_s += time.perf_counter() - self._began

    def run(self, steps: int, *, publish: bool) -> tuple[float, float]:
        """Trains; returns steps a second, and the share of the time that steps waited."""
        self.waited_s = 0.0
        handle = None
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            if publish:
                self.version += 1
                handle = self.trainer.publish_nowait(self.version, timeout=LIMIT_S)
        if handle is not None:
            # What the last version costs counts too.
            handle.released.wait(LIMIT_S)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        if handle is not None:
            handle.result(LIMIT_S).raise_for_status()
        return steps / seconds, self.waited_s / seconds


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10, help="steps of one turn")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the trainer")
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda:0")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        url = f"ipc://{directory}/b.sock"
        ready = context.Event()
        processes = [context.Process(target=serve_broker, args=(url, ready), daemon=True)]
        processes[0].start()
        assert ready.wait(LIMIT_S)
        for place in range(options.workers):
            args = (url, f"worker-{place}", options.width, options.layers, options.device)
            processes.append(context.Process(target=pull, args=args, daemon=True))
            processes[-1].start()
        with TrainerAgent("benchmark", rank=0, world_size=1, endpoint=url) as trainer:
            training = Training(trainer, options)
            trainer.wait_ready(options.workers, timeout=LIMIT_S)
            training.run(2, publish=True)  # maps the memory
            rates: dict[bool, list[float]] = {True: [], False: []}
            waits: list[float] = []
            ratios: list[float] = []
            for _ in range(options.turns):
                for publish in (False, True):
                    rate, waited = training.run(options.steps, publish=publish)
                    rates[publish].append(rate)
                    if publish:
                        waits.append(waited)
                ratios.append(rates[True][-1] / rates[False][-1])
        for process in reversed(processes):
            process.terminate()
            process.join()

    nbytes = sum(p.numel() * p.element_size() for p in training.model.parameters())
    print(
        f"{nbytes / 2**20:.1f} MiB of weights, {options.workers} workers, {options.threads} torch"
        f" thread(s), {options.turns} turns of {options.steps} steps each way,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    print(f"none pulling     {spread(rates[False])} steps/s")
    print(f"pulling          {spread(rates[True])} steps/s, {training.version} versions committed")
    print(f"steps waited     {spread([100 * wait for wait in waits])} % of the time")
    median = statistics.median(rates[True]) / statistics.median(rates[False])
    print(f"ratio of medians {median:8.2f}  of turns: {spread(ratios)} (goal >= {GOAL})")


if __name__ == "__main__":
    main()
