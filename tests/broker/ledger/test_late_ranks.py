"""After a restart: what a rank says after the round has gone on without waiting for it."""

from __future__ import annotations

import msgspec

from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Outcome

from .harness import Desk


def test_a_batch_that_comes_when_its_reopened_round_was_admitted_is_forwarded(desk: Desk) -> None:
    ranks = [desk.trainer(number, 2) for number in range(2)]
    for rank in ranks:
        rank.publish(1)
    member = desk.worker("a", joined=False)
    desk.restart(*ranks, member)
    for rank in ranks:
        rank.hello()
    member.hello()
    assert member.got(m.Prepare) and not member.got(m.Deliver)

    for rank in ranks:
        rank.batch(0, total=1)
    assert [(d.rank, d.total) for d in member.got(m.Deliver)] == [(0, None), (1, 2)]
    member.readies()
    member.stages(0, rank=0)
    member.stages(0, rank=1, vote=True)
    member.commits()
    assert [rank.outcome() for rank in ranks] == [Outcome.COMMITTED] * 2


def test_a_round_closes_with_a_batch_that_all_had_staged_before_it_came_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.restart(rank, member)
    rank.hello()
    member.hello(round=member.inside((0, 0), voted=True))
    assert rank.released() == [0] and not member.got(m.Commit)

    rank.batch(0, total=1)
    assert member.got(m.Commit)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED


def test_a_rank_that_returns_does_not_count_past_the_call_that_waits_for_it(desk: Desk) -> None:
    ranks = [desk.trainer(number, 2) for number in range(2)]
    member = desk.worker("a")
    ranks[0].open(1)
    desk.restart(*ranks, member)
    member.hello()
    ranks[0].returns()
    ranks[1].returns()

    assert ranks[1].last(m.Welcome).last_call == 0
    ranks[1].open(1)
    assert member.last(m.Prepare).call == 1


def test_a_call_that_is_refused_names_the_one_that_waits_for_the_rank(desk: Desk) -> None:
    ranks = [desk.trainer(number, 2) for number in range(2)]
    desk.worker("a")
    ranks[0].open(1)
    ranks[1].open(1, call=7)

    assert ranks[1].last(m.OpenRefused).last_call == 0


def test_ranks_that_opened_different_versions_fail_the_round_after_a_restart_too(
    desk: Desk,
) -> None:
    zero, one, member = desk.trainer(0, 2), desk.trainer(1, 2), desk.worker("a")
    # The broker dies before it has read either Open: both are announced.
    desk.restart(zero, one, member)
    zero.connected = one.connected = False
    zero.publish(53)
    one.publish(52)
    zero.returns()
    one.returns()
    member.hello()
    assert desk.current()[0] == 0
    assert {zero.outcome(), one.outcome()} == {Outcome.FAILED}
    result = zero.result()
    assert result.code is Code.VERSIONS_DIFFER
    assert "version 53" in result.reason and "version 52" in result.reason


def test_the_last_version_outlives_the_broker_and_the_workers_with_a_trainer(desk: Desk) -> None:
    rank = desk.trainer(0, 2)
    ledger = Ledger("0" * 16, Settings(), now=0.0)
    hello = msgspec.structs.replace(rank.hello_message(), last_version=5)
    ledger.hello(hello, 0.0)
    ledger.validate()
    assert ledger.state.channels[rank.channel].last_version == 5
