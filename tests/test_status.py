"""How a status is shown as text."""

from __future__ import annotations

import io

import click
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from tensorlease.broker.queries import ChannelStatus, Status
from tensorlease.commands import status
from tensorlease.commands.story import MAX_SPANS, spans, story
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import QueryKind

from . import test_concerns as made


def shown(seen: Status) -> str:
    text = io.StringIO()
    status.show(seen, Console(file=text, width=80))
    return text.getvalue()


def test_a_channel_where_nobody_is_and_nothing_was_is_left_out() -> None:
    nobody = ChannelStatus("polcy", 0, None, [], [])
    busy = made.status()
    both = msgspec.structs.replace(busy, channels=[nobody, *busy.channels])
    assert "polcy" not in shown(both) and "channel policy" in shown(both)
    was = msgspec.structs.replace(nobody, ended=[made.ended("failed")])
    assert "channel polcy" in shown(msgspec.structs.replace(busy, channels=[was]))


def test_in_a_pipe_no_line_is_cut_or_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "member 0 finds no source: " + "layers.0.mlp.gate_proj.weight, " * 8
    seen = made.status(made.channel(replicas=[made.replica(ready=False, reason=reason)]))

    def ask(kind: QueryKind, **_: object) -> tuple[m.Reply | None, bytes]:
        return None, msgspec.json.encode(seen)

    monkeypatch.setattr(status, "ask", ask)
    ran = CliRunner().invoke(status.status, ["--endpoint", "ipc:///nowhere"])
    assert ran.exit_code == 0, ran.output
    assert any(line.rstrip().endswith(reason.strip()) for line in ran.output.splitlines())


def test_a_version_that_is_no_number_is_refused_as_one() -> None:
    ran = CliRunner().invoke(story, ["policy", "x"])
    assert ran.exit_code == click.UsageError.exit_code, ran.output
    assert "'x' is not a valid version: a whole number of at least 1" in ran.output


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ([7], "version 7"),
        ([5, 6, 7], "versions 5 to 7"),
        ([1, 3], "versions 1 and 3"),
        ([1, 4, 5, 9], "versions 1, 4 to 5 and 9"),
        (
            list(range(1, 2 * MAX_SPANS + 2, 2)),
            "versions 3, 5, 7, 9, 11, 13, 15 and 17, and earlier ones",
        ),
    ],
)
def test_versions_are_named_in_a_few_words_however_many_there_are(
    versions: list[int], text: str
) -> None:
    assert spans(versions) == text
