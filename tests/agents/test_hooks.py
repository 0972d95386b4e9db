"""What a hook raised, as it travels."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from tensorlease.agents import ConfigError, WorkerAgent
from tensorlease.agents.hooks import bounded, describe, raised_by, require_callable
from tensorlease.protocol.limits import MAX_TEXT


def test_an_error_is_described_by_its_type_and_text() -> None:
    assert describe(ValueError("too small")) == "ValueError: too small"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_hook_that_raised_is_named() -> None:
    assert raised_by("on_commit", ValueError("x")) == "on_commit raised ValueError: x"
    assert raised_by("", ValueError("x")) == "ValueError: x"
    assert len(raised_by("on_commit", ValueError("x" * MAX_TEXT))) == MAX_TEXT


@pytest.mark.parametrize(
    ("name", "hook", "text"),
    [
        ("on_commit", lambda: None, r"on_commit .* takes \(\), and is called with \(round\)"),
        ("on_prepare", lambda round, model: None, r"takes \(round, model\), .* 'model'"),
        ("on_abort", lambda round, reason: None, r"is called with \(round, reason, torn\)"),
        ("on_stage", lambda tensors: None, r"is called with \(round, tensors\)"),
        ("on_stage", 5, "must be something that can be called"),
    ],
)
def test_a_hook_that_cannot_be_called_so_is_refused_when_it_is_given(
    name: str, hook: Any, text: str
) -> None:
    with WorkerAgent("policy") as worker, pytest.raises(ConfigError, match=text):
        getattr(worker, name)(hook)


def test_hooks_that_can_be_called_so_are_taken_with_whatever_else_they_have() -> None:
    class Engine:
        def reset(self, round: object, hard: bool = False) -> None:
            pass

    takes_all: Any = Mock()
    seen: list[str] = []
    reset = partial(Engine().reset, hard=True)
    for hook in (Engine().reset, print, reset, takes_all, seen.append):
        require_callable("on_commit", hook, "round")
    # What has no signature that Python knows.
    require_callable("on_commit", dict, "round")
    assert not takes_all.called


def test_a_text_that_utf8_does_not_have_can_travel() -> None:
    text = describe(OSError("no file '\udcff.bin'"))
    assert text == "OSError: no file '\\udcff.bin'"
    assert text.encode()


def test_what_a_hook_raised_is_one_line_that_changes_no_terminal() -> None:
    text = describe(RuntimeError("first\nlook: channel x: fake\x1b[2J\ttab\u2028end é"))
    assert text == "RuntimeError: first look: channel x: fake\\x1b[2J tab end é"


def test_a_long_text_is_cut_with_a_mark() -> None:
    assert bounded("x" * MAX_TEXT) == "x" * MAX_TEXT
    cut = bounded("\ud800" * MAX_TEXT)
    assert len(cut) == MAX_TEXT and cut.endswith(" ...")
