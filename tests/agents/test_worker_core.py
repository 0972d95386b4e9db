"""The worker's core: one thing at a time, what it answers, and what it announces."""

from __future__ import annotations

import pytest

from tensorlease.agents.work import (
    AbortWork,
    CommitWork,
    CopyWork,
    PlanWork,
    PrepareWork,
    UnmapWork,
)
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.agents.worker_state import ToldTorn, WorkAdded
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import (
    BatchRef,
    Code,
    CommitNote,
    OfferRef,
    Phase,
    RoundRef,
    Taken,
    TakeNote,
    WorkerRound,
)

from .cores import (
    EPOCH,
    GROUP,
    ME,
    NEXT_EPOCH,
    RECEIVERS,
    TRAINER,
    effects,
    posts,
    welcome,
)
from .worker_rounds import (
    KEY,
    TERMS,
    abort,
    commit,
    committed,
    deliver,
    drained,
    make,
    message,
    phase_of,
    prepare,
    staging,
    take,
    total,
    voted,
)

# ---------------------------------------------------------------- a round


def test_a_round_is_prepared_copied_and_committed_in_this_order() -> None:
    core = make()
    prepare(core)
    assert effects(core) == [WorkAdded()]
    assert phase_of(core) is Phase.PREPARING
    assert core.next_work() == PrepareWork(KEY, TERMS, RECEIVERS)
    core.prepared(True)
    assert posts(core) == [m.Ready(1, *KEY)]
    assert phase_of(core) is Phase.STAGING
    deliver(core, 0, total=1)
    assert core.next_work() == CopyWork(KEY, message(0, total=1), b"table")
    core.copied(True, covered=True)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, True)]
    assert phase_of(core) is Phase.VOTED
    commit(core)
    assert core.next_work() == CommitWork(KEY, 5)
    assert phase_of(core) is Phase.COMMITTING
    core.committed(True, prepare_us=1, copy_us=2, commit_us=3)
    assert posts(core) == [m.Committed(1, *KEY, True, "", 1, 2, 3, version=5)]
    assert phase_of(core) is Phase.IDLE
    assert (core.current, core.state.torn) == (5, False)
    assert core.next_work() is None


def test_one_thing_is_done_at_a_time() -> None:
    core = staging()
    deliver(core, 0)
    deliver(core, 1)
    take(core, CopyWork)
    assert core.next_work() is None
    core.copied(True)
    take(core, CopyWork)


def test_batches_that_come_before_the_hook_is_done_are_held_and_imply_ready() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    deliver(core, 0)
    deliver(core, 1, total=2)
    assert core.next_work() is None
    effects(core)
    core.prepared(True)
    assert posts(core) == []
    for seq in (0, 1):
        work = take(core, CopyWork)
        assert isinstance(work, CopyWork) and work.batch.seq == seq
        core.copied(True, covered=seq == 1)
    assert [s.vote for s in posts(core) if isinstance(s, m.Staged)] == [False, True]


def test_a_report_of_what_was_not_running_is_an_error() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    with pytest.raises(AssertionError, match="AbortWork is not what was running"):
        core.aborted()


def test_each_piece_of_work_is_progress_in_the_beats() -> None:
    core = make()
    core.beat()
    prepare(core)
    take(core, PrepareWork)
    core.prepared(True)
    core.beat()
    beats = [message for message in posts(core) if isinstance(message, m.Beat)]
    assert beats == [m.Beat(1, Phase.IDLE, 0), m.Beat(1, Phase.STAGING, 1)]


# ---------------------------------------------------------------- votes


def test_a_vote_waits_for_the_number_of_batches() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    core.copied(True, covered=True)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, False)]
    total(core, 1)
    assert posts(core) == [m.Vote(1, *KEY)]


def test_a_vote_waits_for_all_batches() -> None:
    core = staging()
    deliver(core, 0)
    total(core, 2)
    take(core, CopyWork)
    core.copied(True, covered=True)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, False)]
    deliver(core, 1)
    take(core, CopyWork)
    core.copied(True, covered=True)
    assert posts(core) == [m.Staged(1, *KEY, 0, 1, True)]


def test_a_worker_that_wants_nothing_votes_for_no_batch() -> None:
    core = make()
    prepare(core)
    total(core, 0)
    take(core, PrepareWork)
    core.prepared(True, covered=True)
    assert posts(core) == [m.Ready(1, *KEY), m.Vote(1, *KEY)]


def test_a_worker_that_got_nothing_that_it_wants_rejects() -> None:
    core = staging()
    total(core, 0)
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject)
    assert (reject.code, reject.torn) == (Code.INCOMPLETE, False)
    assert "brought nothing that this worker wants" in reject.text
    take(core, AbortWork)


