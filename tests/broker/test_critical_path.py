"""What a round took its time for, by examples: each is a round with its times in seconds."""

from __future__ import annotations

import pytest

from tensorlease.broker.critical_path import amount, parts, sentence
from tensorlease.broker.ledger.state import (
    Lease,
    LeaseState,
    RankEntry,
    Receiver,
    ReceiverState,
    Round,
    RoundState,
)
from tensorlease.protocol.records import (
    Distribution,
    Fate,
    Outcome,
    Process,
    ReceiverId,
    RoundResult,
    Terms,
)

T = 1000.0
"""When the round was opened, on the broker's clock."""


def receiver(name: str, state: ReceiverState = ReceiverState.COMMITTED, **at: float) -> Receiver:
    """A worker `replica/member`; `ready`, `voted`, `committed`, `out`: after the opening."""
    replica, _, member = name.partition("/")
    id = ReceiverId(name.replace("/", "-"), replica, int(member), [Process(7, 1)])
    made = Receiver(id, state, progress=T)
    for what, after in at.items():
        setattr(made, f"{what}_at", T + after)
    return made


def measured(it: Receiver, prepare: float, copy: float, commit: float = 0.0) -> Receiver:
    """What it said of itself, in seconds."""
    it.prepare_us, it.copy_us, it.commit_us = (round(s * 1e6) for s in (prepare, copy, commit))
    return it


def out(it: Receiver, fate: Fate, reason: str = "") -> Receiver:
    it.fate, it.reason = fate, reason
    return it


def round_of(
    *receivers: Receiver,
    version: int = 812,
    outcome: Outcome | None = None,
    reason: str = "",
    state: RoundState = RoundState.FINISHED,
    batches: dict[tuple[int, int], float] | None = None,
    closed: bool = True,
    **at: float,
) -> Round:
    """`admitted`, `decided`, `finished`: seconds after the opening."""
    made = Round(
        "policy",
        "group",
        1,
        Terms(version),
        Distribution.COLOCATED,
        state,
        1,
        {0: RankEntry("trainer", total=1 if closed else None, received=1)},
        {it.id.instance: it for it in receivers},
        opened_at=T,
    )
    for (rank, seq), after in (batches or {(0, 0): 0.0}).items():
        made.leases[rank, seq] = Lease(
            rank, seq, "trainer", [0], True, 1, LeaseState.RELEASED, set(), None, True, T + after
        )
    for what, after in at.items():
        setattr(made, f"{what}_at", T + after)
    if outcome is not None:
        made.result = RoundResult("group", 1, version, outcome, reason, [], [])
    return made


def slow_prepare() -> Round:
    return round_of(
        measured(receiver("engine1/1", ready=0.001, voted=0.008, committed=0.041), 0.001, 0.007),
        measured(receiver("engine1/2", ready=0.033, voted=0.0402, committed=0.041), 0.033, 0.007),
        outcome=Outcome.COMMITTED,
        admitted=0.0,
        decided=0.0402,
        finished=0.041,
    )


def test_the_sentence_names_who_was_waited_for_and_for_what() -> None:
    assert sentence(slow_prepare(), T + 9) == (
        "round 812 took 41 ms: 33 ms waiting for engine1/2's prepare, 7 ms copy, 1 ms broker"
    )


def test_a_commit_of_another_worker_is_named_as_that_ones() -> None:
    rnd = slow_prepare()
    rnd.finished_at = T + 0.061
    first = rnd.receivers["engine1-1"]
    first.committed_at, first.commit_us = T + 0.061, 20_000
    assert sentence(rnd, T) == (
        "round 812 took 61 ms: 33 ms waiting for engine1/2's prepare, 20 ms engine1/1's commit,"
        " 7 ms engine1/2's copy, 1 ms broker"
    )


def test_a_round_that_waited_to_be_admitted_says_so_first() -> None:
    rnd = round_of(
        measured(receiver("a/0", voted=5.010, committed=5.012), 0.0, 0.010, 0.001),
        outcome=Outcome.COMMITTED,
        admitted=5.0,
        decided=5.010,
        finished=5.012,
    )
    assert sentence(rnd, T) == "round 812 took 5.0 s: 5.0 s waiting to be admitted"


def test_a_trainer_that_is_slow_to_send_is_waited_for_by_its_rank() -> None:
    rnd = round_of(
        measured(receiver("a/0", ready=0.01, voted=2.1, committed=2.1), 0.01, 1.5),
        outcome=Outcome.COMMITTED,
        batches={(0, 0): 0.0, (1, 0): 0.5, (1, 1): 2.0},
        admitted=0.0,
        decided=2.1,
        finished=2.1,
    )
    assert sentence(rnd, T) == (
        "round 812 took 2.1 s: 2.0 s waiting for rank 1's batches, 100 ms a/0's copy"
    )


def test_a_mixed_round_waited_for_the_one_that_was_put_out() -> None:
    good = measured(receiver("good/0", voted=0.01, committed=3.002), 0.001, 0.008, 0.001)
    bad = receiver("bad/0", ReceiverState.DRAINING, out=3.0)
    rnd = round_of(
        good,
        out(bad, Fate.EXPELLED, "was not ready in 3 s"),
        outcome=Outcome.MIXED,
        reason="replica bad: expelled",
        admitted=0.0,
        decided=3.0,
        finished=3.002,
    )
    assert sentence(rnd, T) == (
        "round 812 ended mixed after 3.0 s: 3.0 s waiting for bad/0's prepare"
    )


