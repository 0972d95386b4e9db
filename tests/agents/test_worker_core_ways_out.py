"""The worker's core: every way out of a round, and on to the next."""

from __future__ import annotations

import pytest

from tensorlease.agents.core import TurnedAway
from tensorlease.agents.work import (
    AbortWork,
    CommitWork,
    CopyWork,
    PlanWork,
    PrepareWork,
)
from tensorlease.agents.worker_core import MAX_OUT
from tensorlease.agents.worker_state import Holding, WorkAdded
from tensorlease.protocol import messages as m
from tensorlease.protocol.limits import MAX_TEXT
from tensorlease.protocol.records import (
    Code,
    OfferRef,
    Phase,
    RoundRef,
    TakeNote,
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
)
from .worker_rounds import (
    KEY,
    TERMS,
    abort,
    commit,
    deliver,
    drained,
    make,
    phase_of,
    prepare,
    staging,
    take,
    total,
    voted,
)

# ---------------------------------------------------------------- getting out


def test_an_abort_before_the_prepare_hook_began_runs_no_hook() -> None:
    core = make()
    prepare(core)
    effects(core)
    abort(core)
    assert posts(core) == [drained(torn=False)]
    assert core.next_work() is None


def test_an_abort_while_the_prepare_hook_runs_waits_for_it() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    effects(core)
    abort(core)
    assert posts(core) == []
    assert phase_of(core) is Phase.DRAINING
    core.prepared(True)
    assert posts(core) == [drained(torn=False)]
    assert core.next_work() == AbortWork(KEY, Code.VOID, "void", False)
    core.aborted()
    assert phase_of(core) is Phase.IDLE


def test_an_abort_while_the_prepare_hook_fails_still_runs_the_abort_hook() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    abort(core)
    core.prepared(False, "broken")
    assert posts(core) == [drained(torn=False)]
    take(core, AbortWork)


def test_an_abort_while_staging_with_nothing_to_read_is_answered_at_once() -> None:
    core = staging()
    abort(core)
    assert posts(core) == [drained(torn=False)]
    take(core, AbortWork)


def test_an_abort_while_a_copy_runs_is_answered_when_it_has_ended() -> None:
    core = staging()
    deliver(core, 0)
    deliver(core, 1, total=2)
    take(core, CopyWork)
    abort(core)
    assert posts(core) == []
    core.copied(True)
    assert posts(core) == [drained(torn=True)]
    assert core.next_work() == AbortWork(KEY, Code.VOID, "void", True)
    core.aborted()
    # The other batch is not read.
    assert core.next_work() is None


def test_an_abort_while_a_copy_fails_is_answered_by_drained_alone() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    abort(core)
    core.copied(False, text="broken")
    assert posts(core) == [drained(torn=True)]


def test_an_abort_after_the_vote_is_obeyed() -> None:
    core = voted()
    abort(core)
    assert posts(core) == [drained(torn=True)]
    take(core, AbortWork)
    commit(core)
    assert [work for work in core.queue if isinstance(work, CommitWork)] == []


def test_an_abort_while_the_commit_hook_runs_is_answered_behind_its_answer() -> None:
    core = voted()
    commit(core)
    take(core, CommitWork)
    abort(core)
    assert posts(core) == []
    core.committed(True)
    assert posts(core) == [m.Committed(1, *KEY, True, version=5), drained(torn=False)]
    # One hook ends a prepared round, never two.
    assert core.next_work() is None
    assert core.current == 5


def test_expelled_is_answered_as_an_abort_is() -> None:
    core = staging()
    core.receive(m.Expelled(EPOCH, ME, GROUP, 1, Code.DEADLINE, "too slow"))
    assert posts(core) == [drained(torn=False)]
    assert core.next_work() == AbortWork(KEY, Code.DEADLINE, "too slow", False)


def test_a_message_of_the_round_behind_its_abort_is_dropped() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    abort(core)
    effects(core)
    deliver(core, 1)
    total(core, 2)
    commit(core)
    abort(core)
    assert effects(core) == []