def test_a_worker_that_misses_a_region_rejects_with_its_name() -> None:
    core = staging()
    deliver(core, total=1)
    take(core, CopyWork)
    core.copied(True, covered=False, missing="layers.1.weight")
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject)
    assert (reject.code, reject.text) == (Code.INCOMPLETE, "not covered: layers.1.weight")


def test_a_worker_that_learns_late_that_there_is_no_more_rejects_with_what_it_misses() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    core.copied(True, covered=False, missing="layers.1.weight")
    posts(core)
    total(core, 1)
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject) and "layers.1.weight" in reject.text


def test_a_repeated_total_repeats_the_vote() -> None:
    core = voted()
    total(core, 1)
    assert posts(core) == [m.Vote(1, *KEY)]


def test_a_number_before_all_batches_came_is_no_vote_for_fewer() -> None:
    core = staging()
    deliver(core, 0, total=1)
    deliver(core, 1)
    take(core, CopyWork)
    core.copied(True, covered=True)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, False)]


# ---------------------------------------------------------------- repeated messages


def test_a_repeated_batch_repeats_the_staged_with_its_vote() -> None:
    core = voted()
    deliver(core)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, True)]
    assert core.next_work() is None


def test_a_repeated_batch_is_not_copied_twice() -> None:
    core = staging()
    deliver(core)
    deliver(core)
    take(core, CopyWork)
    deliver(core)
    core.copied(True)
    assert core.next_work() is None


def test_a_repeated_prepare_repeats_the_ready() -> None:
    core = staging()
    prepare(core)
    assert posts(core) == [m.Ready(1, *KEY)]
    assert core.next_work() is None


def test_a_repeated_prepare_before_the_hook_is_done_says_nothing() -> None:
    core = make()
    prepare(core)
    effects(core)
    prepare(core)
    assert effects(core) == []


def test_a_prepare_of_a_committed_round_repeats_the_answer() -> None:
    core = committed()
    prepare(core)
    assert posts(core) == [m.Committed(1, *KEY, True, version=5)]
    assert core.next_work() is None


def test_a_prepare_of_a_round_that_it_is_out_of_repeats_drained() -> None:
    core = staging()
    abort(core)
    take(core, AbortWork)
    core.aborted()
    posts(core)
    prepare(core)
    assert posts(core) == [drained(torn=False)]
    assert core.next_work() is None


@pytest.mark.parametrize("ok", [True, False])
def test_a_repeated_commit_repeats_its_answer(ok: bool) -> None:
    core = committed(ok=ok)
    commit(core)
    text = "" if ok else "kernel not found"
    assert posts(core) == [m.Committed(1, *KEY, ok, text, version=5)]
    assert core.next_work() is None


def test_a_repeated_commit_before_and_while_the_hook_runs_runs_no_second_one() -> None:
    core = voted()
    commit(core)
    commit(core)
    take(core, CommitWork)
    commit(core)
    core.committed(True)
    assert core.next_work() is None


def test_a_commit_before_the_vote_is_not_obeyed() -> None:
    core = staging()
    commit(core)
    assert core.next_work() is None


def test_a_commit_of_an_unknown_round_is_dropped() -> None:
    core = make()
    commit(core)
    assert effects(core) == []


def test_a_repeated_abort_repeats_drained_and_runs_no_second_hook() -> None:
    core = staging()
    abort(core)
    abort(core)
    assert posts(core) == [drained(torn=False), drained(torn=False)]
    take(core, AbortWork)
    core.aborted()
    assert core.next_work() is None


def test_an_abort_of_a_committed_round_is_answered_and_changes_nothing() -> None:
    core = committed()
    abort(core)
    assert posts(core) == [drained(torn=False)]
    assert core.current == 5
    assert core.hello().out == []


def test_an_abort_of_an_unknown_round_is_answered_and_remembered() -> None:
    core = make()
    abort(core, 9)
    assert posts(core) == [drained(torn=False, call=9)]
    assert core.hello().out == [RoundRef(GROUP, 9)]


def test_batches_and_totals_of_an_unknown_round_are_dropped() -> None:
    core = make()
    deliver(core)
    total(core, 1)
    assert effects(core) == []
    # Its handles came all the same: they are given back when the trainer asks.
    assert core.hello().mappings == [Taken(TRAINER, [0])]


# ---------------------------------------------------------------- torn


