"""What commands say where no broker is: where they looked, and what to type."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from tensorlease import cli
from tensorlease.agents.discovery import DENIED_WAY_OUT, NotFoundError
from tensorlease.commands import query
from tensorlease.commands.query import NowhereError, find

ASKING = [
    ["status"],
    ["status", "--exit-code"],
    ["top", "--once"],
    ["story", "policy", "1"],
    ["drain"],
    ["drain", "--undo"],
]
ELSEWHERE = (
    "if one runs elsewhere, name it by --endpoint ADDRESS (the first line of its log has it)"
)
UNSET = ", or unset TENSORLEASE_ENDPOINT to look in the usual places"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory of the user's own; nothing is in the usual places of it."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.delenv("TENSORLEASE_ENDPOINT", raising=False)
        monkeypatch.setenv("TENSORLEASE_JOB", "a-job-that-nobody-has")
        yield directory


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) != 0
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("error: no broker answers at ipc://")
    assert "tensorlease run" not in text  # What a command could ask there would be nothing.
    return text.strip()


@pytest.mark.parametrize("words", ASKING)
def test_where_none_is_the_places_are_named_and_the_command_that_starts_one(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, *words)
    assert f"ipc://{place}/tensorlease/a-job-that" in text
    start = "else start one by `tensorlease broker --job a-job-that-nobody-has`"
    assert text.endswith(f"; {ELSEWHERE}; {start}")


@pytest.mark.parametrize("words", ASKING)
def test_an_endpoint_of_the_environment_is_named_as_such_and_can_be_unset(
    words: list[str],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"ipc://{place}/none.sock"
    monkeypatch.setenv("TENSORLEASE_ENDPOINT", url)
    text = said(capsys, *words)
    assert f"{url}: no such file or directory (of $TENSORLEASE_ENDPOINT); " in text
    start = f"else start one by `tensorlease broker --endpoint {url}`"
    assert text.endswith(f"; {ELSEWHERE}{UNSET}; {start}")


@pytest.mark.parametrize("words", ASKING)
def test_a_socket_that_was_left_behind_is_told_from_one_that_never_was(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/dead.sock")
    url = f"ipc://{place}/dead.sock"
    text = said(capsys, *words, "--endpoint", url)
    assert f"{url}: connection refused, the socket of a broker that has ended; " in text
    start = f"else start one by `tensorlease broker --endpoint {url}`"
    assert text.endswith(f"; {ELSEWHERE}; {start}") and UNSET not in text


def test_where_none_can_be_started_no_command_is_named(place: str) -> None:
    with pytest.raises(NowhereError) as caught:
        find(place, "")
    assert "this is a directory and no socket" in caught.value.where
    assert caught.value.way_out == ELSEWHERE


@pytest.mark.parametrize("name", ["push", "pull"])
def test_push_and_pull_say_the_same(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    files = pytest.importorskip("safetensors.torch")
    files.save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    url = f"ipc://{place}/none.sock"
    words = [name, *([str(tmp_path)] if name == "push" else [])]
    assert f"{ELSEWHERE}; else start one by" in said(capsys, *words, "--endpoint", url)


def test_doctor_has_the_place_and_the_way_out_apart(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"ipc://{place}/none.sock"
    assert cli.main(["doctor", "--json", "--endpoint", url]) == 1
    checks = msgspec.json.decode(capsys.readouterr().out)["checks"]
    (found,) = [check for check in checks if check["name"] == "broker"]
    assert found["text"] == f"no broker answers at {url}: no such file or directory"
    assert found["way_out"].endswith(f"else start one by `tensorlease broker --endpoint {url}`")


def test_where_permission_is_denied_it_says_who_can_give_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_broker(*_: str) -> NoReturn:
        where = "no broker answers at ipc:///x: permission denied"
        raise NotFoundError(where, DENIED_WAY_OUT, "", "", hopeless=True)

    monkeypatch.setattr(query, "find_broker", find_broker)
    with pytest.raises(NowhereError) as caught:
        find("ipc:///x", "")
    assert caught.value.way_out == f"{DENIED_WAY_OUT}; {ELSEWHERE}"
