"""Workers for which others read: their own death proves nothing, and is no reason to wait either."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import LeaseState
from tensorlease.broker.queries import named_in_rounds, status
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Fate, Holder, Orphan, Outcome, Process

from .harness import Desk, Member, Rank

SERVER = (71, 72)
READERS = [Process(71, 9), Process(72, 9)]


def relay_killed(desk: Desk, readers: tuple[int, ...] = SERVER) -> tuple[Rank, Member]:
    """A relay has died in the middle of a round's only batch."""
    rank, relay = desk.trainer(), desk.worker("a", pid=4711, readers=readers)
    rank.publish(1)
    relay.readies()
    relay.gone()
    return rank, relay


# ---------------------------------------------------------------- its death


def test_a_relay_that_is_killed_is_lost_at_once_and_its_lease_is_kept(desk: Desk) -> None:
    rank, relay = relay_killed(desk)
    assert rank.outcome() is Outcome.FAILED
    assert rank.fate(relay) is Fate.LOST
    assert rank.released() == []
    assert desk.round().leases[0, 0].state is LeaseState.STUCK
    assert "pids 71, 72 may still be reading for it" in rank.result().reason
    assert rank.last(m.Stuck).holders == [Holder(relay.instance, "a", 0, 4711, [71, 72])]


def test_a_worker_that_reads_itself_is_released_by_its_death(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.readies()
    member.gone()
    assert rank.released() == [0]
    assert desk.requests(fx.WatchReaders) == []


def test_the_round_goes_on_without_a_relay_that_was_killed(desk: Desk) -> None:
    rank, relay, other = desk.trainer(), desk.worker("a", readers=SERVER), desk.worker("b")
    rank.publish(1)
    relay.readies()
    relay.gone()
    other.serves()
    assert rank.outcome() is Outcome.MIXED
    assert [rank.fate(relay), rank.fate(other)] == [Fate.LOST, Fate.COMMITTED]
    assert rank.released() == []


def test_a_relay_that_is_killed_with_nothing_to_read_is_forgotten(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.stages(0, vote=True)
    relay.gone()
    assert rank.released() == [0]
    assert desk.ledger.state.relays == {}
    assert desk.requests(fx.WatchReaders) == []


def test_a_relay_that_says_goodbye_reads_nothing(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.readies()
    relay.leave()
    assert rank.released() == [0]
    assert desk.ledger.state.relays == {}


def test_a_relay_that_was_put_out_and_then_killed_is_named_anew(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", pid=4711, readers=SERVER)
    rank.open(1)
    rank.batch(0)
    relay.readies()
    desk.wait(31, silent=[relay])
    assert rank.last(m.Stuck).holders == [Holder(relay.instance, "a", 0, 4711)]
    relay.gone()
    assert rank.last(m.Stuck).holders == [Holder(relay.instance, "a", 0, 4711, [71, 72])]
    assert rank.released() == []


def test_a_stuck_relay_is_not_killed_as_that_would_prove_nothing(desk: Desk) -> None:
    desk.configure(Settings(kill_stuck=True))
    rank, relay, other = desk.trainer(), desk.worker("a", readers=SERVER), desk.worker("b")
    rank.publish(1)
    for member in (relay, other):
        member.readies()
    desk.wait(31, silent=[relay, other])
    assert desk.requests(fx.Kill) == [fx.Kill(other.instance)]


# ---------------------------------------------------------------- who read ends


def test_the_lease_comes_back_when_all_that_read_have_ended(desk: Desk) -> None:
    rank, relay = relay_killed(desk)
    assert desk.requests(fx.WatchReaders) == [fx.WatchReaders(relay.instance, READERS)]
    relay.readers_gone()
    assert rank.released() == [0]
    assert desk.ledger.state.relays == {}


def test_readers_that_end_before_their_relay_prove_nothing_of_it(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.readies()
    relay.readers_gone()
    assert rank.released() == []


def test_a_trainers_end_forgets_what_was_read_of_it(desk: Desk) -> None:
    rank, _ = relay_killed(desk)
    rank.leave()
    assert desk.ledger.state.relays == {}
    assert desk.forgotten()


# ---------------------------------------------------------------- its heir


def test_the_next_relay_of_the_place_is_told_and_what_it_says_brings_the_lease_back(
    desk: Desk,
) -> None:
    rank, relay = relay_killed(desk)
    heir = desk.worker("a", readers=SERVER)
    assert heir.last(m.Orphans).orphans == [Orphan(relay.instance, READERS)]
    assert rank.released() == []
    heir.unread(relay)
    assert rank.released() == [0]
    assert heir.orphans() == []


def test_a_replica_takes_part_in_no_round_before_its_relay_has_found_out(desk: Desk) -> None:
    rank, relay = relay_killed(desk, ())
    heir = desk.worker("a", readers=())
    state = rank.last(m.Members).replicas[0]
    assert not state.ready
    assert "whether anything still reads for pid 4711" in state.reason
    rank.publish(2)
    assert heir.got(m.Prepare) == []
    heir.unread(relay)
    heir.serves()
    assert rank.outcome() is Outcome.COMMITTED


@pytest.mark.parametrize("readers", [None, SERVER])
def test_only_a_relay_of_the_same_replica_can_say_so(
    desk: Desk, readers: tuple[int, ...] | None
) -> None:
    rank, relay = relay_killed(desk)
    other = desk.worker("a" if readers is None else "b", readers=readers)
    other.unread(relay)
    assert rank.released() == []


def test_nobody_can_say_so_of_a_relay_that_lives(desk: Desk) -> None:
    rank, relay, mate = (
        desk.trainer(),
        desk.worker("a", 0, 2, readers=SERVER),
        desk.worker("a", 1, 2, readers=SERVER),
    )
    rank.publish(1)
    for member in (relay, mate):
        member.readies()
    mate.unread(relay)
    assert rank.released() == []


def test_a_relay_that_took_the_place_of_a_silent_one_hears_of_its_death(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.readies()
    desk.wait(31, silent=[relay])
    heir = desk.worker("a", readers=SERVER)
    assert heir.orphans() == []
    relay.gone()
    assert heir.orphans() == [relay.instance]
    heir.unread(relay)
    assert rank.released() == [0]


def test_an_ordinary_worker_in_the_place_is_not_held_up(desk: Desk) -> None:
    rank, _ = relay_killed(desk)
    other = desk.worker("a")
    assert other.got(m.Orphans) == []
    rank.publish(2)
    other.serves()
    assert rank.outcome() is Outcome.COMMITTED


# ---------------------------------------------------------------- the broker dies


def test_a_restored_list_says_who_reads_for_a_relay_that_has_died(desk: Desk) -> None:
    rank, relay = relay_killed(desk)
    rank.forget()
    desk.restart(rank)
    rank.returns()
    relay.gone()
    assert rank.released() == []
    assert rank.last(m.Stuck).holders == [Holder(relay.instance, "a", 0, 4711, [71, 72])]
    assert desk.requests(fx.WatchReaders)[-1] == fx.WatchReaders(relay.instance, READERS)
    relay.readers_gone()
    assert rank.released() == [0]


def test_a_live_file_says_so_of_one_that_died_with_the_broker_and_is_on_no_list(
    desk: Desk,
) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.readies()
    # The word of the admission was lost.
    rank.calls[1].receivers = None
    desk.restart(rank, relay, noted=[relay])
    rank.returns()
    relay.gone()
    desk.wait(70)
    assert rank.outcome() is Outcome.FAILED
    assert rank.released() == []
    relay.readers_gone()
    assert rank.released() == [0]


def test_a_relay_that_dies_while_the_broker_listens_is_lost_and_keeps_what_it_read(
    desk: Desk,
) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=SERVER)
    rank.publish(1)
    relay.readies()
    desk.restart(rank, relay, noted=[relay])
    relay.hello(round=relay.inside())
    relay.gone()
    rank.returns()
    assert rank.fate(relay) is Fate.LOST
    assert rank.released() == []
    heir = desk.worker("a", readers=SERVER)
    heir.unread(relay)
    assert rank.released() == [0]


def test_what_an_heir_finds_out_while_the_broker_listens_counts(desk: Desk) -> None:
    rank, relay = relay_killed(desk)
    rank.forget()
    desk.restart(rank, relay, noted=[relay])
    relay.gone()
    heir = desk.worker("a", readers=SERVER)
    assert heir.orphans() == [relay.instance]
    heir.unread(relay)
    assert rank.released() == []
    rank.returns()
    assert rank.released() == [0]


def test_a_live_file_of_one_that_held_nothing_holds_nobody_up(desk: Desk) -> None:
    rank, relay = desk.trainer(), desk.worker("a", readers=())
    relay.gone()
    desk.restart(rank, relay, noted=[relay])
    heir = desk.worker("a", readers=())
    rank.returns()
    relay.gone()
    assert desk.ledger.state.relays.keys() == {heir.instance}
    rank.publish(1)
    heir.serves()
    assert rank.outcome() is Outcome.COMMITTED


# ---------------------------------------------------------------- what is shown


def test_the_status_names_who_may_read_and_its_proof_is_kept(desk: Desk) -> None:
    _, relay = relay_killed(desk)
    seen = status(desk.ledger.state, desk.now).channels[0].rounds[0]
    assert seen.stuck == 1
    assert seen.leases[0].holders == [
        "a/0 (pid 4711, which has ended: pids 71, 72 may still be reading for it)"
    ]
    assert relay.instance in named_in_rounds(desk.ledger.state)
    relay.readers_gone()
    assert relay.instance not in named_in_rounds(desk.ledger.state)


def test_readers_that_cannot_be_named_are_said_to_be_so(desk: Desk) -> None:
    rank, relay = relay_killed(desk, ())
    assert "who read for it cannot be named" in rank.result().reason
    assert rank.last(m.Stuck).holders == [Holder(relay.instance, "a", 0, 4711, [])]
    texts = [report.text for report in desk.requests(fx.Report)]
    assert any("a/0 (pid 4711) keeps its leases: who read for it cannot be" in t for t in texts)


def test_a_lease_of_an_orphan_does_not_count_in_the_window(desk: Desk) -> None:
    desk.configure(replace(desk.settings, window=1))
    rank, relay, other = desk.trainer(), desk.worker("a", readers=SERVER), desk.worker("b")
    rank.open(1)
    rank.batch(0)
    relay.readies()
    relay.gone()
    other.stages(0)
    rank.batch(1, total=2)
    other.serves([1])
    assert rank.outcome() is Outcome.MIXED
    assert rank.released() == [1]