def test_an_abort_while_other_work_runs_is_answered_at_once() -> None:
    core = staging()
    core.receive(m.Offered(EPOCH, ME, TRAINER, 0, "cpu:0", 0, [1]), b"handles")
    take(core, PlanWork)
    posts(core)
    abort(core)
    assert posts(core) == [drained(torn=False)]
    core.planned(TakeNote([OfferRef(TRAINER, 0)], [], True, []), {})
    take(core, AbortWork)


# ---------------------------------------------------------------- refusing by itself


def test_a_failed_prepare_hook_rejects_and_runs_the_abort_hook() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    core.prepared(False, "cannot sleep")
    assert posts(core) == [m.Reject(1, *KEY, Code.PREPARE_FAILED, "cannot sleep", False)]
    assert core.next_work() == AbortWork(KEY, Code.PREPARE_FAILED, "cannot sleep", False)


def test_a_failed_copy_rejects_by_its_code_and_drops_the_other_batches() -> None:
    core = staging()
    deliver(core, 0)
    deliver(core, 1)
    take(core, CopyWork)
    core.copied(False, Code.UNREADABLE, "no such segment")
    assert posts(core) == [m.Reject(1, *KEY, Code.UNREADABLE, "no such segment", True)]
    take(core, AbortWork)
    core.aborted()
    assert core.next_work() is None
    assert core.hello().out == [RoundRef(*KEY)]


def test_a_long_reason_is_cut() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    core.copied(False, text="x" * (MAX_TEXT + 1))
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject) and len(reject.text) == MAX_TEXT


def test_a_long_reason_of_a_commit_hook_is_cut() -> None:
    core = voted()
    commit(core)
    take(core, CommitWork)
    core.committed(False, "x" * (MAX_TEXT + 1))
    (answer,) = posts(core)
    assert isinstance(answer, m.Committed) and len(answer.text) == MAX_TEXT


def test_a_version_below_its_own_is_refused_by_name() -> None:
    core = make(version=7)
    prepare(core, version=6)
    (reject,) = posts(core)
    assert isinstance(reject, m.Reject)
    assert reject.code is Code.VERSION_BELOW_WORKER
    assert reject.text == "version 6 is below this worker's 7"
    assert core.next_work() is None
    prepare(core, version=6)
    assert posts(core) == [drained(torn=False)]


def test_its_own_version_again_is_taken() -> None:
    core = make(version=5)
    prepare(core, version=5)
    take(core, PrepareWork)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.STAGING])
def test_a_worker_may_withdraw_before_its_vote(phase: Phase) -> None:
    if phase is Phase.STAGING:
        core = staging()
    else:
        core = make()
        prepare(core)
        effects(core)
    assert phase_of(core) is phase
    assert core.withdraw("the broker is lost")
    assert posts(core) == [drained(torn=False)]
    assert core.hello().out == [RoundRef(*KEY)]


def test_a_worker_never_withdraws_after_its_vote() -> None:
    core = voted()
    assert not core.withdraw("the broker is lost")
    commit(core)
    take(core, CommitWork)
    assert not core.withdraw("the broker is lost")
    core.committed(True)
    assert core.current == 5


def test_there_is_nothing_to_withdraw_from_outside_a_round() -> None:
    assert not make().withdraw("bored")


def test_who_lost_its_place_is_out_of_its_round_and_of_the_next() -> None:
    core = voted()
    core.disconnected()
    core.hello()
    core.receive(m.Refused(NEXT_EPOCH, ME, Code.PLACE_TAKEN, "held by pid 9", True))
    assert effects(core) == [WorkAdded(), TurnedAway(Code.PLACE_TAKEN, "held by pid 9", True)]
    take(core, AbortWork)
    assert core.hello().out == [RoundRef(*KEY)]


# ---------------------------------------------------------------- the next round


