"""A trainer and inference workers on one device: the workers write text before and after each update.

    python examples/colocated.py                                    # shared memory
    python examples/colocated.py --num-ipc-handles 4 --workers 2
    python examples/colocated.py --num-ipc-handles 4 --device cuda:0
    python examples/colocated.py --registered                       # nothing is packed
    python examples/colocated.py --benchmark                        # OPT-125M's shapes

The trainer is this process, each worker one of its own; a private broker lives as long as they do.
The workers' engine keeps fused weights and has a loader for the checkpoint's names, as engines do.
With `--num-ipc-handles N` so many batches are on their way at a time: the trainer packs the next
while the workers load the last. With `--registered` its own tensors are handed out where they lie.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from fused_engine import DemoEngine, Shapes
from processes import Child, Told, children, digest, end_at_sigterm, end_with, private_broker
from torch import Tensor

from tensorlease import RingOptions, TrainerAgent, WorkerAgent
from tensorlease.demo.model import Model, loss_of
from tensorlease.demo.reports import Size
from tensorlease.demo.text import Vocabulary, corpus, find_pieces

CHANNEL = "policy"
LIMIT_S = 120.0
QUICK = Size(width=64, depth=2, heads=2, context=32, vocabulary=512)
HEAD_WIDTH = 32
"""Of the demo's model, whatever its size."""
LINE = 24
"""Tokens that a worker writes."""
PROMPT = b"The "


def serve(told: Told, url: str, replica: str, shapes: Shapes, device: str) -> None:
    """A process: an inference worker that starts with random weights.

    It says what it writes at first and after each version, with the digest of each tensor, how
    often its loader was called and for which versions the post-processing step ran.
    """
    on_device(device)
    engine = DemoEngine(shapes, device, torch.float32)
    vocabulary = Vocabulary(find_pieces(corpus()[0], shapes["embedding"][0]))
    start = vocabulary.encode(PROMPT)[:1]

    def report(version: int) -> None:
        line = vocabulary.decode(engine.write(start, LINE, vocabulary.newline, seed=version))
        digests = {name: digest(tensor) for name, tensor in engine.unfused()}
        told.say((version, line, digests, engine.loads, list(engine.post_processed)))

    report(0)
    with WorkerAgent(CHANNEL, replica=replica, endpoint=url, device=device) as worker:
        worker.on_commit(lambda round: engine.post_process(round.version))
        worker.on_stage(lambda round, tensors: engine.load_weights(tensors), names=shapes)
        while not told.waiting():
            version = worker.step(timeout=0.1)
            if version is not None:
                report(version)


def on_device(device: str) -> None:
    """Lets this process work on the device, and on a CPU with one thread."""
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    torch.set_num_threads(1)


