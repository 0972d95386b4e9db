"""`tensorlease doctor`: what it makes of what it sees, and its round trip."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tensorlease import cli
from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.endpoints import choose_endpoints
from tensorlease.commands import doctor as command
from tensorlease.commands import facts, findings
from tensorlease.commands.doctor import Running
from tensorlease.commands.findings import Directory, Finding, Level, Shm
from tensorlease.protocol.endpoint import parse_endpoint

from .broker.raw_agents import Raw, Threaded, config_for, worker_hello
from .command_lines import Done
from .command_lines import command as run_command
from .procs import Spawn, spawning

GIB = 2**30
SAFE = Directory("/run/x", stat.S_IFDIR | 0o700, 1000)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address; no other broker is looked for, and brokers of their own are made below it."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", f"ipc://{directory}/b.sock")
        yield f"ipc://{directory}/b.sock"


def shm(total: int, free: int, kind: str = "tmpfs", problem: str = "") -> Shm:
    return Shm("/dev/shm", kind, total, free, problem)


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (findings.software({"torch": "2.13", "pyzmq": "27"}), Level.OK, "torch 2.13, pyzmq 27"),
        (findings.software({"torch": None}), Level.FAIL, "torch missing | pip install torch"),
        (findings.both_sides([], "a"), Level.OK, "no agent"),
        (findings.both_sides(["a", "a"], "a"), Level.OK, "all 2 agents have a"),
        (findings.both_sides(["a", "b"], "a"), Level.WARN, "agents have a; b; here is a"),
        (findings.socket_directory(None, "/run/x", 1000), Level.OK, "the broker makes it"),
        (findings.socket_directory(SAFE, "/run/x", 1000), Level.OK, "/run/x, mode 0700"),
        (findings.socket_directory(SAFE, "/run/x", 5), Level.WARN, "another user's"),
        (
            findings.socket_directory(Directory("/t", stat.S_IFDIR | 0o1777, 0), "/t", 1000),
            Level.FAIL,
            "writable by all | chmod go-w /t",
        ),
        (
            findings.socket_directory(Directory("/t", stat.S_IFDIR | 0o770, 1000), "/t", 1000),
            Level.FAIL,
            "writable by its group",
        ),
        (
            findings.socket_directory(Directory("/t", stat.S_IFLNK | 0o777, 0), "/t", 1000),
            Level.FAIL,
            "is no directory",
        ),
        (findings.shared_memory(shm(64 * GIB, 60 * GIB)), Level.OK, "(tmpfs), 64.0 GiB"),
        (findings.shared_memory(shm(64 * 2**20, 64 * 2**20)), Level.FAIL, "64.0 MiB | --shm-size"),
        (findings.shared_memory(shm(64 * GIB, 2**20)), Level.WARN, "1.0 MiB free: small"),
        (findings.shared_memory(shm(64 * GIB, 60 * GIB, "ext4")), Level.WARN, "no memory"),
        (
            findings.shared_memory(shm(64 * GIB, 60 * GIB, problem="permission denied")),
            Level.FAIL,
            "permission denied | TENSORLEASE_SHM_DIR",
        ),
        (findings.shared_with(3, [], 1), Level.OK, "the same for 3 agents; 1 cannot be seen"),
        (findings.shared_with(3, ["worker a/0 (pid 7)"], 0), Level.FAIL, "not this one for worker"),
        (findings.descriptors(None), Level.OK, "no limit"),
        (findings.descriptors(4096), Level.OK, "4096"),
        (findings.descriptors(256), Level.WARN, "256 | ulimit -n 1024"),
        (findings.descriptors(32), Level.FAIL, "too few"),
        (findings.namespaces(None, None), Level.OK, "no broker"),
        (findings.namespaces(7, True), Level.OK, "(pid 7)"),
        (findings.namespaces(0, None), Level.WARN, "another PID namespace | --pid=host"),
        (findings.namespaces(7, False), Level.WARN, "another PID namespace"),
    ],
)
def test_each_finding_says_what_was_seen_and_the_way_out(
    finding: Finding, level: Level, words: str
) -> None:
    seen, _, way_out = words.partition(" | ")
    assert finding.level is level
    assert seen in finding.text and way_out in finding.way_out
    assert bool(finding.way_out) == (level is not Level.OK)


def test_the_place_of_segments_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    seen = facts.shm_at(str(tmp_path))
    assert seen.problem == "" and seen.total > 0 and seen.kind
    assert list(tmp_path.iterdir()) == []
    assert facts.shm_at(str(tmp_path / "absent")).problem == os.strerror(2)


def test_the_running_broker_and_its_agents_are_looked_at(url: str) -> None:
    running = Threaded(config_for(url))
    try:
        with zmq.Context() as context:
            agent = Raw(context, url)
            agent.join(worker_hello("r0"))
            assert facts.broker_pid(parse_endpoint(url)) == os.getpid()
            ((name, seen),) = facts.agents_of(agent.status())
            assert name == f"worker r0/0 (pid {os.getpid()})"
            assert facts.sees_same_shm(seen.pid, "/dev/shm") is True
            looked = command.Running(url, "", 5.0)
            assert looked.finding.text == f"{url} answers, 1 agents"
            while Raw.made:
                Raw.made.pop().close()
    finally:
        running.stop()


def test_a_broker_that_was_named_and_is_not_there_is_a_failure(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--endpoint", url, "--json"]) == 1
    said = msgspec.json.decode(capsys.readouterr().out)
    levels = {check["name"]: check["level"] for check in said["checks"]}
    assert said["ok"] is False
    assert (levels["broker"], levels["round trip"]) == ("FAIL", "FAIL")


def test_where_no_broker_runs_the_directory_is_the_one_that_one_would_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TENSORLEASE_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", nowhere := f"/tmp/tl-not-there-{os.getpid()}")
    expected = Running("", "some-job", 0.5).expected
    assert expected == choose_endpoints(BrokerConfig(job="some-job"), os.environ, os.geteuid())[0]
    assert nowhere not in expected.url


@pytest.mark.gpu
@pytest.mark.program
def test_where_there_is_a_gpu_another_round_goes_through_its_memory(url: str, spawn: Spawn) -> None:
    done = spawn(run_command, "doctor").result(90.0)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert any(line.startswith("ok    GPUs: cuda:0 ") for line in lines)
    assert lines[-1].startswith(
        "ok    round trip on cuda:0: through a private broker: 5.0 MiB, all"
    )


def doctor_whose_worker_cannot_start(*words: str) -> Done:
    """In a child: what should be the worker's process ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        return run_command("doctor", *words)


