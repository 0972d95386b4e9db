"""The processes of end-to-end tests: a broker, a trainer, a worker, each under a test's command.

A test sends tuples, the first of which is the command; a child says tuples, the first of which is
what they are about. `parties.py` is the test's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorlease.agents import RoundHandle, RoundInfo, TrainerAgent, WorkerAgent
from tensorlease.broker.command import kill_seam
from tensorlease.broker.config import BrokerConfig, Durations, Limits, OnStuck
from tensorlease.broker.server import Broker
from tensorlease.protocol.errors import TensorleaseError

from .. import procs
from .seams import Seam
from .values import WHOLE, Part, differences, fill, fresh, regions

Command = tuple[Any, ...]

_saying = threading.Lock()


def say(*words: Any) -> None:
    """Tells the test something; from any thread."""
    with _saying, contextlib.suppress(BrokenPipeError, OSError):
        procs.say(words)


def listen(heard: Callable[[Command], None]) -> None:
    """Has a thread pass on what the test says; `trim` it answers itself: "trimmed"."""

    def loop() -> None:
        while True:
            try:
                command = procs.hear(3600.0)
                if command == ("trim",):
                    # What is freed goes back to the system, whatever the allocator would keep.
                    say("trimmed", ctypes.CDLL(None).malloc_trim(0))
                else:
                    heard(command)
            except (EOFError, OSError, TimeoutError):
                return

    threading.Thread(target=loop, daemon=True, name="commands").start()


# ---------------------------------------------------------------- the broker


@dataclass(frozen=True)
class BrokerSpec:
    url: str
    shm_dir: str
    durations: dict[str, float] = field(default_factory=dict)
    kill_stuck: bool = False
    place: str = ""
    """Where it kills itself; see `command.kill_seam`."""


def broker(spec: BrokerSpec) -> None:
    """Says "ready" when it listens; commands: `arm PLACE`, `count`."""
    seam = kill_seam(spec.place)
    counts: Counter[str] = Counter()

    def pass_by(what: str, name: str) -> None:
        counts[f"{what}:{name}"] += 1
        if seam is not None:
            seam(what, name)

    def heard(command: Command) -> None:
        nonlocal seam
        match command:
            case ("arm", place):
                seam = kill_seam(place)
                say("armed")
            case ("count",):
                say("counts", dict(counts))
            case _:
                raise ValueError(command)

    async def main() -> None:
        config = BrokerConfig(
            endpoints=(spec.url,),
            shm_dir=spec.shm_dir,
            limits=Limits(max_agents=64),
            durations=Durations(**spec.durations),
            on_stuck=OnStuck.KILL if spec.kill_stuck else OnStuck.WAIT,
        )
        serving = Broker(config, environ={}, seam=pass_by)
        running = asyncio.ensure_future(serving.serve())
        waiting = asyncio.ensure_future(serving.started.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not running.done():
            say("ready")
        await running

    listen(heard)
    asyncio.run(main())


# ---------------------------------------------------------------- a trainer


@dataclass(frozen=True)
class TrainerSpec:
    url: str
    shm_dir: str
    rank: int = 0
    world_size: int = 1
    distribution: str = "colocated"
    device: str = "cpu:0"
    parts: tuple[Part, ...] = WHOLE
    channel: str = "policy"
    group: str = "run"
    offset: int = 0
    """Is added to the version whose values it publishes: ranks that differ, differ by it."""
    connect_s: float = 10.0
    places: tuple[str, ...] = ()
    """Where it is held from the first moment; see `Seam`."""


def trainer(spec: TrainerSpec) -> None:
    """Registers its parts and says "registered", or "refused" WHY. Commands:

    `rounds FIRST LAST OPTIONS` publishes these versions one by one: "results" of all;
    `publish VERSION OPTIONS` is the same for one, and does not wait for its release: "result";
    `retry VERSION OPTIONS` is the same, and writes nothing before: "result";
    `open VERSION OPTIONS` does not wait at all: "opened"; `scribble` overwrites all: "scribbled";
    `wait finished|released SECONDS`: "finished" RESULT, "released", or "late" TEXT;
    `stuck`: "stuck" HOLDERS; `void`: "voided" DECIDED; `ready COUNT`: "ready" REPLICAS;
    `close`: ends. `hold PLACE` and `go` are for the seam, and are heard at any time.
    """
    os.environ["TENSORLEASE_SHM_DIR"] = spec.shm_dir
    todo, _ = _controls(spec.places)
    agent = TrainerAgent(
        spec.channel,
        rank=spec.rank,
        world_size=spec.world_size,
        group=spec.group,
        endpoint=spec.url,
        device=spec.device,
        distribution=spec.distribution,
        connect_timeout=spec.connect_s,
    )
    tensors = fresh(spec.parts)
    try:
        agent.register(tensors, regions(spec.parts))
    except TensorleaseError as error:
        say("refused", str(error))
        return
    say("registered", agent.instance)
    handle: RoundHandle | None = None
    while True:
        command = todo.get()
        try:
            match command:
                case ("rounds", first, last, options):
                    results = []
                    for version in range(first, last + 1):
                        fill(tensors, spec.parts, version + spec.offset)
                        results.append(agent.publish(version, timeout=60.0, **options))
                    say("results", results)
                case ("publish" | "open" | "retry" as how, version, options):
                    if how != "retry":
                        if not agent.may_write():
                            raise RuntimeError("the tensors are still promised to somebody")
                        fill(tensors, spec.parts, version + spec.offset)
                    handle = agent.publish_nowait(version, timeout=30.0, **options)
                    if how != "open":
                        say("result", handle.finished.wait(30.0))
                    else:
                        say("opened", version)
                case ("wait", "finished", seconds):
                    assert handle is not None
                    say("finished", handle.finished.wait(seconds))
                case ("wait", "released", seconds):
                    assert handle is not None
                    handle.released.wait(seconds)
                    say("released")
                case ("stuck",):
                    assert handle is not None
                    say("stuck", handle.stuck)
                case ("void",):
                    assert handle is not None
                    say("voided", agent.void(handle, 20.0))
                case ("ready", count):
                    say("ready", agent.wait_ready(count, 20.0))
                case ("scribble",):
                    fill(tensors, spec.parts, 0)
                    say("scribbled")
                case ("close", seconds):
                    agent.close(seconds)
                    say("closed")
                    return
                case _:
                    raise ValueError(command)
        except Exception as error:  # noqa: BLE001
            say("late", f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- a worker


@dataclass(frozen=True)
class WorkerSpec:
    url: str
    shm_dir: str
    replica: str = "a"
    member: int = 0
    size: int = 1
    device: str = "cpu:0"
    parts: tuple[Part, ...] = WHOLE
    channel: str = "policy"
    offset: int = 0
    """Is added to the version whose values it expects."""
    places: tuple[str, ...] = ()


@dataclass
class Report:
    """What a worker has seen."""

    version: int
    torn: bool
    hooks: list[tuple[str, int]]
    """Hooks in order, with their round's version."""
    reasons: list[tuple[str, bool]]
    """Of the abort hooks: the reason, and whether the weights are in doubt."""
    wrong: list[str]
    """Tensors that had other bytes than the version that was committed."""
    mapped: int
    """Buffers that are mapped."""

    def count(self, hook: str, version: int) -> int:
        """How often this hook ran for this version."""
        return self.hooks.count((hook, version))

    @property
    def committed(self) -> list[int]:
        """The versions whose commit hook ran, in order."""
        return [version for hook, version in self.hooks if hook == "commit"]