def test_in_place_weights_are_torn_from_the_first_copied_byte_to_the_next_commit() -> None:
    core = staging(version=3)
    deliver(core, total=1)
    assert core.current == 3
    take(core, CopyWork)
    assert core.current == 0
    core.copied(True, covered=True)
    commit(core)
    take(core, CommitWork)
    core.committed(True)
    assert core.current == 5


def test_a_batch_of_which_nothing_is_wanted_leaves_the_weights_as_they_were() -> None:
    core = staging(version=3)
    deliver(core, total=1)
    take(core, CopyWork)
    core.copied(True, missing="nothing is wanted", untouched=True)
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject)
    assert (reject.code, reject.torn, core.current) == (Code.INCOMPLETE, False, 3)


@pytest.mark.parametrize("told", [False, True])
def test_an_untouched_batch_heals_nothing(told: bool) -> None:
    core = committed()
    prepare(core, 2)
    take(core, PrepareWork)
    core.prepared(True)
    deliver(core, call=2, total=2)
    if not told:
        take(core, CopyWork)
        core.copied(True)
        deliver(core, call=2, seq=1, total=2)
    take(core, CopyWork)
    if told:
        core.receive(m.Torn(EPOCH, ME, GROUP, 1, "member 1 failed"))
    core.copied(True, untouched=True)
    assert core.state.torn


def test_shadow_weights_keep_the_old_version() -> None:
    core = staging(version=3, in_place=False)
    deliver(core, total=1)
    take(core, CopyWork)
    abort(core)
    core.copied(True)
    assert core.current == 3
    assert posts(core) == [drained(torn=False)]


def test_a_failed_commit_hook_leaves_the_weights_torn() -> None:
    core = committed(ok=False, version=3)
    assert core.current == 0
    assert core.hello().torn


def test_a_worker_whose_replica_is_torn_is_not_current() -> None:
    core = committed()
    core.receive(m.Torn(EPOCH, ME, GROUP, 1, "member 1 failed"))
    assert effects(core) == [ToldTorn(5, "member 1 failed")]
    assert core.current == 0
    assert core.hello().torn


def test_torn_of_another_round_is_dropped() -> None:
    core = committed()
    core.receive(m.Torn(EPOCH, ME, GROUP, 9, "member 1 failed"))
    assert effects(core) == []
    assert core.current == 5


def test_torn_is_healed_by_a_later_commit() -> None:
    core = committed()
    core.receive(m.Torn(EPOCH, ME, GROUP, 1, "member 1 failed"))
    prepare(core, 2)
    take(core, PrepareWork)
    core.prepared(True)
    deliver(core, call=2, total=1)
    take(core, CopyWork)
    core.copied(True, covered=True)
    core.receive(m.Commit(EPOCH, ME, GROUP, 2))
    take(core, CommitWork)
    core.committed(True)
    assert core.current == 5


# ---------------------------------------------------------------- sessions


def test_a_hello_of_an_idle_worker_announces_where_it_is() -> None:
    hello = make(version=3).hello()
    assert (hello.replica, hello.member, hello.size) == ("a", 0, 1)
    assert (hello.version, hello.torn, hello.committed) == (3, False, None)
    assert (hello.round, hello.out, hello.mappings) == (None, [], [])


def test_a_hello_in_the_middle_announces_what_is_staged_and_read() -> None:
    core = staging()
    for seq in range(3):
        deliver(core, seq)
    take(core, CopyWork)
    core.copied(True)
    take(core, CopyWork)
    staged, reading = [BatchRef(0, 0)], [BatchRef(0, 1)]
    assert core.hello().round == WorkerRound(*KEY, TERMS, RECEIVERS, staged, reading, False)


def test_a_hello_after_the_vote_announces_it() -> None:
    told = voted().hello().round
    assert told is not None
    assert (told.voted, told.decided) == (True, False)


def test_a_hello_after_commit_came_announces_the_decision() -> None:
    core = voted()
    commit(core)
    told = core.hello().round
    assert told is not None and told.decided
    take(core, CommitWork)
    told = core.hello().round
    assert told is not None and (told.voted, told.decided) == (True, True)


@pytest.mark.parametrize("ok", [True, False])
def test_a_hello_after_the_commit_hook_announces_how_it_went(ok: bool) -> None:
    hello = committed(ok=ok).hello()
    text = "" if ok else "kernel not found"
    assert hello.committed == CommitNote(*KEY, 5, ok, text, RECEIVERS)
    assert hello.round is None
    assert hello.version == (5 if ok else 0)


def test_what_was_done_without_a_connection_is_announced_by_the_next_hello() -> None:
    core = voted()
    commit(core)
    take(core, CommitWork)
    core.disconnected()
    core.committed(True)
    assert posts(core) == []
    assert core.hello().version == 5


