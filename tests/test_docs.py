"""docs/: each program runs as it stands, and each table that repeats the code says what it says.

Run as a script, it prints the table of settings for docs/operations.md, meanings kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.server import RELOADABLE, value_of
from tensorlease.broker.settings import SETTINGS, load
from tensorlease.command_table import COMMANDS
from tensorlease.protocol.endpoint import parse_endpoint

from .documents import ROOT, blocks, broken_links, programs, spans, tables
from .procs import Spawn, Spawned, broker_process, spawning

DOCS = ROOT / "docs"
AGENTS = DOCS / "agents.md"
OPERATIONS = DOCS / "operations.md"
DOCUMENTS = [AGENTS, OPERATIONS, DOCS / "benchmarks.md", DOCS / "integrations.md"]
DEADLINE_S = 60.0

# A worker whose first try fails, for the document's retry.
UNLUCKY = """
import torch
import tensorlease as tl

tries = []

def prepare(round):
    tries.append(round.version)
    if len(tries) == 1:
        raise RuntimeError("not now")

with tl.WorkerAgent("policy", replica="unlucky") as worker:
    worker.on_prepare(prepare)
    worker.attach(torch.nn.Linear(8, 8).state_dict())
    worker.run(until=1)
print(tries)
"""


class Part(NamedTuple):
    """A program of a scenario."""

    program: str
    says: str
    """A pattern that is found in what one of its processes prints."""
    ranks: int = 0
    """How many processes a launcher would start; 0: it needs none."""


COMMITTED = r"version 3  committed"
SCENARIOS = {
    "a training loop": [Part("trainer.py", COMMITTED), Part("worker.py", "at version 3")],
    "a pair": [Part("pair.py", COMMITTED)],
    "an end": [Part("trainer.py", COMMITTED), Part("ending.py", "left at version 3")],
    "the fence": [
        Part("fenced.py", rf"{COMMITTED}(.|\n)*serving version 3"),
        Part("worker.py", "at version 3"),
    ],
    "ddp": [Part("ddp.py", COMMITTED, ranks=2), Part("worker.py", "at version 3")],
    "fsdp": [Part("fsdp.py", COMMITTED, ranks=2), Part("worker.py", "at version 3")],
    "pieces": [
        Part("rows.py", "", ranks=2),
        Part("columns.py", re.escape(str([30.0] * 4 + [31.0] * 4)), ranks=2),
    ],
    "fused": [
        Part("fused_trainer.py", ""),
        Part(
            "fused_worker.py",
            re.escape(
                f"{[304, 305, 306, 307, 302, 303, 302, 303]} {[*range(304, 308), *range(312, 316)]}"
            ),
            ranks=2,
        ),
    ],
    "dtypes": [
        Part("cast_trainer.py", COMMITTED),
        Part("cast_worker.py", r"torch\.float16 \[3\.0\]", ranks=2),
    ],
    "gpu": [Part("gpu_trainer.py", COMMITTED), Part("gpu_worker.py", r"at version 3 3\.0")],
    "another way": [
        Part("staged_trainer.py", r"\{0: \('(ipc|staging)',\)\}"),
        Part("gpu_worker.py", r"at version 3 3\.0"),
    ],
    "asyncio": [Part("async_trainer.py", ""), Part("async_worker.py", r"version 3 3\.0")],
    "ring": [Part("ring_trainer.py", "4 slots, 64 MiB"), Part("ring_worker.py", "at version 3")],
    "callback": [
        Part("stage_trainer.py", COMMITTED),
        Part("stage_worker.py", r"at version 3\nq 3\.0, k 3\.0, scale 4\.0"),
    ],
    "loader": [
        Part("loader_trainer.py", COMMITTED),
        Part("loader_worker.py", r"q 3\.0, inverse 0\.25\n\{'scale': '.*aten::reciprocal'\}"),
    ],
    "subset": [
        Part("lora_trainer.py", COMMITTED),
        Part("lora_worker.py", r"base 1\.0, adapter 3\.0"),
    ],
    "channels": [
        Part("two_trainers.py", ""),
        Part("two_channels.py", r"\{'policy': 3\.0, 'critic': -3\.0\}"),
    ],
    "retry": [
        Part("retry.py", r"unlucky: expelled .*not now\nlast version 1\n"),
        Part("unlucky.py", r"\[1, 1\]"),
    ],
}


def test_every_program_of_the_document_is_in_a_scenario() -> None:
    played = {part.program for parts in SCENARIOS.values() for part in parts}
    assert set(programs(AGENTS)) | {"unlucky.py"} == played


def run_program(path: str, environment: dict[str, str]) -> str:
    """In a child: runs a program as a script; returns what it printed."""
    os.environ.update(environment)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as start:
        yield start


@pytest.mark.program
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gpu] * any("gpu_" in part.program for part in parts))
        for name, parts in SCENARIOS.items()
    ],
)
def test_the_programs_do_together_what_they_say(
    name: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = programs(AGENTS) | {"unlucky.py": UNLUCKY}
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        segments = Path(directory) / "shm"
        segments.mkdir()
        monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(segments))
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", url := f"ipc://{directory}/b.sock")
        broker_process(spawn, url)
        running: list[tuple[Part, list[Spawned]]] = []
        for part in SCENARIOS[name]:
            path = tmp_path / part.program
            path.write_text(texts[part.program], encoding="utf-8")
            run = [
                spawn(run_program, str(path), environment)
                for environment in launched(part, Path(directory))
            ]
            running.append((part, run))
        for part, processes in running:
            printed = [process.result(DEADLINE_S) for process in processes]
            assert any(re.search(part.says, text) for text in printed), printed
        assert list(segments.iterdir()) == []


def launched(part: Part, directory: Path) -> list[dict[str, str]]:
    """What torchrun would add to the environment of each process."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(part.ranks),
            "TORCHELASTIC_RUN_ID": part.program,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port(directory)),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(part.ranks)
    ] or [{}]