def worker(spec: WorkerSpec) -> None:
    """Attaches its parts, says "attached", and serves. Commands, heard at any time:

    `report`: "report" REPORT; `compare VERSION`: "differing" NAMES, now; `close`: ends. `hold`,
    `go` and `fail` are for the seam.
    """
    os.environ["TENSORLEASE_SHM_DIR"] = spec.shm_dir
    report = Report(0, False, [], [], [], 0)

    def heard(command: Command) -> None:
        match command:
            case ("report",):
                report.version, report.torn = agent.version, agent.torn
                report.mapped = sum(map(len, agent._core.state.mappings.values()))
                say("report", report)
            case ("compare", version):
                say("differing", differences(tensors, spec.parts, version + spec.offset))
            case ("close",):
                agent.stop()
            case _:
                raise ValueError(command)

    agent = WorkerAgent(
        spec.channel,
        replica=spec.replica,
        member=spec.member,
        size=spec.size,
        endpoint=spec.url,
        device=spec.device,
    )
    _, seam = _controls(spec.places, heard)
    tensors = fresh(spec.parts)

    def pass_by(hook: str, info: RoundInfo) -> None:
        report.hooks.append((hook, info.version))
        seam.at("in", hook)

    @agent.on_prepare
    def prepare(info: RoundInfo) -> None:
        pass_by("prepare", info)

    @agent.on_commit
    def commit(info: RoundInfo) -> None:
        wrong = differences(tensors, spec.parts, info.version + spec.offset)
        report.wrong.extend(f"{name} of version {info.version}" for name in wrong)
        pass_by("commit", info)

    @agent.on_abort
    def abort(info: RoundInfo, reason: str, torn: bool) -> None:
        report.reasons.append((reason, torn))
        pass_by("abort", info)

    agent.attach(tensors, regions(spec.parts))
    say("attached", agent.instance)
    agent.run()
    agent.close()
    say("closed")


def _controls(
    places: tuple[str, ...], other: Callable[[Command], None] | None = None
) -> tuple[queue.Queue[Command], Seam]:
    """Starts to listen; commands for the seam act at once, others are queued or handed to `other`."""
    todo: queue.Queue[Command] = queue.Queue()
    seam = Seam(lambda words: say(*words))
    for place in places:
        seam.hold(place)

    def heard(command: Command) -> None:
        match command:
            case ("hold", place):
                seam.hold(place)
                say("holding", place)
            case ("fail", name, text):
                seam.fail(name, text)
                say("noted")
            case ("go",):
                seam.go()
            case _:
                (other or todo.put)(command)

    listen(heard)
    return todo, seam
