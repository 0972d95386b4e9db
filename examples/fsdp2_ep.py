"""FSDP2 ranks, and beside each an inference worker with all dense weights and its own experts.

    python examples/fsdp2_ep.py                                  # four ranks on a CPU
    python examples/fsdp2_ep.py --ranks 2 --device cuda
    python examples/fsdp2_ep.py --ranks 8 --device cuda --ray --model qwen3-30b-a3b
    python examples/fsdp2_ep.py --kill-one

Each rank and each worker is a process; a private broker lives as long as they do. Two ways to hand
a version over:

- gathered: every rank gathers each parameter (`full_tensor()`) and sends it through its ring to the
  worker on its own device, which takes what it wants of it.
- ungathered: ranks register their shards, and workers pull the rows that they want from whichever
  ranks hold them. No rank gathers anything.

Around each version the engine sleeps (level 1), wakes its weights, has them overwritten, then wakes
its KV cache and takes requests again. After each round all values are compared by digest.

With fewer GPUs than ranks, ranks meet by gloo and share the GPUs (rank R uses cuda:R % GPUs);
NCCL is used where each has its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from ep_engine import LIMIT_S, Phase, State, WorkerReport, serve
from fsdp_rank import GATHERED, UNGATHERED, Rank, RankPlan, RankReport, obey
from moe import SIZES
from msgspec import Struct
from processes import Child, children, end_at_sigterm, end_with, private_broker

CACHE_BYTES = {"cpu": 2**20, "cuda": 2**28}


class Ranks(Protocol):
    """The ranks, wherever they run."""

    def ask(self, word: str, *more: object) -> Callable[[], list]:
        """Tells all ranks something; what it returns waits for their answers, in order."""


class LocalRanks:
    """Ranks that are processes of this program."""

    def __init__(self, start: Callable[..., Child], plan: RankPlan, gpus: int) -> None:
        self._ranks = [
            start(f"rank {rank}", obey, plan, rank, rank % max(1, gpus))
            for rank in range(plan.ranks)
        ]

    def ready(self) -> None:
        """Waits until all have their shards."""
        for rank in self._ranks:
            rank.hear(LIMIT_S)

    def ask(self, word: str, *more: object) -> Callable[[], list]:
        """See `Ranks`."""
        for rank in self._ranks:
            rank.tell(word, *more)
        return lambda: [rank.hear(LIMIT_S) for rank in self._ranks]


class RayRanks:
    """Ranks that are actors of Ray, which has reserved a GPU for each."""

    def __init__(self, plan: RankPlan) -> None:
        import ray

        self._ray = ray
        actor = ray.remote(num_cpus=1, num_gpus=1 if plan.device == "cuda" else 0)(Rank)
        self._ranks = [actor.remote(plan, rank) for rank in range(plan.ranks)]

    def ask(self, word: str, *more: object) -> Callable[[], list]:
        """See `Ranks`."""
        answers = [getattr(rank, word).remote(*more) for rank in self._ranks]
        return lambda: self._ray.get(answers, timeout=LIMIT_S)


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """Has Ray run as long as the block."""
    import ray

    # Its processes import these modules, too.
    path = [
        str(Path(__file__).resolve().parent),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environ})
    end_at_sigterm()  # Ray has taken that over: the process would abort, and end nothing.
    try:
        yield
    finally:
        ray.shutdown()


class Share(Struct):
    """What one rank and its worker have moved in the last round, and the most that they held.

    In bytes.
    """

    gathered: int
    """From other ranks, to this one."""
    packed: int
    """Into its ring."""
    copied: int
    """By its worker."""
    worker_peak: int
    rank_peak: int = 0

    @property
    def moved(self) -> int:
        """All of them."""
        return self.gathered + self.packed + self.copied


class Tally(Struct):
    """What a variant took."""

    seconds: list[float] = []
    """Of each round: the rank that took longest."""
    shares: list[Share] = []
    """Of each rank."""


class Example:
    """The ranks and their workers.

    Args:
        options: Of the command line.
        ranks: The ranks, which have their shards.
        start_worker: Starts the worker of a rank.
    """

    def __init__(
        self, options: argparse.Namespace, ranks: Ranks, start_worker: Callable[[int], Child]
    ) -> None:
        self._options, self._ranks, self._start_worker = options, ranks, start_worker
        self._workers = [start_worker(rank) for rank in range(options.ranks)]
        self._version = 0

    def run(self, variant: str) -> Tally:
        """Runs all rounds of a variant; returns what they took."""
        tally = Tally()
        options, ranks = self._options, self._ranks
        self._version = 0
        join = ranks.ask("open", variant)
        for worker in self._workers:
            worker.tell("join", variant)
            expect(worker, "joined")
        join()
        ranks.ask("ready", options.ranks)()
        for _ in range(options.rounds):
            ranks.ask("train", options.steps)()
            self._tally(tally, self._round(variant))
        for phase in options.fail_in:
            self._failing(variant, Phase(phase))
        if options.kill_one:
            self._killing(variant)
        for share, peak in zip(tally.shares, ranks.ask("peak")(), strict=True):
            share.rank_peak = peak
        for worker in self._workers:
            worker.tell("leave")
            expect(worker, "left")
        ranks.ask("close")()
        return tally

    # ------------------------------------------------------------ rounds

    def _round(self, variant: str) -> tuple[list[RankReport], list[WorkerReport]]:
        """One that commits everywhere: prints its phases, and compares all values."""
        self._version += 1
        told = self._ranks.ask("round", self._version)()
        reports = self._reports()
        for report in told:
            if report.outcome != "committed" or not report.released:
                sys.exit(f"{variant}: version {self._version} {report.outcome}: {report.reason}")
        self._compare(variant, dict(enumerate(reports)))
        print(f"{variant:11}version {self._version}  {phases_of(reports)}")
        return told, reports

    def _failing(self, variant: str, phase: Phase) -> None:
        """One in which the first worker fails in a phase, and one that repairs it."""
        self._version += 1
        self._workers[0].tell("fail", phase.value)
        expect(self._workers[0], "heard")
        self._ranks.ask("train", self._options.steps)()
        told = self._ranks.ask("round", self._version)()
        reports = self._reports()
        fates = told[0].fates
        print(
            f"{variant:11}version {self._version}  failing in {phase.value!r}, as it was"
            f" asked to: {told[0].outcome},"
            f" engine-0 {fates['engine-0']}, engine 0 is {reports[0].state.value!r}\n"
            f"           {told[0].reason}"
        )
        if fates["engine-0"] == "committed":
            sys.exit(f"{variant}: engine-0 committed a version that it failed to take")
        self._compare(variant, {n: each for n, each in enumerate(reports) if n > 0})
        self._ranks.ask("train", self._options.steps)()
        _, reports = self._round(variant)
        print(f"           the next version has repaired it: {reports[0].state.value}")

    def _killing(self, variant: str) -> None:
        """One in the middle of which the last worker is killed; then another takes its place."""
        self._version += 1
        last = self._options.ranks - 1
        victim = self._workers[last]
        victim.tell("stay")
        expect(victim, "heard")
        self._ranks.ask("train", self._options.steps)()
        telling = self._ranks.ask("round", self._version)
        expect(victim, "in the round")
        victim.kill()
        told = telling()
        reports = self._reports(skip=last)
        print(
            f"{variant:11}version {self._version}  worker {last} (pid {victim.pid}) killed in the"
            f" round: {told[0].outcome}\n           {told[0].reason}"
        )
        for report in told:
            others = {name: fate for name, fate in report.fates.items() if name != f"engine-{last}"}
            if report.fates[f"engine-{last}"] != "lost":
                sys.exit(f"{variant}: engine-{last} is {report.fates[f'engine-{last}']}, not lost")
            if set(others.values()) - {"committed"}:
                sys.exit(f"{variant}: others did not commit: {others}")
            if not report.released:
                sys.exit(f"{variant}: leases of a worker that was killed did not come back")
        self._compare(variant, dict(enumerate(reports)))
        print(f"           the others committed ({len(reports)}), and all leases came back")
        self._workers[last] = self._start_worker(last)
        self._workers[last].tell("join", variant)
        expect(self._workers[last], "joined")
        self._ranks.ask("ready", self._options.ranks)()
        self._ranks.ask("train", self._options.steps)()
        self._round(variant)

    def _reports(self, skip: int | None = None) -> list[WorkerReport]:
        asked = [worker for place, worker in enumerate(self._workers) if place != skip]
        for worker in asked:
            worker.tell("report")
        found = [worker.hear(LIMIT_S) for worker in asked]
        assert all(isinstance(each, WorkerReport) for each in found)
        return found

    def _compare(self, variant: str, reports: dict[int, WorkerReport]) -> None:
        """Ends the program unless these workers serve this version, with the ranks' values."""
        wanted, *_ = self._ranks.ask("digests")()
        seen: set[str] = set()
        for place, report in reports.items():
            wrong = [name for name, each in report.digests.items() if wanted[name] != each]
            where = f"{variant}: version {self._version}: worker {place}"
            if (report.version, report.state) != (self._version, State.SERVING):
                sys.exit(f"{where} is at {report.version}, and {report.state.value}")
            if wrong:
                sys.exit(f"{where} has other values: {', '.join(wrong[:5])}")
            if [phase for phase, _ in report.phases] != list(Phase):
                sys.exit(f"{where} went through {report.phases}")
            seen.update(report.digests)
        if len(reports) == self._options.ranks and (left := wanted.keys() - seen):
            sys.exit(f"{variant}: no worker has {', '.join(sorted(left)[:5])}")

    @staticmethod
    def _tally(tally: Tally, found: tuple[list[RankReport], list[WorkerReport]]) -> None:
        told, reports = found
        tally.seconds.append(max(report.seconds for report in told))
        tally.shares = [
            Share(rank.gathered, rank.packed, worker.nbytes, worker.peak_bytes)
            for rank, worker in zip(told, reports, strict=True)
        ]


