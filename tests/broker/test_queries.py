"""Queries as pure functions of the ledger's state."""

from __future__ import annotations

import msgspec
import pytest

from tensorlease.agents.process import this_process
from tensorlease.broker import queries, stories
from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Terms

from .raw_agents import trainer_hello, worker_hello

TRAINER, WORKER = "a" * 16, "b" * 16


@pytest.fixture
def ledger() -> Ledger:
    """A round whose one batch is held by its one receiver, since second 103."""
    made = Ledger("e" * 16, Settings(), now=100.0)
    made.hello(worker_hello(instance=WORKER), 100.0)
    made.hello(trainer_hello(instance=TRAINER), 101.0)
    made.message(TRAINER, m.Open(1, 1, Terms(7)), b"", 102.0)
    made.message(TRAINER, m.Batch(1, 1, 0, [4], False, 2048), b"table", 103.0)
    return made


def test_the_status_shows_who_holds_what_and_for_how_long(ledger: Ledger) -> None:
    seen = queries.status(ledger.state, 110.0)
    (channel,) = seen.channels
    assert channel.group is not None
    assert [(rank.place, rank.heard_s) for rank in channel.group.ranks] == [(0, 7.0)]
    (replica,) = channel.replicas
    assert (replica.ready, replica.current, replica.members[0].instance) == (True, 0, WORKER)
    (rnd,) = channel.rounds
    assert (rnd.state, rnd.version, rnd.age_s, rnd.held, rnd.held_bytes) == (
        "staging",
        7,
        8.0,
        1,
        2048,
    )
    name = f"r0/0 (pid {this_process().pid})"
    assert (rnd.leases[0].age_s, rnd.leases[0].holders) == (7.0, [name])
    assert rnd.waits_for == f"rank 0 to close; {name} to prepare"


def test_asking_changes_nothing(ledger: Ledger) -> None:
    before = msgspec.json.encode(ledger.state.channels["policy"].name), ledger.state.next_check
    counts = len(ledger.state.peers), len(ledger.state.channels), ledger.state.arrivals
    queries.status(ledger.state, 110.0)
    stories.story(ledger.state, "another", 1, 110.0)
    ledger.validate()
    after = msgspec.json.encode(ledger.state.channels["policy"].name), ledger.state.next_check
    assert before == after
    assert counts == (len(ledger.state.peers), len(ledger.state.channels), ledger.state.arrivals)


def test_a_status_can_be_read_back_from_its_json(ledger: Ledger) -> None:
    seen = queries.status(ledger.state, 110.0, queries.Counters(bad_messages=3))
    assert msgspec.json.decode(queries.encode(seen), type=queries.Status) == seen


def test_the_story_of_an_ended_round_tells_all_in_order(ledger: Ledger) -> None:
    (group, _) = next(iter(ledger.state.channels["policy"].rounds))
    ledger.message(TRAINER, m.Close(1, 1, 1), b"", 104.0)
    ledger.message(WORKER, m.Staged(1, group, 1, 0, 0, vote=True), b"", 105.0)
    ledger.message(WORKER, m.Committed(1, group, 1, True), b"", 106.0)
    (attempt,) = stories.story(ledger.state, "policy", 7, 110.0).rounds
    assert (attempt.state, attempt.outcome) == ("finished", "committed")
    lines = [(line.at_s, line.text) for line in attempt.lines]
    name = f"r0/0 (pid {this_process().pid})"
    for line in [
        (0.0, "opened"),
        (0.0, "admitted with 1 receivers"),
        (1.0, "batch 0.0 (2048 bytes) leased"),
        (3.0, "batch 0.0 (2048 bytes) released"),
        (3.0, f"{name} voted complete"),
        (3.0, "decided: commit"),
        (4.0, f"{name} committed"),
        (4.0, "finished: committed"),
    ]:
        assert line in lines
    assert [at for at, _ in lines] == sorted(at for at, _ in lines)


