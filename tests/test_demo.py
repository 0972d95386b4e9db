"""The demo: a real model, real processes, equal bytes, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tensorlease import cli
from tensorlease.commands.demo import DemoReport, leftovers, verdict
from tensorlease.demo.display import Display, Row
from tensorlease.demo.processes import Child, Processes
from tensorlease.demo.reports import Plan, Receiver, Round, Size, Wrote
from tensorlease.demo.text import Vocabulary, corpus, find_pieces, windows

COMMAND = [sys.executable, "-P", "-m", "tensorlease.cli", "demo", "--quick"]
WORKERS = ("solo/0", "pair/0", "pair/1")
PLAN = Plan([], Size(), versions=2, steps=40, batch=1, held_out=1, line=1, seed=0)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the demo puts temporary files and segments; both must be empty when it has ended."""
    # Beside tmp_path, whose name is too long for a socket's.
    temporary, segments = tmp_path / "t", tmp_path / "s"
    temporary.mkdir()
    segments.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
    return temporary, segments


@contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process in a session of its own, which has its first version on the screen."""
    with subprocess.Popen(
        [*COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def told_by(process: subprocess.Popen[str]) -> tuple[dict[str, int], str]:
    """Reads the output up to the first committed version; the processes by name, and the broker."""
    assert process.stdout is not None
    pids: dict[str, int] = {}
    address = ""
    for line in process.stdout:
        if "tensorlease top --endpoint " in line:
            address = line.split()[-1]
        if line.startswith("pids: "):
            pairs = re.findall(r"([a-z]+(?: [\w/]+)?) (\d+)(?:, |$)", line.removeprefix("pids: "))
            pids = {name: int(pid) for name, pid in pairs}
        if "committed" in line:
            return pids, address
    raise AssertionError(f"it ended too early: {process.communicate()}")


def assert_nothing_left(places: tuple[Path, Path], pids: dict[str, int]) -> None:
    assert len(pids) == 6
    assert [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()] == []
    assert [os.listdir(place) for place in places] == [[], []]


@pytest.mark.program
def test_the_demo_learns_hands_over_equal_bytes_and_leaves_nothing(
    places: tuple[Path, Path],
) -> None:
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == b""
    report = msgspec.json.decode(done.stdout, type=DemoReport)
    assert report.ok and report.leftovers == []
    assert [row.version for row in report.versions] == [1, 2, 3]
    losses = [row.held_out for row in report.versions]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < report.unigram < losses[0]
    names = {"trainer 0", "trainer 1", *(f"worker {name}" for name in WORKERS)}
    for row in report.versions:
        assert row.digests.keys() == names
        assert len(set(row.digests.values())) == 1
        assert row.round is not None and row.round.outcome == "committed"
        assert {receiver.name for receiver in row.round.receivers} == set(WORKERS)
        assert row.lines["pair/0"] == row.lines["pair/1"]
    assert len({row.digests["trainer 0"] for row in report.versions}) == 3
    assert_nothing_left(places, report.pids)


@pytest.mark.program
@pytest.mark.parametrize(
    "options", [("--by-hand",), pytest.param(("--device=cuda",), marks=pytest.mark.gpu)]
)
def test_trainers_that_cut_the_model_by_hand_do_so_too(
    places: tuple[Path, Path], options: tuple[str, ...]
) -> None:
    words = (*COMMAND, "--versions=2", "--steps=8", "--json", *options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(done.stdout, type=DemoReport)
    assert report.ok and all(version.equal for version in report.versions)
    assert [len(version.digests) for version in report.versions] == [5, 5]
    assert len({version.digests["trainer 0"] for version in report.versions}) == 2
    assert report.leftovers == []
    assert not any(os.listdir(place) for place in places)


@pytest.mark.program
def test_one_changed_byte_in_one_half_of_the_pair_fails_the_demo(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORLEASE_TEST_CORRUPT", "pair/1")
    command = [*COMMAND, "--json", "--versions", "2"]
    done = subprocess.run(command, capture_output=True, timeout=90, check=False)
    assert done.returncode == 1 and done.stdout, done.stderr
    report = msgspec.json.decode(done.stdout, type=DemoReport)
    assert not report.ok and "version 1 is not the same everywhere" in report.text
    digests = report.versions[0].digests
    differing = {name for name, digest in digests.items() if digest != digests["trainer 0"]}
    assert differing == {"worker pair/1"}
    assert_nothing_left(places, report.pids)


def test_one_version_is_too_few_since_nothing_would_be_learned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["demo", "--versions=1"]) == 2
    assert "1 is not in the range x>=2" in capsys.readouterr().err


@pytest.mark.program
def test_a_killed_worker_fails_the_demo_by_its_name(places: tuple[Path, Path]) -> None:
    with running("--versions", "500") as process:
        pids, _ = told_by(process)
        os.kill(pids["worker pair/1"], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"error: worker pair/1 (pid {pids['worker pair/1']}) was killed by SIGKILL" in errors
    assert_nothing_left(places, pids)


@pytest.mark.program
def test_ctrl_c_ends_all_processes_soon(places: tuple[Path, Path]) -> None:
    with running("--versions", "500") as process:
        pids, address = told_by(process)
        assert cli.main(["status", "--endpoint", address]) == 0
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
        _, errors = process.communicate(timeout=30)
        took_s = time.monotonic() - began
    assert process.returncode == 130
    assert errors == "interrupted; no process, segment or file is left\n"
    assert took_s < 5
    assert_nothing_left(places, pids)


def complete_row(held_out: float = 1.0, *, odd: str = "") -> Row:
    receivers = [Receiver(name, 2**20, 0.001, 0.002, 0.003) for name in WORKERS]
    wrote = {name: Wrote(1, held_out, f"line of {name}", "same") for name in WORKERS}
    names = ["trainer 0", "trainer 1", *(f"worker {name}" for name in WORKERS)]
    digests = {name: "other" if name == odd else "same" for name in names}
    return Row(1, digests, Round(1, "committed", 0.02, 1.5, receivers), wrote)


FIRST = complete_row(held_out=3.0)


@pytest.mark.parametrize(
    ("rows", "left", "reason"),
    [
        ([], [], "only 0 of 2 versions"),
        ([FIRST, Row(2)], [], "only 1 of 2 versions"),
        ([FIRST, complete_row(odd="worker solo/0")], [], "not the same everywhere"),
        ([FIRST, complete_row(odd="trainer 1")], [], "not the same everywhere"),
        ([FIRST, complete_row(held_out=2.5)], [], "not below the unigram model's 2.000"),
        ([FIRST, FIRST], [], "not below that of the first version, 3.000"),
        ([FIRST, complete_row(held_out=float("nan"))], [], "not below that of the first"),
        ([FIRST, complete_row()], ["process 7"], "left behind: process 7"),
    ],
)
def test_the_demo_succeeds_only_if_everything_is_right(
    rows: list[Row], left: list[str], reason: str
) -> None:
    ok, text = verdict(rows, PLAN, 2.0, left, 1.0)
    assert not ok and text.startswith("FAILED: ") and reason in text
    assert verdict([FIRST, complete_row()], PLAN, 2.0, [], 1.0)[0]
    # Too few steps to be better than that.
    short = msgspec.structs.replace(PLAN, steps=39)
    assert verdict([FIRST, complete_row(held_out=2.5)], short, 2.0, [], 1.0)[0]


DUMPED = """Timeout (0:01:05)!
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 331 in wait
Thread 0x00007f02 (most recent call first):
  File "distributed_c10d.py", line 8 in all_gather
  File "worker.py", line 9 in gathered
  File "worker.py", line 10 in serve
