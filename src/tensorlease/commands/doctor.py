"""The command `tensorlease doctor`: whether weights can be handed over here, and if not, why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console

from tensorlease.agents.discovery import one_line
from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.endpoints import choose_endpoints
from tensorlease.broker.queries import Status
from tensorlease.protocol.endpoint import Endpoint, candidates
from tensorlease.protocol.errors import DeadlineError, RefusedError, TensorleaseError
from tensorlease.protocol.segments import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE

from . import facts, findings, gpus
from .findings import Finding, Level
from .query import Asker, NowhereError, broker_options, find
from .status import say

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
FAILED = 1


class Running:
    """The broker that runs here, if one does: where, and what it holds.

    Args:
        endpoint: Its address; empty looks for one where agents do.
        job: The job whose broker is meant.
        timeout_s: How long it may take to answer.
    """

    def __init__(self, endpoint: str, job: str, timeout_s: float) -> None:
        self.place: Endpoint | None = None
        self.seen: Status | None = None
        self.named = bool(endpoint)
        self.finding = Finding("broker", Level.OK, "")
        where = _would_listen(endpoint, job)
        self.expected = where
        try:
            self.place = find(endpoint, job)
            with Asker(self.place.url, "", timeout_s) as asker:
                self.seen = asker.status()
        except NowhereError as error:
            # One that was named must be there.
            level = Level.FAIL if self.named else Level.WARN
            self.finding = Finding("broker", level, error.where, error.way_out)
        except (DeadlineError, RefusedError) as error:
            way_out = "tensorlease status; its log says more"
            self.finding = Finding("broker", Level.FAIL, one_line(error), way_out)
        else:
            text = f"{self.place} answers, {self.seen.agents} agents"
            self.finding = Finding("broker", Level.OK, text)


def _would_listen(endpoint: str, job: str) -> Endpoint:
    """Where a broker would be found first that were started now."""
    if endpoint:
        return candidates(os.environ, os.geteuid(), endpoint, job)[0]
    return choose_endpoints(BrokerConfig(job=job), os.environ, os.geteuid())[0]


def look(endpoint: str, job: str, timeout_s: float) -> Iterator[Finding]:
    """Makes each check, and gives what it found."""
    versions = facts.versions()
    yield findings.software(versions)
    running = Running(endpoint, job, timeout_s)
    yield running.finding
    place = running.place or running.expected
    if place.path:
        directory = facts.directory_of(place)
        yield findings.socket_directory(directory, place.directory, os.geteuid())
    shm = os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY
    yield findings.shared_memory(facts.shm_at(shm))
    yield findings.descriptors(facts.descriptor_limit())
    if running.place is not None:
        pid = facts.broker_pid(running.place)
        yield findings.namespaces(pid, facts.in_our_namespace(pid) if pid else None)
    if running.seen is not None:
        yield from _agents(running.seen, shm, versions)
    has_torch = versions["torch"] is not None
    seen = gpus.look() if has_torch else gpus.Seen()
    if has_torch:
        yield from gpus.findings(seen)
    yield _trip(running, has_torch)
    if seen.gpus:
        yield _trip(running, has_torch, "cuda:0")


def _agents(seen: Status, shm: str, versions: dict[str, str | None]) -> Iterator[Finding]:
    agents = list(facts.agents_of(seen))
    sees = {name: facts.sees_same_shm(agent.pid, shm) for name, agent in agents}
    other = [name for name, same in sees.items() if same is False]
    found = list(sees.values())
    yield findings.shared_with(found.count(True), other, found.count(None))
    ours = f"tensorlease {versions['tensorlease']} torch {versions['torch']}"
    yield findings.both_sides([agent.software for _, agent in agents], ours)


def _trip(running: Running, has_torch: bool, device: str = "cpu") -> Finding:
    name = "round trip" if device == "cpu" else f"round trip on {device}"
    if not has_torch:
        return Finding(name, Level.FAIL, "not made: it needs torch", "pip install torch")
    if running.finding.level is Level.FAIL:
        return Finding(name, Level.FAIL, "not made: see broker", running.finding.way_out)
    from .doctor_trip import private_broker, round_trip

    by = "the running broker" if running.place is not None else "a private broker"
    try:
        with contextlib.ExitStack() as stack:
            if running.place is not None:
                url = running.place.url
            else:
                url = stack.enter_context(private_broker())
            text = round_trip(url, device)
    except TensorleaseError as error:
        way_out = "see the checks above; docs/operations.md, What to do when"
        return Finding(name, Level.FAIL, f"through {by}: {one_line(error)}", way_out)
    return Finding(name, Level.OK, f"through {by}: {text}")


@click.command()
@broker_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(endpoint: str, job: str, timeout_s: float, as_json: bool) -> int:
    """Say whether weights can be handed over on this machine, and if not, why.

    Each check is a line with the way out; the last is a real round trip between two processes with
    all bytes compared, through the broker that runs, else through a private one. Exits with 1 if a
    check failed; a warning is no failure.
    """
    console = Console()
    found = []
    for finding in look(endpoint, job, timeout_s):
        found.append(finding)
        if not as_json:
            way_out = f"; {finding.way_out}" if finding.way_out else ""
            text = f"{finding.level.value:<4}  {finding.name}: {finding.text}{way_out}"
            say(console, text, STYLES[finding.level])
    failed = any(finding.level is Level.FAIL for finding in found)
    if as_json:
        click.echo(msgspec.json.encode({"ok": not failed, "checks": found}))
    return FAILED if failed else 0