def test_a_newer_round_begins_when_the_older_has_drained() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    effects(core)
    prepare(core, 2)
    deliver(core, 0, call=2, total=1)
    assert posts(core) == []
    core.copied(True)
    assert posts(core) == [drained(torn=True)]
    assert core.next_work() == AbortWork(KEY, Code.NO_ROUND, "a newer round begins", True)
    core.aborted()
    assert core.next_work() == PrepareWork((GROUP, 2), TERMS, RECEIVERS)
    core.prepared(True)
    work = take(core, CopyWork)
    assert isinstance(work, CopyWork) and work.batch.call == 2


def test_a_newer_round_waits_for_the_commit_hook_of_the_older() -> None:
    core = voted()
    commit(core)
    take(core, CommitWork)
    prepare(core, 2)
    core.committed(True)
    assert posts(core) == [m.Committed(1, *KEY, True, version=5), drained(torn=False)]
    assert core.next_work() == PrepareWork((GROUP, 2), TERMS, RECEIVERS)


def test_a_round_that_waits_for_the_older_may_be_aborted() -> None:
    core = staging()
    deliver(core)
    take(core, CopyWork)
    prepare(core, 2)
    effects(core)
    abort(core, 2)
    assert posts(core) == [drained(torn=True, call=2)]
    core.copied(True)
    take(core, AbortWork)
    core.aborted()
    assert core.next_work() is None


def test_only_the_last_rounds_that_it_is_out_of_are_remembered() -> None:
    core = make()
    for call in range(1, MAX_OUT + 3):
        abort(core, call)
    out = core.hello().out
    assert len(out) == MAX_OUT
    assert (out[0].call, out[-1].call) == (3, MAX_OUT + 2)


# ---------------------------------------------------------------- views that are kept


def test_who_keeps_a_view_rejects_at_once_and_drains_when_it_is_gone() -> None:
    core = staging()
    deliver(core, total=1)
    take(core, CopyWork)
    core.copied(False, Code.COPY_FAILED, "kept", kept=True)
    reject = m.Reject(1, *KEY, Code.COPY_FAILED, "kept", True, reading=True)
    assert Holding() in effects(core)
    assert core.phase is Phase.DRAINING
    assert core.hello().out == []
    assert core.hello().round is not None
    assert take(core, AbortWork).text == "kept"  # type: ignore[attr-defined]
    core.aborted()
    core = staging()
    deliver(core, total=1)
    take(core, CopyWork)
    core.copied(False, Code.COPY_FAILED, "kept", kept=True)
    assert posts(core) == [reject]
    core.let_go()
    assert posts(core) == [drained(torn=True)]
    take(core, AbortWork)
    core.aborted()
    assert core.next_work() is None
    assert core.hello().out == [RoundRef(*KEY)]


def test_who_keeps_a_view_of_a_round_that_was_aborted_meanwhile_drains_only_when_it_is_gone() -> (
    None
):
    core = staging()
    deliver(core, total=1)
    take(core, CopyWork)
    abort(core)
    core.copied(False, Code.COPY_FAILED, "kept", kept=True)
    assert posts(core) == []
    abort(core)
    assert posts(core) == []
    core.let_go()
    core.let_go()
    assert posts(core) == [drained(torn=True)]


def test_who_keeps_a_view_begins_no_newer_round_and_repeats_why_it_is_out() -> None:
    core = staging()
    deliver(core, total=2)
    deliver(core, 1, total=2)
    take(core, CopyWork)
    core.copied(False, Code.COPY_FAILED, "kept", kept=True)
    effects(core)
    take(core, AbortWork)
    core.aborted()
    assert core.next_work() is None  # the other batch is not copied any more
    prepare(core)
    assert posts(core) == [m.Reject(1, *KEY, Code.COPY_FAILED, "kept", True, reading=True)]
    prepare(core, 2, version=6)
    assert (core.next_work(), posts(core)) == (None, [])
    core.let_go()
    assert posts(core) == [drained(torn=True)]
    assert isinstance(core.next_work(), PrepareWork)