"""


def test_where_a_process_hangs_that_tells_nothing_is_said(tmp_path: Path) -> None:
    processes = Processes.__new__(Processes)
    processes._directory = tmp_path
    child = Child.__new__(Child)
    child.name = "worker pair/1"
    log = tmp_path / "worker-pair-1.log"
    log.write_text("a word\n")
    assert processes._hangs_in(child) == ""
    log.write_text(f"a word\n{DUMPED}")
    assert processes._hangs_in(child) == (
        ' (in File "distributed_c10d.py", line 8 in all_gather <- File "worker.py", line 9 in'
        " gathered)"
    )


def test_a_process_that_ends_while_it_is_looked_at_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending:
        """Lives when it is looked at first, and has ended when it is looked at again."""

        pid = 1
        looks = 0

        @property
        def exitcode(self) -> int | None:
            self.looks += 1
            return None if self.looks == 1 else 0

    monkeypatch.setattr("tensorlease.demo.processes.LIMIT_S", -9.0)
    ended, says = os.pipe()
    os.close(says)
    never, writes = os.pipe()
    process = Ending()
    process.sentinel = ended  # type: ignore[attr-defined]
    child = Child("worker", process, None)  # type: ignore[arg-type]
    processes = Processes.__new__(Processes)
    processes._interrupted, processes._broker_fd, processes.children = False, never, [child]
    assert list(processes.reports()) == []
    for descriptor in (ended, never, writes):
        os.close(descriptor)


def test_living_processes_and_their_segments_count_as_left_behind(
    places: tuple[Path, Path],
) -> None:
    own = {"me": os.getpid()}
    assert leftovers(own, places[0] / "none", False) == [f"process {os.getpid()}"]


def test_without_torch_the_demo_says_the_pip_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tensorlease.commands.demo.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install torch" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_row_shows_the_round_and_the_lines_of_both_replicas(terminal: bool) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, height=40, record=True)
    with Display(console, ["the title"]) as display:
        display.add_title("pids: broker 1")
        display.show([complete_row(), Row(2)], "training")
    text = console.export_text()
    assert "the title" in text and "committed" in text and "equal" in text
    assert "solo  line of solo/0" in text and "pair  line of pair/0" in text
    row = next(line for line in text.splitlines() if "committed" in line)
    assert " ".join(row.split()) == "1 committed 3 3.0 1.0 2.0 3.0 20.0 1.500 1.000 equal"


def test_the_text_is_english_and_its_held_out_part_is_not_trained_on() -> None:
    train, held_out = corpus()
    assert len(train) > 100_000 and len(held_out) > 10_000
    assert train.count(b" the ") > 1000
    assert not set(train.splitlines()) & set(held_out.splitlines())


def test_tokens_decode_to_the_text_that_they_encode() -> None:
    train, held_out = corpus()
    vocabulary = Vocabulary(find_pieces(train, 512))
    assert len(vocabulary) == len(set(vocabulary.pieces)) == 512
    for text in (held_out, bytes(range(256))):
        tokens = vocabulary.encode(text)
        assert b"".join(vocabulary.pieces[token] for token in tokens) == text
    assert vocabulary.decode(vocabulary.encode(b"The end\x00\xff")) == "The end··"
    assert len(vocabulary.encode(held_out)) < len(held_out) / 2


def test_a_unigram_model_loses_the_entropy_of_what_it_was_trained_on() -> None:
    vocabulary = Vocabulary([bytes([value]) for value in range(256)])
    tokens = [ord("a"), ord("b")] * 100_000
    assert vocabulary.unigram_loss(tokens, [tokens[:1001]]) == pytest.approx(0.6931, abs=0.01)


def test_windows_lie_at_even_distances_and_inside_the_text() -> None:
    assert windows(range(10), 4, 3) == [range(4), range(3, 7), range(6, 10)]
    assert windows(range(10), 4, 1) == [range(4)]
