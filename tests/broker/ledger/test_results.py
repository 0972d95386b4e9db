"""A result is kept until every rank has it; then the round is forgotten but for its story."""

from __future__ import annotations

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Outcome, SourceResult

from .harness import Desk


def test_a_finished_round_is_kept_until_the_next_open(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    assert not desk.forgotten(1)
    rank.open(2)
    assert desk.forgotten(1)


def test_a_finished_round_is_kept_until_every_rank_has_acknowledged(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.publish(1)
    member.stages(0, rank=0)
    member.stages(0, rank=1, vote=True)
    member.commits()
    first.open(2)
    assert not desk.forgotten(1)
    second.leave()
    assert desk.forgotten(1)


def test_a_dead_rank_needs_no_result(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0, vote=True)
    rank.gone()
    member.commits()
    assert desk.forgotten(1)
    assert desk.channel().history[-1].result is not None


def test_a_rank_that_missed_the_result_is_told_at_its_next_hello(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    rank.drop()
    member.serves()
    assert not rank.finished()
    rank.hello()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_rank_that_has_the_result_is_not_told_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    rank.hello()
    assert len(rank.got(m.Finished)) == 1


def test_a_rank_that_restarts_hears_the_result_of_the_round_it_was_lost_in(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    first.publish(1)
    second.open(1)
    second.gone()
    member.drains()
    assert first.outcome() is Outcome.FAILED
    again = desk.trainer(1, 2)
    assert again.last(m.Welcome).last_call == 1


def test_an_acknowledged_round_is_kept_while_a_lease_of_it_is(desk: Desk) -> None:
    rank, slow, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.stages(0, vote=True)
    slow.readies()
    desk.wait(31)
    other.commits()
    rank.open(2)
    assert not desk.forgotten(1)
    slow.drains()
    assert desk.forgotten(1)
    assert rank.got(m.Release)[-1].call == 1


def test_the_stories_of_the_last_rounds_are_kept(desk: Desk) -> None:
    desk.configure(Settings(history=2))
    rank, member = desk.trainer(), desk.worker("a")
    for version in range(1, 5):
        rank.publish(version)
        member.serves()
    rank.leave()
    assert [rnd.call for rnd in desk.channel().history] == [3, 4]
    assert [note.text for note in desk.channel().history[-1].notes] == ["committed"]


def test_a_round_that_did_not_commit_is_reported_with_its_reason(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.rejects(text="out of memory")
    reports = desk.requests(fx.Report)
    assert all(report.failed for report in reports)
    assert "failed: no replica remains: out of memory" in reports[-1].text
    assert "policy version 1 call 1" in reports[-1].text


def test_a_mixed_round_is_reported_with_the_replicas_that_are_not_at_it(desk: Desk) -> None:
    rank, good, bad = desk.trainer(), desk.worker("good"), desk.worker("bad")
    rank.publish(1)
    bad.rejects(text="out of memory")
    good.serves()
    assert rank.outcome() is Outcome.MIXED
    last = desk.requests(fx.Report)[-1]
    assert last.failed
    assert "policy version 1 call 1: mixed: replica bad: " in last.text
    assert "out of memory" in last.text
    assert "replica good" not in last.text


def test_a_worker_that_does_not_drain_is_reported_with_its_pid(desk: Desk) -> None:
    rank, slow = desk.trainer(), desk.worker("a", pid=4711)
    rank.publish(1)
    slow.readies()
    desk.wait(31)
    desk.wait(11)
    texts = [report.text for report in desk.requests(fx.Report)]
    assert any("a/0 (pid 4711) does not drain for 10 s" in text for text in texts)


def test_a_round_that_committed_is_no_report(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.serves()
    assert desk.requests(fx.Report) == []


def test_how_the_batches_of_each_rank_travelled_is_in_the_result(desk: Desk) -> None:
    first, second, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    for rank, ways in ((first, ["shm", "ipc"]), (second, ["staging"])):
        rank.open(1)
        for seq, way in enumerate(ways):
            rank.batch(seq, total=len(ways), via=[way])
    member.stages(0, rank=0)
    member.stages(1, rank=0)
    member.stages(0, rank=1, vote=True)
    member.commits()
    told = [SourceResult(0, ["ipc", "shm"]), SourceResult(1, ["staging"])]
    assert first.result().sources == told


def test_how_a_released_batch_travelled_is_known_after_a_restart(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.open(1)
    rank.batch(0, via=["ipc"])
    rank.batch(1, total=2, via=["shm"])
    member.stages(0)
    desk.restart(rank, member)
    rank.returns()
    member.hello(round=member.inside((0, 0)))
    member.stages(1, vote=True)
    member.commits()
    assert rank.result().sources == [SourceResult(0, ["ipc", "shm"])]
