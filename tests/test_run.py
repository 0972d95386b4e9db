"""The command `tensorlease run`, with real commands: a private broker for their life."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorlease import cli
from tensorlease.commands.private_broker import private_directory, verb

from .broker import raw_agents
from .broker.raw_agents import eventually

DEADLINE_S = 30.0
TENSORLEASE = [sys.executable, "-P", "-m", "tensorlease.cli"]
AGENT = shlex.join([sys.executable, "-P", raw_agents.__file__])

# Says "ready", then for each signal its name; ends once it has heard no other for a while.
LISTENER = """
import signal, sys
names = {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"}
signals = {getattr(signal, name) for name in names}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
first = signal.sigtimedwait(signals, 20)
heard = [first]
while (more := signal.sigtimedwait(signals, 0.3)) is not None:
    heard.append(more)
print(*(signal.Signals(came.si_signo).name for came in heard), flush=True)
sys.exit(33)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        yield Path(directory)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, short: Path) -> Path:
    """The user's runtime directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    monkeypatch.delenv("TENSORLEASE_ENDPOINT", raising=False)
    return short / "tensorlease"


@pytest.fixture
def start(runtime: Path) -> Iterator[Start]:
    """Starts `tensorlease run`; whatever is left of it is killed in the end."""
    made: list[subprocess.Popen[str]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        made.append(
            subprocess.Popen(
                [*TENSORLEASE, "run", *words], stdout=pipe, stderr=pipe, text=True, **options
            )
        )
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(start: Start, *words: str) -> tuple[int, str, str]:
    """Its exit code and what it printed."""
    process = start(*words)
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def broker_pid(url: str) -> int:
    note = json.loads(Path(f"{url.removeprefix('ipc://')}.lock").read_text())
    assert isinstance(note["pid"], int)
    return note["pid"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- in order


@pytest.mark.program
def test_a_command_has_a_broker_of_its_own_at_a_private_place_and_nothing_is_left(
    start: Start, runtime: Path
) -> None:
    code, out, err = run(
        start,
        "--",
        "sh",
        "-c",
        'echo "$TENSORLEASE_ENDPOINT"; stat -c %a "$(dirname "${TENSORLEASE_ENDPOINT#ipc://}")";'
        f' {shlex.join(TENSORLEASE)} status; echo "$#:$1:$2:$3"; exit 7',
        "name",
        "two words",
        "--",
        "--log-level",
    )
    assert (code, err) == (7, "")
    place, mode, status, *_, arguments = out.splitlines()
    assert place.startswith(f"ipc://{runtime}/run-")
    assert mode == "700"
    assert status.startswith("broker ") and status.endswith(" 0 agents")
    assert arguments == "3:two words:--:--log-level"
    assert list(runtime.iterdir()) == []


@pytest.mark.program
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["sh", "-c", "kill -KILL $$"], 128 + 9, ""),
        (["no-such-command"], 127, "cannot run no-such-command: No such file or directory"),
        (["/etc"], 126, "cannot run /etc: Permission denied"),
    ],
)
def test_the_exit_code_is_the_commands_own_or_says_that_it_could_not_start(
    start: Start, runtime: Path, command: list[str], code: int, says: str
) -> None:
    said = f"tensorlease run: {says}\n" if says else ""
    assert run(start, "--", *command) == (code, "", said)
    assert list(runtime.iterdir()) == []


def test_without_a_command_the_call_was_wrong_and_an_example_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["run"], ["run", "--"], ["run", "--log-level", "info"]):
        assert cli.main(words) == 2
        assert "tensorlease run -- python train.py" in capsys.readouterr().err


@pytest.mark.program
def test_a_broker_that_cannot_start_says_why_and_the_command_is_not_started(
    start: Start, runtime: Path
) -> None:
    code, out, err = run(start, "--log-level", "loud", "--", "echo", "started")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "--log-level" in err and "'loud'" in err
    assert list(runtime.iterdir()) == []


# ---------------------------------------------------------------- signals


@pytest.mark.program
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_reaches_the_command_once_whether_sent_to_the_process_or_its_group(
    start: Start, runtime: Path, name: str
) -> None:
    process = start("--", sys.executable, "-c", LISTENER)
    assert line(process) == "ready"
    (os.killpg if name == "SIGINT" else os.kill)(process.pid, getattr(signal, name))
    assert line(process) == name
    assert process.wait(DEADLINE_S) == 33
    assert list(runtime.iterdir()) == []


@pytest.mark.program
def test_what_is_for_the_command_alone_does_not_reach_its_children(
    start: Start, runtime: Path
) -> None:
    listener = shlex.join([sys.executable, "-c", LISTENER])
    program = f"{listener} & trap 'echo told; kill -HUP $!' TERM; wait; wait"
    process = start("--", "sh", "-c", program)
    assert line(process) == "ready"
    process.terminate()
    assert [line(process), line(process)] == ["told", "SIGHUP"]
    process.wait(DEADLINE_S)


@pytest.mark.program
def test_at_a_terminal_the_command_reads_what_is_typed_and_hears_ctrl_c_once(
    start: Start, runtime: Path
) -> None:
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    program = "print(input(), flush=True)\n" + LISTENER
    process = start("--", sys.executable, "-c", program, stdin=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    os.write(ours, b"typed\n")
    assert line(process) == "typed"
    assert line(process) == "ready"
    os.write(ours, b"\x03")
    assert line(process) == "SIGINT"
    assert process.wait(DEADLINE_S) == 33
    os.close(ours)
    assert list(runtime.iterdir()) == []


@pytest.mark.program
def test_an_interrupt_while_the_broker_starts_leaves_nothing(start: Start, runtime: Path) -> None:
    process = start("--", "echo", "started")
    eventually(lambda: runtime.exists() and any(runtime.iterdir()))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    # It may have been too late by a hair: then the command has run, or was interrupted itself.
    assert (process.returncode, out) in ((130, ""), (0, "started\n"))
    assert err == ""
    assert list(runtime.iterdir()) == []


# ---------------------------------------------------------------- out of order


@pytest.mark.program
def test_killed_it_leaves_neither_broker_nor_command_nor_directory(
    start: Start, runtime: Path
) -> None:
    process = start("--", "sh", "-c", 'echo "$TENSORLEASE_ENDPOINT $$"; exec sleep 60')
    url, pid = line(process).split()
    broker, command = broker_pid(url), int(pid)
    assert alive(broker) and alive(command)
    process.kill()
    eventually(lambda: not alive(broker) and not alive(command))
    assert list(runtime.iterdir()) == []


@pytest.mark.program
def test_a_broker_that_dies_is_told_in_one_line_and_the_command_goes_on(
    start: Start, runtime: Path
) -> None:
    process = start(
        "--", "sh", "-c", 'echo "$TENSORLEASE_ENDPOINT"; read x; exit 5', stdin=subprocess.PIPE
    )
    url = line(process)
    pid = broker_pid(url)
    os.kill(pid, signal.SIGKILL)
    assert process.stderr is not None and process.stdin is not None
    said = process.stderr.readline()
    assert f"the broker (pid {pid}) was killed by SIGKILL; sh goes on without" in said
    assert said.endswith(f"tensorlease broker --endpoint {url}\n")
    _, rest = process.communicate("go on\n", timeout=DEADLINE_S)
    assert (process.returncode, rest) == (5, "")
    assert list(runtime.iterdir()) == []


@pytest.mark.program
def test_an_agent_that_outlives_the_command_has_a_short_while_and_is_told_of(
    start: Start, runtime: Path
) -> None:
    os.mkfifo(fifo := runtime.parent / "fifo")
    # The agent's first line says that it has joined: then the command ends, the agent does not.
    agent = f'{AGENT} "$TENSORLEASE_ENDPOINT" a locked > {fifo} & echo $!; read x < {fifo}; exit 3'
    process = start("--grace", "0.2", "--", "sh", "-c", agent)
    pid = int(line(process))
    assert process.stderr is not None
    said = process.stderr.readline()
    assert (
        said == "tensorlease run: sh has ended, one agent still uses its broker, which ends now\n"
    )
    try:
        assert process.wait(DEADLINE_S) == 3
        assert list(runtime.iterdir()) == []
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.program
def test_an_agent_that_is_killed_with_the_command_is_not_waited_for(
    start: Start, runtime: Path
) -> None:
    os.mkfifo(fifo := runtime.parent / "fifo")
    program = f'{AGENT} "$TENSORLEASE_ENDPOINT" a locked > {fifo} & read x < {fifo}; kill -KILL $!'
    process = start("--grace", "20", "--", "sh", "-c", program)
    _, err = process.communicate(timeout=10.0)
    assert process.returncode == 0
    assert "still uses" not in err
    assert list(runtime.iterdir()) == []


# ---------------------------------------------------------------- the directory


def test_the_directory_is_private_and_in_the_first_place_that_is_the_users_own(
    short: Path,
) -> None:
    uid = os.geteuid()
    found = Path(private_directory({"XDG_RUNTIME_DIR": str(short)}, uid))
    assert found.parent == short / "tensorlease"
    assert found.stat().st_mode & 0o777 == 0o700
    assert found.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["open", "file", "link", "long"])
def test_a_place_that_is_not_safe_or_too_long_is_passed_over(short: Path, what: str) -> None:
    base = short
    match what:
        case "open":
            (base / "tensorlease").mkdir()
            (base / "tensorlease").chmod(0o777)
        case "file":
            (base / "tensorlease").touch()
        case "link":
            (base / "real").mkdir(mode=0o700)
            (base / "tensorlease").symlink_to("real")
        case _:
            base = short / ("x" * 90)
            base.mkdir()
    found = Path(private_directory({"XDG_RUNTIME_DIR": str(base)}, os.geteuid()))
    try:
        assert not found.is_relative_to(short)
        assert found.stat().st_mode & 0o777 == 0o700
    finally:
        found.rmdir()


def test_how_a_process_ended_is_said_in_words() -> None:
    assert verb(9) == "was killed by SIGKILL"
    assert verb(3 << 8) == "ended with code 3"