class Training:
    """The demo's model and text: from a checkpoint, or from random weights."""

    def __init__(self, checkpoint: Path | None, device: str) -> None:
        torch.manual_seed(0)
        weights = {} if checkpoint is None else load(checkpoint)
        size = size_of(weights) if weights else QUICK
        # What follows from the text has as many pieces as it has, not as many as were asked for.
        pieces = find_pieces(corpus()[0], size.vocabulary)
        size = Size(size.width, size.depth, size.heads, size.context, len(pieces))
        self.model = Model(size)
        if weights:
            self.model.load_state_dict(weights)
        self.model.to(device)
        self._tokens = torch.tensor(Vocabulary(pieces).encode(corpus()[0]), device=device)
        self._lengths = torch.tensor([len(piece) for piece in pieces], device=device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._span = torch.arange(size.context + 1, device=device)

    def train(self, steps: int) -> float:
        """Takes so many steps; returns the last loss in nats a byte."""
        loss = 0.0
        for _ in range(steps):
            last = len(self._tokens) - len(self._span)
            starts = torch.randint(0, last + 1, (16, 1), device=self._tokens.device)
            found = loss_of(self.model, self._tokens[starts + self._span], self._lengths)
            found.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            loss = float(found.detach())
        return loss

    def tensors(self) -> dict[str, Tensor]:
        """Returns the weights, by the checkpoint's names."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def load(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the tensors of a directory's safetensors files."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        sys.exit("--model needs safetensors: pip install 'tensorlease[files]'")
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        sys.exit(f"--model {checkpoint}: there is no *.safetensors in it")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(load_file(file))
    if not {"embedding", "places"} <= weights.keys():
        sys.exit(
            f"--model {checkpoint}: not the demo's model; it has {', '.join(sorted(weights)[:3])}"
        )
    return weights


def size_of(weights: Mapping[str, Tensor]) -> Size:
    """Returns how large the demo's model is whose weights these are."""
    vocabulary, width = weights["embedding"].shape
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    return Size(width, depth, width // HEAD_WIDTH, len(weights["places"]), vocabulary)


def main(words: list[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    options = parse(words)
    if options.benchmark:
        from lock_step import benchmark

        return benchmark(
            options.device, options.rounds, options.buffer_mib, options.num_ipc_handles
        )
    end_at_sigterm()
    on_device(options.device)
    training = Training(options.model, options.device)
    tensors = training.tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    ring = RingOptions(options.num_ipc_handles, options.slot_kib * 1024, device=options.device)
    with private_broker() as url, children() as start:
        workers = [
            start(f"worker {place}", serve, url, f"worker-{place}", shapes, options.device)
            for place in range(options.workers)
        ]
        for worker in workers:
            print(f"before     {worker.name}: {line_of(worker)!r}")
        with TrainerAgent(
            CHANNEL, rank=0, world_size=1, endpoint=url, device=options.device, ring=ring
        ) as trainer:
            if options.registered:
                trainer.register(training.model.named_parameters())
            trainer.wait_ready(len(workers), timeout=LIMIT_S)
            for version in range(1, options.versions + 1):
                loss = training.train(options.steps)
                began = time.perf_counter()
                if options.registered:
                    result = trainer.publish(version, timeout=LIMIT_S)
                else:
                    result = trainer.publish_stream(version, tensors, timeout=LIMIT_S)
                took = time.perf_counter() - began
                batches = {each.batches for each in result.raise_for_status().receivers.values()}
                print(f"version {version}  loss {loss:.3f}  {took * 1e3:.1f} ms  batches {batches}")
                compare(workers, version, tensors)
    how = "registered" if options.registered else f"{options.num_ipc_handles} handles"
    print(f"OK: {options.versions} versions, {how}, on {options.device}: equal on both sides")
    return 0


def line_of(worker: Child) -> str:
    """Returns what a worker has written."""
    _, line, *_ = worker.hear()
    return line


def compare(workers: list[Child], version: int, tensors: Mapping[str, Tensor]) -> None:
    """Prints what each has written; ends the program if one has other values, or has not
    post-processed each version exactly once."""
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    for worker in workers:
        at, line, has, loads, post_processed = worker.hear()
        if (at, has) != (version, digests):
            names = [name for name in digests if has.get(name) != digests[name]]
            sys.exit(f"{worker.name} is at {at}, and differs from version {version} in {names}")
        if post_processed != list(range(1, version + 1)):
            sys.exit(f"{worker.name} post-processed {post_processed}, at version {version}")
        print(
            f"version {version}  {worker.name}: {line!r}\n"
            f"           equal; loaded in {loads} batches so far, post-processed once a round"
        )


def parse(words: list[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="safetensors files of the demo's model; else it is made")
    add(
        "--num-ipc-handles",
        type=int,
        default=1,
        help="slots of the ring (default 1, of the benchmark's 4)",
    )
    add("--slot-kib", type=int, default=256, help="KiB of a slot (default 256)")
    add("--registered", action="store_true", help="register the tensors; no ring")
    add("--device", default="cpu", help="cpu (shared memory), or cuda:N")
    add("--workers", type=int, default=1)
    add("--versions", type=int, default=2)
    add("--steps", type=int, default=40, help="gradient steps before each version")
    add(
        "--benchmark",
        action="store_true",
        help="measure, with OPT-125M's shapes; takes --device, --rounds, --buffer-mib and"
        " --num-ipc-handles",
    )
    add("--rounds", type=int, default=7, help="of the benchmark, each way, in turns (least 5)")
    add("--buffer-mib", type=int, default=0, help="of lock step; default: the largest tensor's")
    options = parser.parse_args(words)
    if min(options.num_ipc_handles, options.workers, options.versions, options.steps) < 1:
        parser.error("--num-ipc-handles, --workers, --versions and --steps must be 1 or more")
    if options.device != "cpu":
        found = re.fullmatch(r"cuda(?::(\d+))?", options.device)
        if found is None:
            parser.error(f"--device {options.device}: must be cpu or cuda:N")
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(found[1] or 0) >= seen:
            parser.error(f"--device {options.device}: torch sees {seen or 'no'} GPU here")
        options.device = f"cuda:{found[1] or 0}"
    if options.benchmark and options.rounds < 5:
        parser.error("--rounds must be 5 or more")
    return options


if __name__ == "__main__":
    end_with(main)
