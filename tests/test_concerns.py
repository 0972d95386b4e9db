"""What of a status needs a look."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tensorlease.broker.queries import (
    AgentStatus,
    ChannelStatus,
    Counters,
    EndedStatus,
    GroupStatus,
    LeaseStatus,
    ReplicaStatus,
    RoundStatus,
    Status,
)
from tensorlease.commands.concerns import concerns
from tensorlease.commands.drain import left


def agent(place: int = 0, state: str = "live", doubt: str = "") -> AgentStatus:
    return AgentStatus("i", place, 4242, "host", "cpu:0", state, 7.0, "test", doubt)


def replica(**changes: object) -> ReplicaStatus:
    well = ReplicaStatus("engine1", 1, 5, False, True, "", [agent()])
    return msgspec.structs.replace(well, **changes)


def ended(outcome: str, reason: str = "", behind: Sequence[str] = ()) -> EndedStatus:
    summary = "round 5 took 40 ms"
    return EndedStatus(5, 5, outcome, reason, 1.0, 0.04, 2**20, summary, list(behind))


def channel(**changes: object) -> ChannelStatus:
    group = GroupStatus("g", 1, "colocated", 5, [agent()])
    well = ChannelStatus("policy", 5, group, [replica()], [], [ended("committed")])
    return msgspec.structs.replace(well, **changes)


def rnd(state: str = "staging", **changes: object) -> RoundStatus:
    well = RoundStatus(6, 6, "g", state, 3.2, 3.1, "engine1/0 to stage", [], [], 0, 0, 0, 0)
    return msgspec.structs.replace(well, **changes)


def status(one: ChannelStatus | None = None, **changes: object) -> Status:
    well = Status("e" * 16, False, 0.0, [], 2, [one or channel()], [], Counters())
    return msgspec.structs.replace(well, **changes)


STUCK = LeaseStatus(0, 3, "stuck", 2**20, 21.0, ["engine1/0 (pid 4242)"])


def test_stuck_leases_of_one_holder_are_one_line() -> None:
    leases = [LeaseStatus(0, seq, "stuck", 2**20, 20.0 + seq, ["k/0 (pid 7)"]) for seq in range(6)]
    (line,) = concerns(status(channel(rounds=[rnd(leases=leases)])))
    assert line == (
        "channel policy: stuck for 25 s: batches 0.0, 0.1, 0.2, 0.3 and 2 more of version 6"
        " (6.0 MiB), held by k/0 (pid 7)"
    )


def test_where_all_is_well_nothing_needs_a_look() -> None:
    assert concerns(status()) == []
    assert concerns(status(channel(rounds=[rnd()], ended=[]))) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (status(stopping=True), ["admits no round"]),
        (status(stopping=True, drained=True), ["is drained: ", "`tensorlease drain --undo`"]),
        (status(stopping=True, ending=True), ["was told to end: it admits no round"]),
        (status(recovering_s=4.2, expected=["x"]), ["restarted", "4.2 s more for 1 agents"]),
        (
            status(channel(rounds=[rnd(leases=[STUCK])])),
            ["stuck for 21 s", "batch 0.3 of version 6 (1.0 MiB)", "engine1/0 (pid 4242)"],
        ),
        (
            status(channel(group=GroupStatus("g", 1, "colocated", 5, [agent(state="silent")]))),
            ["trainer rank 0 (pid 4242) is silent for 7 s"],
        ),
        (
            status(channel(replicas=[replica(torn=True, current=0)])),
            ["replica engine1 is torn: at no version until a later round commits"],
        ),
        (
            status(channel(replicas=[replica(torn=True, members=[agent(doubt="version 6")])])),
            ["replica engine1 is in doubt", "(pid 4242) was put out of version 6"],
        ),
        (
            status(channel(replicas=[replica(ready=False, reason="member 0 silent")])),
            ["replica engine1 is not ready: member 0 silent"],
        ),
        (
            status(channel(ended=[ended("mixed", "bad: expelled", ["bad"]), ended("committed")])),
            ["the last round, of version 5, ended mixed: bad: expelled"],
        ),
        (status(channel(ended=[ended("failed")])), ["the last round, of version 5, failed"]),
    ],
)
def test_what_needs_a_look_is_one_line_that_names_it(seen: Status, words: list[str]) -> None:
    (line,) = concerns(seen)
    assert [word for word in words if word not in line] == []
    assert "\n" not in line


def test_a_worker_that_has_no_trainer_yet_is_no_concern() -> None:
    lonely = replica(ready=False, reason="the channel has no trainer")
    assert concerns(status(channel(group=None, replicas=[lonely]))) == []


def test_a_failure_that_a_later_round_mended_is_no_concern() -> None:
    assert concerns(status(channel(ended=[ended("committed"), ended("failed")]))) == []


def test_a_mixed_round_that_leaves_nobody_behind_any_more_is_no_concern() -> None:
    assert concerns(status(channel(ended=[ended("mixed", "bad: expelled")]))) == []


def test_a_failure_on_a_channel_where_nobody_is_any_more_is_no_concern() -> None:
    left_alone = channel(group=None, replicas=[], ended=[ended("failed")])
    assert concerns(status(left_alone)) == []


def test_a_drain_waits_for_rounds_that_were_admitted_and_for_no_others() -> None:
    rounds = [rnd("opening"), rnd("staging"), rnd("committing"), rnd("restoring"), rnd("finished")]
    found = left(status(channel(rounds=rounds)))
    assert found.not_admitted == 1
    assert [line.split(",")[1].split()[0] for line in found.under_way] == [
        "staging",
        "committing",
        "restoring",
    ]
    assert found.under_way[0] == (
        "channel policy: version 6, staging for 3 s, waits for engine1/0 to stage"
    )