def test_who_a_round_left_behind_is_named_until_it_is_at_the_version_or_gone() -> None:
    other, successor = "c" * 16, "d" * 16
    ledger = Ledger("e" * 16, Settings(), now=100.0)
    ledger.hello(worker_hello("r0", instance=WORKER), 100.0)
    ledger.hello(worker_hello("r1", instance=other), 100.0)
    ledger.hello(trainer_hello(instance=TRAINER), 101.0)
    ledger.message(TRAINER, m.Open(1, 1, Terms(7)), b"", 102.0)
    (group, _) = next(iter(ledger.state.channels["policy"].rounds))
    ledger.message(TRAINER, m.Batch(1, 1, 0, [4], False, 2048, total=1), b"table", 103.0)
    ledger.message(other, m.Reject(1, group, 1, Code.PREPARE_FAILED, "no room"), b"", 104.0)
    ledger.message(other, m.Drained(1, group, 1, torn=False), b"", 104.0)
    ledger.message(WORKER, m.Staged(1, group, 1, 0, 0, vote=True), b"", 105.0)
    ledger.message(WORKER, m.Committed(1, group, 1, True), b"", 106.0)

    def last() -> queries.EndedStatus:
        return queries.status(ledger.state, 110.0).channels[0].ended[0]

    assert (last().outcome, last().behind) == ("mixed", ["r1"])
    worker = ledger.state.peers[other].worker
    assert worker is not None
    worker.version = 7
    assert (last().outcome, last().behind) == ("mixed", [])
    worker.version = 6
    assert last().behind == ["r1"]
    ledger.message(other, m.Bye(1), b"", 111.0)
    assert last().behind == []
    ledger.hello(worker_hello("r1", instance=successor), 112.0)
    assert (last().outcome, last().behind) == ("mixed", [])


def test_the_channel_of_doctor_is_shown_only_while_somebody_is_there() -> None:
    ledger = Ledger("e" * 16, Settings(), now=100.0)
    hello = msgspec.structs.replace(worker_hello(instance=WORKER), channel=queries.DOCTOR_CHANNEL)
    ledger.hello(hello, 100.0)
    (channel,) = queries.status(ledger.state, 101.0).channels
    assert channel.name == queries.DOCTOR_CHANNEL
    ledger.message(WORKER, m.Bye(1), b"", 102.0)
    assert queries.status(ledger.state, 103.0).channels == []


def test_what_a_round_needs_as_proof_is_named(ledger: Ledger) -> None:
    assert queries.named_in_rounds(ledger.state) == {WORKER}


def test_the_last_ended_rounds_and_their_rate_are_told(ledger: Ledger) -> None:
    (group, _) = next(iter(ledger.state.channels["policy"].rounds))
    ledger.message(TRAINER, m.Close(1, 1, 1), b"", 104.0)
    ledger.message(WORKER, m.Staged(1, group, 1, 0, 0, vote=True), b"", 105.0)
    ledger.message(WORKER, m.Committed(1, group, 1, True), b"", 106.0)
    for call in range(2, 9):  # One round a second.
        now = 106.0 + call
        ledger.message(TRAINER, m.Open(1, call, Terms(call + 6)), b"", now)
        ledger.message(TRAINER, m.Batch(1, call, 0, [4], False, 2048, total=1), b"table", now)
        ledger.message(WORKER, m.Staged(1, group, call, 0, 0, vote=True), b"", now)
        ledger.message(WORKER, m.Committed(1, group, call, True), b"", now)
    (channel,) = queries.status(ledger.state, 114.0).channels
    assert [(x.version, x.outcome, x.ended_s) for x in channel.ended] == [
        (14 - n, "committed", float(n)) for n in range(queries.MAX_ENDED)
    ]
    assert channel.ended[0].nbytes == 2048
    assert channel.ended[0].summary.startswith("round 14 took ")
    assert channel.rounds_per_s == pytest.approx(7 / 8)
    assert channel.bytes_per_s == pytest.approx(2048 * 7 / 8)
    (later,) = queries.status(ledger.state, 120.0).channels
    assert later.rounds_per_s == pytest.approx(5 / queries.RATE_S)
    (long_after,) = queries.status(ledger.state, 1000.0).channels
    assert (long_after.rounds_per_s, long_after.bytes_per_s) == (0.0, 0.0)


def test_a_worker_that_has_not_said_what_it_wrote_is_in_doubt_until_it_has(ledger: Ledger) -> None:
    (group, _) = next(iter(ledger.state.channels["policy"].rounds))
    ledger.tick(170.0)
    (replica,) = queries.status(ledger.state, 170.0).channels[0].replicas
    assert replica.members[0].doubt == "version 7"
    ledger.message(WORKER, m.Drained(1, group, 1, torn=False), b"", 171.0)
    (replica,) = queries.status(ledger.state, 171.0).channels[0].replicas
    assert replica.members[0].doubt == ""