def doctor_of_another_digest(*words: str) -> Done:
    """In a child: what the trainer has published is not what the worker says that it has."""
    from tensorlease.commands import doctor_trip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_trip, "digest", lambda tensors: "another")
        return run_command("doctor", *words)


@pytest.mark.program
def test_a_real_round_goes_through_a_private_broker_and_nothing_is_left(
    url: str, spawn: Spawn
) -> None:
    done = spawn(run_command, "doctor").result(60.0)
    assert done.code == 0, done
    lines = done.out.splitlines()
    trips = [line for line in lines if "round trip" in line]
    assert trips[0].startswith("ok    round trip: through a private broker: 5.0 MiB, all bytes")
    assert any(line.startswith("warn  broker: no broker answers at") for line in lines)
    assert all(line[:6] in ("ok    ", "warn  ") for line in lines)
    assert os.listdir(Path(url.removeprefix("ipc://")).parent / "tensorlease") == []


@pytest.mark.program
def test_a_broker_that_was_asked_again_and_also_at_the_same_time_holds_no_more_than_before(
    url: str, spawn: Spawn
) -> None:
    running = Threaded(config_for(url))
    try:
        with zmq.Context() as context:
            agent = Raw(context, url)
            try:
                agent.join(worker_hello("r0"))
                before = [channel.name for channel in agent.status().channels]
                doctors = [spawn(run_command, "doctor", "--endpoint", url).result(60.0)]
                held = len(running.broker.ledger.state.channels)
                at_once = [spawn(run_command, "doctor", "--endpoint", url) for _ in range(2)]
                doctors += [process.result(60.0) for process in at_once]
                assert [done.out for done in doctors if done.code] == []
                last = [done.out.splitlines()[-1] for done in doctors]
                assert all("through the running broker: 5.0 MiB, all" in line for line in last)
                assert [channel.name for channel in agent.status().channels] == before
                assert len(running.broker.ledger.state.channels) == held
            finally:
                Raw.made.remove(agent)
                agent.close()
    finally:
        running.stop()


@pytest.mark.program
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (doctor_of_another_digest, "other bytes arrived than were published"),
        (doctor_whose_worker_cannot_start, "the worker's process ended: code 1, without a word"),
    ],
)
def test_a_round_trip_that_fails_says_why(
    run: Callable[..., Done], text: str, url: str, spawn: Spawn
) -> None:
    running = Threaded(config_for(url))
    try:
        done = spawn(run, "--endpoint", url).result(60.0)
    finally:
        running.stop()
    assert done.code == 1, done
    last = done.out.splitlines()[-1]
    assert last.startswith(f"FAIL  round trip: through the running broker: {text}")
