"""What tests of `push` and `pull` share: what a command says, and what files hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tensorlease import cli
from tensorlease.broker.queries import Status
from tensorlease.commands.query import ask
from tensorlease.protocol.records import QueryKind

from ..command_lines import command
from ..procs import Spawn, Spawned

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents import WorkerAgent

MIB = int(os.environ.get("TENSORLEASE_TEST_PUSH_MIB", "64"))
DEADLINE_S = 30.0 + MIB / 4

Serve = Callable[..., "WorkerAgent"]


class Collect:
    """A callback that copies what comes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, _: object, given: object) -> None:
        assert isinstance(given, list)
        self.tensors.update((name, tensor.clone()) for name, tensor in given)


def loaded(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, read by the library."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = load_file(path)
        assert not content.keys() & found.keys()
        found |= content
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    import torch

    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and torch.equal(t, second[n]) for n, t in first.items()
    )


def error_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """What a failing call says on stderr, which is one line."""
    assert cli.main(words) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def pulling(spawn: Spawn, *words: str) -> Spawned:
    return spawn(command, "pull", "--timeout", str(DEADLINE_S), *words)


def channels() -> dict[str, int]:
    """Each channel that the broker knows of, with its last version; 0: none was committed."""
    _, body = ask(QueryKind.STATUS)
    found = msgspec.json.decode(body, type=Status).channels
    return {channel.name: channel.last_version for channel in found}