def expect(worker: Child, word: str) -> None:
    """Waits until a worker has said so."""
    said = worker.hear(LIMIT_S)
    if said != word:
        sys.exit(f"{worker.name} said {said!r}, not {word!r}")


def phases_of(reports: list[WorkerReport]) -> str:
    """Returns the phases in order, with the slowest worker's time of each."""
    texts = []
    for at, phase in enumerate(Phase):
        slowest = max(report.phases[at][1] for report in reports)
        texts.append(f"{phase.value} {slowest * 1e3:.1f}")
    return f"{' > '.join(texts)} ms; equal on {len(reports)} workers"


def summary(tallies: dict[str, Tally], device: str) -> str:
    """Returns the table at the end; bytes are those of the last round."""
    kind = "device memory" if device == "cuda" else "resident memory"
    medians = (f"{statistics.median(tally.seconds) * 1e3:.1f}" for tally in tallies.values())
    rows: list[tuple[str, ...]] = [("", *tallies), ("a round, median ms", *medians)]
    for rank in range(min(len(tally.shares) for tally in tallies.values())):
        for text, field in (
            ("MB gathered from other ranks", "gathered"),
            ("MB packed into the ring", "packed"),
            ("MB copied by its worker", "copied"),
            ("MB moved", "moved"),
            (f"MB peak, {kind}", "rank_peak"),
            ("MB peak of its worker", "worker_peak"),
        ):
            values = (getattr(tally.shares[rank], field) for tally in tallies.values())
            rows.append((f"rank {rank}: {text}", *(f"{value / 1e6:.2f}" for value in values)))
    return "\n".join(f"  {row[0]:38}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


def pinned(pins: list[str], rank: int) -> dict[str, str]:
    """Returns what has a rank's worker see the GPUs of all ranks, and its rank's own as cuda:0.

    It works on that one alone, and pulls from the others.
    """
    others = [pin for place, pin in enumerate(pins) if place != rank]
    return {"CUDA_VISIBLE_DEVICES": ",".join([pins[rank], *others])}


def free_memory() -> int:
    """Returns how many bytes this host has left, by /proc/meminfo."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def main(words: list[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    options = parse(words)
    if options.ray and find_spec("ray") is None:
        print("--ray needs Ray: pip install ray", file=sys.stderr)
        return 2
    end_at_sigterm()
    size = SIZES[options.model]
    gpus = 0
    if options.device == "cuda":
        gpus = torch.cuda.device_count()
        if gpus == 0:
            print("--device cuda: torch sees no GPU here", file=sys.stderr)
            return 2
        if options.ray and gpus < options.ranks:
            print(f"--ray: {options.ranks} ranks need a GPU each, {gpus} here", file=sys.stderr)
            return 2
    elif (needed := 2 * size.nbytes) > (there := free_memory()):
        print(
            f"--model {options.model} on a CPU needs {needed / 1e9:.0f} GB, its weights once for the"
            f" ranks and once for the workers; {there / 1e9:.0f} GB are free",
            file=sys.stderr,
        )
        return 2
    alone = options.device == "cuda" and (options.ray or gpus >= options.ranks)
    variants = [GATHERED, UNGATHERED] if options.variant == "both" else [options.variant]
    tallies: dict[str, Tally] = {}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(private_broker())
        meeting = Path(url.removeprefix("ipc://")).parent / "ranks"
        meeting.mkdir()
        # torch._dynamo, which fully_shard imports, makes a directory at once.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(meeting)
        heavy = ("torch.distributed.fsdp", "torch._dynamo") if options.device == "cpu" else ()
        start = stack.enter_context(children(*heavy))
        plan = RankPlan(
            size,
            options.ranks,
            options.device,
            "nccl" if alone else "gloo",
            url,
            (meeting / "store").as_uri(),
        )
        pins: list[str] = []
        ranks: Ranks
        if options.ray:
            stack.enter_context(ray_session())
            ranks = RayRanks(plan)
            pins = [gpu for of_rank in ranks.ask("gpus")() for gpu in of_rank]
            print(f"Ray has reserved the GPUs {', '.join(pins) or 'none'} for the ranks")
        else:
            ranks = LocalRanks(start, plan, gpus)

        def start_worker(rank: int) -> Child:
            device, environ = options.device, None
            if pins:
                device, environ = "cuda:0", pinned(pins, rank)
            elif gpus:
                device = f"cuda:{rank % gpus}"
            cache = CACHE_BYTES[options.device]
            args = (size, rank, options.ranks, url, device, cache)
            return start(f"worker {rank}", serve, *args, environ=environ)

        example = Example(options, ranks, start_worker)
        if isinstance(ranks, LocalRanks):
            ranks.ready()
        for variant in variants:
            tallies[variant] = example.run(variant)
        ranks.ask("end")()
    print(f"{options.model}, {options.ranks} ranks and workers, {options.device}, {plan.backend}")
    print(summary(tallies, options.device))
    if len(tallies) == 2:
        pairs = zip(tallies[UNGATHERED].shares, tallies[GATHERED].shares, strict=True)
        ratios = [ours.moved / theirs.moved for ours, theirs in pairs]
        print(f"ungathered moves {min(ratios):.2f} to {max(ratios):.2f} of the bytes per rank")
        if max(ratios) >= 1:
            return 1
    print(f"OK: {options.rounds} rounds of {', '.join(variants)}: equal on all workers")
    return 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--steps", type=int, default=2, help="training steps before each version")
    add("--rounds", type=int, default=3, help="versions of each variant")
    add("--variant", choices=(GATHERED, UNGATHERED, "both"), default="both")
    add(
        "--model",
        choices=tuple(SIZES),
        default="tiny",
        help="the larger ones are random: 8.8 and 61 GB",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ray", action="store_true", help="the ranks are Ray's actors, on GPUs that it reserves")
    add("--kill-one", action="store_true", help="kill a worker in the middle of a round")
    add(
        "--fail-in",
        choices=[phase.value for phase in Phase],
        action="append",
        default=[],
        help="a worker fails in this phase; may be given again",
    )
    options = parser.parse_args(words)
    if min(options.ranks, options.steps, options.rounds) < 1:
        parser.error("--ranks, --steps and --rounds must be 1 or more")
    experts = SIZES[options.model].experts
    if options.ranks > experts:
        parser.error(f"--ranks {options.ranks}: {options.model} has {experts} experts to share out")
    if options.kill_one and options.ranks < 2:
        parser.error("--kill-one needs a worker that is left: --ranks 2 or more")
    return options


if __name__ == "__main__":
    end_with(main)
