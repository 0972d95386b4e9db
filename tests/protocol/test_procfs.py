"""What is read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorlease.protocol.procfs import effective_uid, start_time_ticks, supplementary_groups

STAT = "12 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21"


def test_the_start_time_is_found_behind_a_command_with_spaces_and_brackets() -> None:
    assert start_time_ticks(STAT) == 4242


def test_the_start_time_of_this_process_is_a_positive_number() -> None:
    assert start_time_ticks(Path("/proc/self/stat").read_text()) > 0


@pytest.mark.parametrize("text", ["", "12 (a", "12 (a) S 1"])
def test_text_that_is_no_stat_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a /proc/PID/stat line"):
        start_time_ticks(text)


def test_groups_and_uid_are_those_of_this_process() -> None:
    status = Path("/proc/self/status").read_text()
    assert supplementary_groups(status) == frozenset(os.getgroups())
    assert effective_uid(status) == os.geteuid()


def test_a_status_without_the_lines_gives_nothing() -> None:
    assert supplementary_groups("Name:\tx\n") == frozenset()
    assert effective_uid("Name:\tx\n") is None
