"""README.md: its programs are the examples, its commands exist, and its first round is played."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from tensorlease.broker.settings import load
from tensorlease.command_table import COMMANDS
from tensorlease.engines.vllm_plugin import BACKEND

from .documents import ROOT, Command, blocks, broken_links, commands, fences, spans

README = ROOT / "README.md"
EXAMPLES = ROOT / "examples" / "two_processes"
DEADLINE_S = 60.0


def test_it_opens_with_what_the_thing_is_and_with_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    first = text.partition("\n## ")[0]
    assert [command.line for command in commands(README)][:2] == ["make demo", "make test"]
    assert "$ make demo" in first and "TORCH_INDEX" in first


def test_it_can_be_read_in_a_few_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").split()) < 1200


def test_every_block_is_of_a_kind_that_is_checked_here() -> None:
    assert {fence.language for fence in fences(README)} == {"console", "python", "toml", "text"}


def test_its_programs_are_the_examples_to_the_letter() -> None:
    shown = set(blocks(README, "python"))
    assert shown == {(EXAMPLES / name).read_text() for name in ("trainer.py", "worker.py")}


def test_every_link_leads_somewhere() -> None:
    assert broken_links(README) == []


def test_every_command_that_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = [command.line for command in commands(README)]
    named += [span for span in spans(README) if re.match(r"(make|tensorlease|python|pip) ", span)]
    assert len(named) > 8
    for line in named:
        program, *words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", line))
        if program == "vllm":
            assert (
                json.loads(words[words.index("--weight-transfer-config") + 1])["backend"] == BACKEND
            )
        elif program == "make":
            assert f"\n{words[0]}: " in makefile, line
        elif program == "python":
            assert (ROOT / words[0]).is_file(), line
        elif program == "pip":
            assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras), line
        else:
            command = COMMANDS[words[0]].load()
            if isinstance(command, click.Group):
                words = words[1:]
                command = command.commands[words[0]]
            options = {name for option in command.params for name in option.opts}
            ours = words[1 : words.index("--")] if "--" in words else words[1:]
            given = {word.partition("=")[0] for word in ours if word.startswith("--")}
            assert given <= options, line
            arguments = [p for p in command.params if isinstance(p, click.Argument)]
            if "--" in words:
                assert [argument.nargs for argument in arguments] == [-1], line
                continue
            assert len(arguments) == len([w for w in words[1:] if w[0] != "-" and w != "FILE"]), (
                line
            )


def test_the_configuration_is_one_that_the_broker_takes(tmp_path: Path) -> None:
    (text,) = blocks(README, "toml")
    file = tmp_path / "broker.toml"
    file.write_text(text)
    assert load(file, {}).socket_group == "tensorlease"


@pytest.mark.program
def test_the_first_round_goes_as_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = [c for c in commands(README) if re.match(r"(tensorlease broker|python )", c.line)]
    broker, worker, trainer = shown
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", f"ipc://{directory}/broker.sock")
        monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
        with started(broker) as first, started(worker) as second, started(trainer) as third:
            assert matches(trainer.output, finished(third))
            assert matches(worker.output, finished(second))
            # Once more, with the same broker.
            with started(worker) as second, started(trainer) as third:
                assert finished(third).startswith("version 6  committed")
                assert finished(second).startswith("version 6: the mean is 1.0")
            first.terminate()
            finished(first)
    assert os.listdir(tmp_path) == []


@contextmanager
def started(command: Command) -> Iterator[subprocess.Popen[str]]:
    """The process of a command line as a reader would type it, with this interpreter."""
    program, *words = command.line.split()
    if program == "tensorlease":
        words = ["-m", "tensorlease.cli", *words]
    process = subprocess.Popen(
        [sys.executable, "-P", *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended well."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return output


def matches(shown: str, printed: str) -> bool:
    """Whether output is what is shown, but for measured numbers, ids, pids and what `...` skips."""
    wanted, got = _comparable(shown), _comparable(printed)
    if wanted[-1:] == ["..."]:
        wanted.pop()
        got = got[: len(wanted)]
    assert wanted == got
    return bool(wanted)


def _comparable(text: str) -> list[str]:
    text = re.sub(r"\bw-[0-9a-f]{8}\b", "w-ID", text)
    text = re.sub(r"(?<=  )[\d.]+|(?<=[a-z] )[\d.]+(?=[,)])", "N", text)
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()]