def test_a_failed_round_names_who_failed_it_and_not_who_was_aborted_with_it() -> None:
    guilty = out(receiver("b/0", ReceiverState.OUT, ready=0.1, out=0.5), Fate.EXPELLED, "no room")
    victim = out(receiver("a/0", ReceiverState.OUT, out=0.5), Fate.ABORTED, "strict")
    rnd = round_of(
        victim,
        guilty,
        outcome=Outcome.FAILED,
        reason="strict: b/0 is out: no room",
        admitted=0.0,
        finished=0.5,
    )
    assert sentence(rnd, T) == (
        "round 812 failed after 500 ms: 400 ms b/0's copy, 100 ms waiting for b/0's prepare;"
        " strict: b/0 is out: no room"
    )


def test_a_round_that_its_trainer_did_not_close_waited_for_that() -> None:
    worker = out(receiver("a/0", ReceiverState.OUT, ready=0.1, out=4.0), Fate.ABORTED)
    rnd = round_of(
        worker,
        outcome=Outcome.FAILED,
        reason="rank 0 is gone",
        closed=False,
        admitted=0.0,
        finished=4.0,
    )
    assert sentence(rnd, T) == (
        "round 812 failed after 4.0 s: 3.9 s waiting for rank 0's batches, 100 ms waiting for"
        " a/0's prepare; rank 0 is gone"
    )


def test_a_round_that_was_never_admitted_says_what_was_missing() -> None:
    rnd = round_of(
        outcome=Outcome.FAILED, reason="0 of at least 1 replicas were ready", finished=60.0
    )
    assert sentence(rnd, T) == (
        "round 812 failed after 60 s: 60 s waiting to be admitted;"
        " 0 of at least 1 replicas were ready"
    )


def test_a_long_reason_is_cut() -> None:
    rnd = round_of(outcome=Outcome.FAILED, reason="x" * 5000, finished=60.0)
    assert len(sentence(rnd, T)) < 300
    assert sentence(rnd, T).endswith("x…")


def test_a_round_under_way_says_whom_it_waits_for_now() -> None:
    done = receiver("a/0", ReceiverState.VOTED, ready=0.1, voted=0.2)
    stopped = receiver("a/1", ReceiverState.STAGING, ready=0.1)
    rnd = round_of(done, stopped, state=RoundState.STAGING, admitted=0.0)
    assert sentence(rnd, T + 3.1) == (
        "round 812 has been under way for 3.1 s: 3.0 s a/1's copy, 100 ms waiting for a/1's prepare"
    )


def test_a_commit_that_does_not_end_is_waited_for_by_name() -> None:
    rnd = round_of(
        receiver("a/0", ReceiverState.COMMITTING, ready=0.1, voted=0.2),
        state=RoundState.COMMITTING,
        admitted=0.0,
        decided=0.2,
    )
    assert "3.0 s a/0's commit" in sentence(rnd, T + 3.2)


def test_a_round_restored_after_its_decision_waits_for_the_commits_alone() -> None:
    rnd = round_of(
        measured(receiver("a/0", committed=0.5), 9.0, 9.0, 0.4),
        outcome=Outcome.COMMITTED,
        decided=0.0,
        finished=0.5,
    )
    assert sentence(rnd, T) == "round 812 took 500 ms: 400 ms a/0's commit, 100 ms broker"


def test_a_round_without_receivers_was_the_brokers() -> None:
    rnd = round_of(outcome=Outcome.EMPTY, batches={}, admitted=0.0, decided=0.0, finished=0.002)
    assert sentence(rnd, T) == "round 812 ended empty after 2 ms: 2 ms broker"


@pytest.mark.parametrize("prepare", [0.0, 0.02, 5.0])
@pytest.mark.parametrize("copy", [0.0, 0.02, 5.0])
@pytest.mark.parametrize("commit", [0.0, 0.02, 5.0])
@pytest.mark.parametrize("last", [0.0, 0.02, 0.09])
def test_the_parts_add_up_to_the_whole_whatever_a_worker_says_of_itself(
    prepare: float, copy: float, commit: float, last: float
) -> None:
    it = receiver("a/0", ready=0.01, voted=0.05, committed=0.09)
    rnd = round_of(
        measured(it, prepare, copy, commit),
        outcome=Outcome.COMMITTED,
        batches={(0, 0): last},
        admitted=0.005,
        decided=0.06,
        finished=0.1,
    )
    found = parts(rnd, T)
    assert sum(part.seconds for part in found) == pytest.approx(0.1)
    assert all(part.seconds > 0 for part in found)
    assert [part.seconds for part in found] == sorted((p.seconds for p in found), reverse=True)


def test_times_are_short_to_read() -> None:
    shown = [amount(s) for s in (0.0, 0.00042, 0.0072, 0.0412, 0.9994, 3.14, 95.2)]
    assert shown == ["0 ms", "0.42 ms", "7.2 ms", "41 ms", "999 ms", "3.1 s", "95 s"]