def test_commit_of_a_dead_broker_is_dropped() -> None:
    core = voted()
    core.disconnected()
    core.hello()
    welcome(core, epoch=NEXT_EPOCH)
    effects(core)
    commit(core)
    assert core.next_work() is None


# ---------------------------------------------------------------- offers and mappings


def offered(core: WorkerCore, number: int = 0, *buffers: int) -> None:
    told = m.Offered(EPOCH, ME, TRAINER, 0, "cpu:0", number, list(buffers) or [1, 2])
    core.receive(told, b"handles")


def planned(core: WorkerCore, *buffers: int) -> TakeNote:
    """Plans all known offers, of which these buffers are taken and mapped."""
    take(core, PlanWork)
    seen = [OfferRef(offer.trainer, offer.number) for offer in core.state.offers]
    note = TakeNote(seen, [Taken(TRAINER, list(buffers))], True, [])
    core.planned(note, {TRAINER: set(buffers)})
    return note


def test_an_offer_is_planned_and_answered_by_what_is_taken() -> None:
    core = make()
    offered(core)
    note = planned(core, 1, 2)
    assert posts(core) == [m.Take(1, note)]
    hello = core.hello()
    assert hello.take == note
    assert hello.mappings == [Taken(TRAINER, [1, 2])]


def test_what_is_not_taken_is_given_back_at_once() -> None:
    core = make()
    offered(core)
    note = planned(core, 1)
    assert posts(core) == [m.Unmapped(1, TRAINER, [2]), m.Take(1, note)]


def test_offers_that_come_together_are_planned_together() -> None:
    core = make()
    offered(core, 0, 1)
    offered(core, 1, 2)
    planned(core, 1, 2)
    assert core.next_work() is None


def test_an_offer_that_comes_while_others_are_planned_is_planned_next() -> None:
    core = make()
    offered(core, 0, 1)
    take(core, PlanWork)
    offered(core, 1, 2)
    core.planned(TakeNote([OfferRef(TRAINER, 0)], [], True, []), {TRAINER: {1}})
    assert [message for message in posts(core) if isinstance(message, m.Unmapped)] == []
    take(core, PlanWork)


def test_a_repeated_offer_repeats_the_answer() -> None:
    core = make()
    offered(core)
    note = planned(core, 1, 2)
    posts(core)
    offered(core)
    assert posts(core) == [m.Take(1, note)]
    assert core.next_work() is None


def test_buffers_are_unmapped_on_request_after_the_plan_that_used_them_is_gone() -> None:
    core = make()
    offered(core)
    planned(core, 1, 2)
    posts(core)
    core.receive(m.Unmap(EPOCH, ME, TRAINER, [1, 2]))
    take(core, PlanWork)
    core.planned(TakeNote([], [], False, []), {})
    assert core.next_work() == UnmapWork(TRAINER, [1, 2])
    core.unmapped()
    assert posts(core)[-1] == m.Unmapped(1, TRAINER, [1, 2])
    assert core.hello().mappings == []


def test_what_is_about_to_be_unmapped_is_taken_no_more() -> None:
    core = make()
    offered(core, 0, 1)
    offered(core, 1, 2)
    planned(core, 1, 2)
    core.receive(m.Unmap(EPOCH, ME, TRAINER, [2]))
    note = core.hello().take
    assert (note.seen, note.takes) == ([OfferRef(TRAINER, 0)], [Taken(TRAINER, [1])])
    assert not note.complete


def test_a_ring_buffer_is_mapped_from_its_delivery_on() -> None:
    core = staging()
    deliver(core, 0)
    deliver(core, 1, registered=True)
    assert core.hello().mappings == [Taken(TRAINER, [0])]


def test_memory_of_a_trainer_that_is_gone_is_unmapped() -> None:
    core = make()
    offered(core)
    planned(core, 1)
    core.receive(m.TrainerGone(EPOCH, ME, TRAINER))
    take(core, PlanWork)
    core.planned(TakeNote([], [], False, []), {})
    assert core.next_work() == UnmapWork(TRAINER, [1, 2])
    core.unmapped()
    assert (posts(core)[-1], core.state.offers) == (m.Unmapped(1, TRAINER, [1, 2]), [])


def test_a_ring_slot_of_a_trainer_that_is_gone_is_unmapped_without_a_plan() -> None:
    core = staging()
    deliver(core, 3)
    abort(core)
    take(core, AbortWork)
    core.aborted()
    core.receive(m.TrainerGone(EPOCH, ME, TRAINER))
    assert core.next_work() == UnmapWork(TRAINER, [3])
