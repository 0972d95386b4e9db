"""What an operator types, against a real broker: status, drain, story, config-check."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tensorlease import cli
from tensorlease.broker.settings import load
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome, QueryKind, Terms

from .raw_agents import Raw, Threaded, eventually, trainer_hello, worker_hello

Agents = tuple[Raw, Raw, str]


@pytest.fixture
def agents(threaded: Threaded, raw: Callable[[], Raw]) -> Agents:
    """A trainer and a worker that have joined, and their group."""
    trainer, worker = raw(), raw()
    worker.join(worker_hello("r0"))
    return trainer, worker, trainer.join(trainer_hello()).group


def open_round(trainer: Raw, worker: Raw, call: int = 1) -> None:
    """Opens a round of the version `call`; its one batch is with the worker."""
    trainer.send(m.Open(1, call, Terms(call)))
    trainer.send(m.Batch(1, call, 0, [0], False, 3 * 2**20, total=1), b"table")
    worker.receive(m.Deliver)


def complete_round(trainer: Raw, worker: Raw, group: str, call: int = 1, ok: bool = True) -> None:
    worker.send(m.Staged(1, group, call, 0, 0, vote=True))
    worker.receive(m.Commit)
    worker.send(m.Committed(1, group, call, ok, "" if ok else "it broke", 2000, 3000, 1000))
    assert trainer.receive(m.Finished).result.call == call


def test_the_exit_code_of_status_says_whether_something_needs_a_look(
    url: str, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["status", "--exit-code", "--endpoint", url]
    trainer, worker, group = agents
    assert cli.main(words) == 0
    open_round(trainer, worker)
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "version 1 batch 0.0  held" in shown and "look:" not in shown
    complete_round(trainer, worker, group, ok=False)
    assert cli.main(words) == 1
    shown = capsys.readouterr().out
    assert "look: channel policy: replica r0 is torn" in shown
    assert "round 1 failed after" in shown
    assert cli.main([*words, "--json"]) == 1
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert any(line.startswith("channel policy: replica r0 is torn") for line in answer["look"])
    (seen,) = answer["channels"]
    assert seen["ended"][0]["summary"].startswith("round 1 ")
    assert cli.main(["status", "--endpoint", url]) == 0  # It was not asked.


def test_after_a_mixed_round_the_exit_code_is_one_only_as_long_as_who_failed_is_there(
    url: str, agents: Agents, raw: Callable[[], Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["status", "--exit-code", "--endpoint", url]
    trainer, worker, group = agents
    other = raw()
    other.join(worker_hello("r1"))
    open_round(trainer, worker)
    other.receive(m.Deliver)
    other.send(m.Reject(1, group, 1, Code.PREPARE_FAILED, "no room"))
    other.send(m.Drained(1, group, 1, torn=False))
    other.beat()
    worker.send(m.Staged(1, group, 1, 0, 0, vote=True))
    worker.receive(m.Commit)
    worker.send(m.Committed(1, group, 1, True))
    assert trainer.receive(m.Finished).result.outcome is Outcome.MIXED
    assert cli.main(words) == 1
    shown = capsys.readouterr().out
    assert "look: channel policy: the last round, of version 1, ended mixed: replica r1" in shown
    other.send(m.Bye(1))
    other.receive(m.ByeOk)
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "look:" not in shown and "round 1 ended mixed" in shown


def test_the_help_of_status_says_what_needs_a_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a replica is torn, in doubt or not ready" in shown


def test_without_an_answer_the_exit_code_of_status_is_two_if_it_is_asked_for(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--endpoint", url, "--exit-code"]) == 2
    assert "no broker answers at" in capsys.readouterr().err


def test_a_story_ends_with_a_sentence_that_names_the_critical_path(
    url: str, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker, group = agents
    open_round(trainer, worker)
    words = ["story", "policy", "1", "--endpoint", url]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("round 1 has been under way for")
    complete_round(trainer, worker, group)
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("round 1 took ")
    assert cli.main([*words, "--json"]) == 0
    (attempt,) = msgspec.json.decode(capsys.readouterr().out)["rounds"]
    assert attempt["summary"].startswith("round 1 took ")
    times = {part["stage"]: part["seconds"] for part in attempt["path"]}
    whole = next(x["at_s"] for x in attempt["lines"] if x["text"].startswith("finished"))
    assert sum(times.values()) == pytest.approx(whole)


def test_a_story_that_the_broker_does_not_have_is_refused_with_those_that_it_has(
    url: str, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker, group = agents

    def refused(channel: str, version: int) -> str:
        assert cli.main(["story", channel, str(version), "--endpoint", url]) == 1
        return capsys.readouterr().err

    assert "version 1 of channel 'policy', nor for any other of it" in refused("policy", 1)
    for call in range(1, 35):
        open_round(trainer, worker, call)
        complete_round(trainer, worker, group, call)
    said = refused("policy", 1)
    # The last one is not among the 32 before the trainer has opened another.
    assert "no round for version 1 of channel 'policy'; it has versions 2 to 34; " in said
    assert "the last 32 of a channel" in said and "older ones are forgotten" in said
    assert "it has versions 2 to 34" in refused("policy", 35)
    assert "channel 'polcy', nor for any other of it" in refused("polcy", 3)


def test_a_drain_waits_for_the_round_under_way_and_the_next_is_admitted_after_its_undoing(
    url: str, agents: Agents, raw: Callable[[], Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker, group = agents
    open_round(trainer, worker)
    query = raw()
    codes: list[int] = []
    draining = threading.Thread(target=lambda: codes.append(cli.main(["drain", "--endpoint", url])))
    draining.start()
    waits: list[str] = []

    def told() -> bool:
        waits.append(capsys.readouterr().err)
        return bool(waits[-1])

    eventually(told)
    assert waits[-1].startswith("waits for channel policy: version 1, staging for ")
    assert "s, waits for r0" in waits[-1]
    assert query.status().stopping
    assert draining.is_alive()
    complete_round(trainer, worker, group)
    draining.join(10)
    assert codes == [0]
    assert capsys.readouterr().out.startswith("drained: no round is under way. ")

    trainer.send(m.Open(1, 2, Terms(2)))
    trainer.send(m.Batch(1, 2, 0, [0], False, 1, total=1), b"table")
    trainer.beat()
    (waiting,) = query.status().channels[0].rounds
    assert waiting.waits_for == "the broker to admit rounds again: it is drained"
    assert cli.main(["drain", "--endpoint", url, "--json"]) == 0
    assert capsys.readouterr().out == '{"under_way":[],"not_admitted":1}\n'
    assert cli.main(["drain", "--undo", "--endpoint", url]) == 0
    worker.receive(m.Deliver)
    complete_round(trainer, worker, group, 2)
    assert cli.main(["status", "--endpoint", url, "--exit-code"]) == 0


def test_a_drain_that_reaches_its_limit_names_what_is_under_way_and_stays_in_effect(
    url: str, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker, _ = agents
    open_round(trainer, worker)
    assert cli.main(["drain", "--endpoint", url, "--limit", "0.1"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "still under way after 0.1 s: channel policy: version 1" in said
    assert "r0/0 (pid" in said and "drain --undo" in said
    assert worker.status().stopping
    assert (worker.status().drained, worker.status().ending) == (True, False)
    assert cli.main(["status", "--endpoint", url]) == 0
    assert "look: the broker is drained: " in capsys.readouterr().out


def test_nothing_makes_a_broker_that_was_told_to_end_admit_rounds_again(
    url: str, threaded: Threaded, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker, group = agents
    open_round(trainer, worker)
    threaded.call(threaded.broker.stop)
    eventually(lambda: worker.status().stopping)
    assert (worker.status().drained, worker.status().ending) == (False, True)
    assert cli.main(["status", "--endpoint", url, "--json"]) == 0
    (line,) = msgspec.json.decode(capsys.readouterr().out)["look"]
    assert line.startswith("the broker was told to end: ")
    assert cli.main(["drain", "--undo", "--endpoint", url]) == 1
    assert "was told to end" in capsys.readouterr().err
    assert worker.ask(QueryKind.STATUS)[0].code is None and worker.status().stopping
    worker.send(m.Staged(1, group, 1, 0, 0, vote=True))
    worker.receive(m.Commit)
    worker.send(m.Committed(1, group, 1, True))
    assert trainer.receive(m.Finished).result.outcome is Outcome.COMMITTED


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("output", "says"),
    [(full_disk, "error: cannot write to stdout: No space left on device\n"), (closed_pipe, "")],
)
def test_what_a_broker_said_and_nobody_can_read_is_one_line_or_none(
    output: Callable[[], int], says: str, url: str, agents: Agents
) -> None:
    trainer, worker, group = agents
    open_round(trainer, worker)
    complete_round(trainer, worker, group)
    for words in ("status", "status --json", "story policy 1", "top --once", "top", "drain --json"):
        command = [sys.executable, "-P", "-m", "tensorlease.cli", *words.split()]
        stdout = output()
        done = subprocess.run(
            [*command, "--endpoint", url],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        os.close(stdout)
        assert (words, done.returncode, done.stderr) == (words, 1, says)


# ---------------------------------------------------------------- settings

WRONG = [
    ("[durations]\nstge = 30\n", {}, ["durations.stge = 30", "did you mean durations.stage?"]),
    ("[durations]\nstage = '30s'\n", {}, ["durations.stage = '30s'", "at most 86400"]),
    ("[durations]\nstage = -1\n", {}, ["durations.stage = -1", "greater than 0"]),
    ("[durations]\nstage = nan\n", {}, ["durations.stage = nan", "greater than 0"]),
    ("[durations]\nstage = 0\n", {}, ["durations.stage = 0", "greater than 0"]),
    (
        "",
        {"TENSORLEASE_LIMITS__WINDOW": "many"},
        ["TENSORLEASE_LIMITS__WINDOW = 'many'", "from 1 to 65536"],
    ),
    (
        "endpoints = ['tcp://127.0.0.1:5555', 'tcp://127.0.0.1:5555']\n",
        {},
        ["'tcp://127.0.0.1:5555'", "the same place"],
    ),
    (None, {}, ["absent.toml", "No such file or directory"]),
]


@pytest.mark.parametrize(("text", "environ", "words"), WRONG)
def test_settings_that_cannot_work_end_the_broker_and_the_check_alike_before_anything_is_bound(
    text: str | None,
    environ: dict[str, str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / ("absent.toml" if text is None else "broker.toml")
    if text is not None:
        file.write_text(text)
    place = tmp_path / "place"
    monkeypatch.setenv("TENSORLEASE_ENDPOINT", f"ipc://{place}/b.sock")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    said = set()
    for command in (
        ["broker", "--config", str(file)],
        ["broker", "--check-config", "--config", str(file)],
        ["broker", "--print-config", "--config", str(file)],
        ["config-check", str(file)],
        ["config-check", "--print", str(file)],
    ):
        assert cli.main(command) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        said.add(printed.err)
    (message,) = said
    assert [word for word in words if word not in message] == []
    assert not place.exists()


@pytest.mark.parametrize("words", ["config-check", "broker --config", "run --config"])
def test_a_fifo_in_place_of_the_file_is_refused_at_once(words: str, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    command = [sys.executable, "-P", "-m", "tensorlease.cli", *words.split(), str(fifo)]
    tail = ["--", "true"] if words.startswith("run") else []
    done = subprocess.run(
        [*command, *tail], capture_output=True, text=True, timeout=60, check=False
    )
    text = f"error: configuration file {fifo} is not a regular file; write the settings to one\n"
    assert (done.returncode, done.stderr) == (2, text)


def test_settings_that_can_work_are_said_to_and_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORLEASE_LIMITS__WINDOW", "5")
    file = tmp_path / "broker.toml"
    file.write_text("")
    assert cli.main(["config-check", str(file)]) == 0
    assert cli.main(["config-check"]) == 0
    assert capsys.readouterr().out == 2 * "the settings can work\n"
    assert cli.main(["config-check", str(file), "--print"]) == 0
    file.write_text(capsys.readouterr().out)
    assert load(file, {}).limits.window == 5
