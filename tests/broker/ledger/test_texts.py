"""Long texts are cut where they would break a message; each agent checks what it is sent.

The desk decodes everything that the ledger says, within the limits of the protocol.
"""

from __future__ import annotations

from tensorlease.protocol import messages as m
from tensorlease.protocol.limits import MAX_TEXT
from tensorlease.protocol.records import Code, OfferRef, Outcome, Taken, TakeNote

from .harness import COLOCATED, Desk

LONG = "x" * MAX_TEXT


def test_the_reason_of_a_reject_reaches_the_others_cut(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    pair[0].rejects(text=LONG)
    text = pair[1].last(m.Abort).text
    assert len(text) == MAX_TEXT
    assert text.startswith("a/0 ")
    assert text.endswith(" ...")
    assert rank.outcome() is Outcome.FAILED


def test_the_reason_of_a_strict_round_is_cut(desk: Desk) -> None:
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.open(1, strict=True)
    member.rejects(text=LONG)
    assert len(rank.result().reason) == MAX_TEXT
    assert other.last(m.Abort).code is Code.STRICT


def test_the_reasons_of_many_failed_commits_are_cut(desk: Desk) -> None:
    rank, pair = desk.trainer(), desk.engine("a")
    rank.publish(1)
    for member in pair:
        member.stages(0, vote=True)
    for member in pair:
        member.commits(ok=False, text=LONG)
    assert len(rank.result().reason) == MAX_TEXT
    assert len(rank.result().replicas[0].reason) == MAX_TEXT


def test_the_names_that_a_worker_misses_are_cut(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.offer(1)
    refs = [OfferRef(rank.instance, 0)]
    member.note = TakeNote(refs, [Taken(rank.instance, [])], False, [LONG, LONG])
    member.say(m.Take(member.session, member.note))
    assert len(rank.last(m.Members).replicas[0].reason) == MAX_TEXT
    rank.open(1, open_s=1)
    desk.wait(2)
    assert len(rank.result().replicas[0].reason) == MAX_TEXT


def test_the_devices_of_many_trainers_are_cut(desk: Desk) -> None:
    ranks = [
        desk.trainer(r, 64, device=f"{r:03}" + "d" * 125, distribution=COLOCATED) for r in range(64)
    ]
    desk.worker("a")
    assert len(ranks[0].last(m.Members).replicas[0].reason) == MAX_TEXT


def test_the_holders_of_a_large_group_are_cut_in_a_refusal(desk: Desk) -> None:
    for number in range(300):
        desk.trainer(number, 300)
    other = desk.trainer(0, 300, group="other")
    assert other.last(m.Refused).code is Code.FOREIGN_GROUP
    assert len(other.last(m.Refused).text) == MAX_TEXT


def test_the_names_of_many_that_are_missing_are_cut(desk: Desk) -> None:
    rank = desk.trainer()
    for number in range(120):
        desk.worker(f"r{number}", 0, 2)
    rank.open(1, open_s=1)
    desk.wait(2)
    assert len(rank.result().reason) == MAX_TEXT
