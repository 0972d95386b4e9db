"""Names of segments, and whose owner is gone."""

from __future__ import annotations

import pytest

from tensorlease.protocol.segments import (
    ProcessStat,
    SegmentName,
    abandoned,
    parse_name,
    parse_stat,
)

NAME = SegmentName(uid=0, pid=12, start=34, namespace=4026531836, instance="0123abcd", number=7)
TEXT = "tensorlease-0-12-34-4026531836-0123abcd-7"


def test_a_name_tells_its_owner_and_reads_back() -> None:
    assert str(NAME) == TEXT
    assert parse_name(TEXT) == NAME


@pytest.mark.parametrize(
    "text",
    [
        "",
        "psm_1234",
        "tensorlease-0-12-34-4026531836-0123abcd",
        TEXT + "\n",
        TEXT + "/../x",
        "../" + TEXT,
        TEXT.replace("12", "012"),
        TEXT.replace("0123abcd", "0123ABCD"),
        TEXT.replace("-12-", "--12-"),
        TEXT.replace("-12-", "-0-"),
        TEXT.replace("34", "३४"),
    ],
)
def test_anything_else_is_a_foreign_file(text: str) -> None:
    assert parse_name(text) is None


def _abandoned(stat: ProcessStat | None | Exception, name: str = TEXT, uid: int = 0) -> list[str]:
    def look(pid: int) -> ProcessStat | None:
        assert pid == 12
        if isinstance(stat, Exception):
            raise stat
        return stat

    return list(abandoned([name, "foreign"], uid=uid, namespace=4026531836, look=look))


@pytest.mark.parametrize(
    "stat",
    [
        None,
        ProcessStat("R", threads=1, start=35),
        ProcessStat("Z", threads=1, start=34),
        ProcessStat("X", threads=0, start=34),
    ],
    ids=["no such process", "the pid is another's now", "a zombie", "dead"],
)
def test_a_segment_whose_owner_is_provably_gone_is_abandoned(stat: ProcessStat | None) -> None:
    assert _abandoned(stat) == [TEXT]


@pytest.mark.parametrize(
    "stat",
    [
        ProcessStat("R", threads=1, start=34),
        ProcessStat("T", threads=9, start=34),
        ProcessStat("Z", threads=3, start=34),
        PermissionError(),
        ValueError(),
    ],
    ids=["running", "stopped", "only its first thread ended", "hidden", "unreadable"],
)
def test_a_segment_whose_owner_lives_or_may_live_is_kept(stat: ProcessStat | Exception) -> None:
    assert _abandoned(stat) == []


def test_segments_of_other_users_and_namespaces_and_unknown_owners_are_kept() -> None:
    assert _abandoned(None, uid=1) == []
    assert _abandoned(None, TEXT.replace("4026531836", "4026531837")) == []
    assert _abandoned(None, TEXT.replace("-34-", "-0-")) == []


def test_the_state_is_read_behind_a_command_with_brackets() -> None:
    text = "7 (a) b) S " + " ".join(str(field) for field in range(4, 30))
    assert parse_stat(text) == ProcessStat(state="S", threads=20, start=22)
