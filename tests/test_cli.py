"""The command `tensorlease`: lazy commands, exit codes, and one line for every failure."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

import tensorlease
from tensorlease import cli, command_table
from tensorlease.command_table import COMMANDS, Command
from tensorlease.protocol.errors import ConfigError, NoBrokerError

_HERE = __name__


@click.command()
@click.option("--count", type=int, default=0)
def returns_count(count: int) -> int:
    return count


@click.command()
def returns_nothing() -> None:
    """Ends well and says nothing."""


@click.command()
def finds_no_broker() -> None:
    raise NoBrokerError("no broker at ipc:///run/x;\nstart one: tensorlease broker")


@click.command()
def is_misconfigured() -> None:
    raise ConfigError("no setting 'prot'; the nearest is 'port'")


@click.command()
def is_interrupted() -> None:
    raise KeyboardInterrupt


@click.command()
def lacks_rich() -> None:
    raise ModuleNotFoundError("No module named 'rich.live'", name="rich.live")


@click.command()
def lacks_torch() -> None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


@click.command()
def is_defective() -> None:
    raise ModuleNotFoundError("No module named 'tensorleas'", name="tensorleas")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Command]:
    """The commands of this module in place of the real ones, each under its own name."""
    rows = {
        command.callback.__name__: Command(f"{_HERE}:{command.callback.__name__}", "A test's own.")
        for command in globals().values()
        if isinstance(command, click.Command) and command.callback is not None
    }
    rows["broken"] = Command("tensorlease.no_such_module:command", "Cannot be imported.")
    monkeypatch.setattr(command_table, "COMMANDS", rows)
    return rows


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    """What a failing call says on stderr, which is one line."""
    assert cli.main(words) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_command_that_returns_nothing_ends_with_0() -> None:
    assert cli.main(["returns_nothing"]) == 0


def test_a_command_chooses_its_exit_code() -> None:
    assert cli.main(["returns_count", "--count", "7"]) == 7


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tensorlease, version {tensorlease.__version__}\n"


def test_the_help_lists_every_command_and_imports_none(
    capsys: pytest.CaptureFixture[str], table: dict[str, Command]
) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in table)
    assert "Cannot be imported." in printed


def test_without_a_command_the_help_is_shown_and_the_call_was_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "returns_count" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = error_of(capsys, "return_count", code=2)
    assert said == "error: no command 'return_count'; the nearest is 'returns_count'\n"


def test_a_command_like_no_other_is_answered_with_all_of_them(
    capsys: pytest.CaptureFixture[str], table: dict[str, Command]
) -> None:
    said = error_of(capsys, "zzz", code=2)
    assert all(name in said for name in table)


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--cout" in error_of(capsys, "returns_count", "--cout", "1", code=2)


def test_a_wrong_value_is_one_line_that_names_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--count" in error_of(capsys, "returns_count", "--count", "many", code=2)


def test_our_own_errors_are_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "finds_no_broker", code=1)
    assert said == "error: no broker at ipc:///run/x; start one: tensorlease broker\n"


def test_a_wrong_setting_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'port'" in error_of(capsys, "is_misconfigured", code=2)


def test_a_missing_extra_is_answered_with_its_pip_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "lacks_rich", code=2)
    assert "needs rich" in said
    assert "pip install 'tensorlease[broker]'" in said


def test_missing_torch_is_answered_with_its_own_pip_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "pip install torch" in error_of(capsys, "lacks_torch", code=2)


def test_a_missing_module_that_no_extra_brings_is_a_defect_and_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="tensorleas"):
        cli.main(["is_defective"])


def test_a_row_that_cannot_be_imported_is_a_defect_and_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["broken"])


def test_a_row_that_names_no_command_is_refused(table: dict[str, Command]) -> None:
    table["number"] = Command("tensorlease.cli:FAILED", "A number.")
    with pytest.raises(TypeError, match="tensorlease.cli:FAILED is a int"):
        cli.main(["number"])


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["is_interrupted"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_of_the_table_loads(name: str) -> None:
    assert COMMANDS[name].load().get_short_help_str(limit=200)


def run_process(program: str) -> subprocess.CompletedProcess[str]:
    return run_words(sys.executable, "-P", "-c", program)


def run_words(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_click_the_process_says_the_pip_line_and_ends_with_2() -> None:
    done = run_process(
        "import sys; sys.modules['click'] = None\n"
        "from tensorlease.cli import main; sys.exit(main(['status']))"
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'tensorlease[broker]'" in done.stderr


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    done = run_process(
        "import os, sys\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        "from tensorlease.cli import main; sys.exit(main(['--help']))"
    )
    assert (done.returncode, done.stderr) == (1, "")


FULL = "error: cannot write to stdout: No space left on device\n"


PYTHONS = pytest.mark.parametrize(
    "python", [["-P", "-E"], ["-P", "-u"]], ids=["buffered", "unbuffered"]
)


@PYTHONS
@pytest.mark.parametrize(
    "words", ["--version", "--help", "status --help", "broker --print-config", "drain --help"]
)
def test_a_full_disk_is_one_line_and_1(words: str, python: list[str]) -> None:
    command = [sys.executable, *python, "-m", "tensorlease.cli", *words.split()]
    done = run_words("sh", "-c", 'exec "$@" >/dev/full', "sh", *command)
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize(
    "writes",
    [
        "print('x')",
        "sys.stdout.buffer.write(b'x')",
        "rich.print('x')",
        "print('x', end=''); raise NoBrokerError('none')",
    ],
)
def test_a_full_disk_is_told_however_it_is_written_to(writes: str) -> None:
    done = run_process(
        "import os, sys, rich\n"
        "from tensorlease import cli\n"
        "from tensorlease.protocol.errors import NoBrokerError\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        f"def command(words): {writes}\n"
        "cli._run = command; sys.exit(cli.main([]))"
    )
    said = "error: none\n" if "raise" in writes else ""
    assert (done.returncode, done.stderr) == (1, said + FULL)


def test_other_files_that_cannot_be_written_are_not_taken_for_stdout() -> None:
    done = run_process(
        "import sys\n"
        "from tensorlease import cli\n"
        "def command(words): open('/dev/full', 'wb', buffering=0).write(b'x')\n"
        "cli._run = command; sys.exit(cli.main([]))"
    )
    assert "cannot write to stdout" not in done.stderr
    assert done.stderr.endswith("OSError: [Errno 28] No space left on device\n")


@PYTHONS
@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), (">/dev/full 2>/dev/full", 1)])
def test_where_nothing_can_be_said_the_exit_code_remains(
    closed: str, code: int, python: list[str]
) -> None:
    status = "import sys; print(sys.stdout.isatty())"
    program = f"from tensorlease import cli; cli._run = lambda words: exec({status!r})"
    call = "import sys; sys.exit(cli.main([]))"
    command = [sys.executable, *python, "-c", f"{program}; {call}"]
    done = run_words("sh", "-c", f'exec "$@" {closed}', "sh", *command)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_the_shells_completion_knows_the_commands_and_imports_none() -> None:
    program = (
        "import os, sys\n"
        "os.environ.update(_TENSORLEASE_COMPLETE='bash_complete', COMP_WORDS='tensorlease st',"
        " COMP_CWORD='1')\n"
        "from tensorlease.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in sys.modules if name.startswith('tensorlease.commands')])\n"
    )
    done = run_process(program)
    assert done.stdout.splitlines() == ["plain,status", "plain,story", "[]"]