def free_port(directory: Path) -> int:
    """A port that nobody listens on; the same for all ranks of a test."""
    noted = directory / "port"
    if not noted.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            noted.write_text(str(probe.getsockname()[1]))
    return int(noted.read_text())


# ---------------------------------------------------------------- the other documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(document: Path) -> None:
    text = "\n".join([*spans(document), *blocks(document, "console"), *blocks(document, "sh")])
    found = re.findall(r"^(?:\$ |\S*/)?tensorlease ([a-z-]+)((?: --[a-z-]+)*)", text, re.MULTILINE)
    for name, options in found:
        command = COMMANDS[name].load()
        assert isinstance(command, click.Command)
        assert set(options.split()) <= {text for p in command.params for text in p.opts}, name


def settings_rows() -> list[list[str]]:
    """Of each setting: key, default, what is allowed, and whether SIGHUP changes it."""
    defaults = BrokerConfig()
    rows = []
    for key, setting in SETTINGS.items():
        value = value_of(defaults, key)
        default = value if isinstance(value, int | float | str) else getattr(value, "value", "[]")
        allowed = re.sub(r"a number of seconds .*", "seconds, up to 86400", setting.allowed)
        shown = f"`{default}`" if default != "" else '`""`'
        rows.append([f"`{key}`", shown, allowed, "yes" if key in RELOADABLE else ""])
    return rows


def test_the_table_of_settings_has_each_with_its_default_and_what_it_allows() -> None:
    (table,) = [rows for rows in tables(OPERATIONS) if rows[0][0] == "setting"]
    assert [row[:4] for row in table[1:]] == settings_rows()
    assert all(row[4] for row in table[1:]), "a setting without a meaning"


def test_the_rule_for_flags_and_variables_fits_every_setting() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    assert "`--limits-max-agents`" in text and "`TENSORLEASE_LIMITS__MAX_AGENTS`" in text
    for key, setting in SETTINGS.items():
        assert setting.flag == "--" + key.replace(".", "-")
        name = key.replace(".", "__").replace("-", "_").upper()
        assert setting.variable == f"TENSORLEASE_{name}"


def test_configuration_files_are_some_that_the_broker_takes(tmp_path: Path) -> None:
    shown = blocks(OPERATIONS, "toml")
    assert shown
    for text in shown:
        file = tmp_path / "broker.toml"
        file.write_text(text)
        assert load(file, {}) != BrokerConfig()


def test_the_files_that_it_names_are_those_beside_a_socket() -> None:
    endpoint = parse_endpoint("/run/tensorlease/broker.sock")
    text = OPERATIONS.read_text(encoding="utf-8")
    for path in (endpoint.path, endpoint.lock_path, endpoint.live_directory):
        assert f"`{Path(path).name}" in text


def test_the_files_for_systemd_that_it_installs_are_there() -> None:
    named = set(re.findall(r"systemd/(\S+)", OPERATIONS.read_text(encoding="utf-8")))
    shipped = {path.name for path in (ROOT / "systemd").iterdir()}
    assert shipped <= named


def main() -> None:
    """Prints the table of settings."""
    meanings = {
        row[0]: row[4] for rows in tables(OPERATIONS) if rows[0][0] == "setting" for row in rows[1:]
    }
    out = [["setting", "default", "allowed", "HUP", "meaning"], ["---"] * 5]
    out += [[*row, meanings.get(row[0], "")] for row in settings_rows()]
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in out))


if __name__ == "__main__":
    main()
