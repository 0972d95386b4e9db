"""The worker's half of the rules, as a pure state machine.

It decides what the application's thread does next (`next_work`), one thing at a time: prepare,
copy a batch, commit, abort, plan, unmap. It answers the broker, and announces at each Hello what it
has staged, committed, and is out of.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import messages as m
from ..protocol.limits import MAX_TEXT
from ..protocol.records import (
    Code,
    CommitNote,
    Phase,
    Proof,
    RoundRef,
    Taken,
    TakeNote,
    Tally,
)
from .core import PROTOCOLS, Core, Identity
from .repeats import MAX_ANSWERS, Repeats
from .work import (
    AbortWork,
    CommitWork,
    CopyWork,
    PlanWork,
    PrepareWork,
    RoundKey,
    UnmapWork,
    Work,
)
from .worker_state import (
    BatchKey,
    BatchState,
    CurrentRound,
    HeldBatch,
    Holding,
    OfferNote,
    ToldTorn,
    WorkAdded,
    WorkerState,
)

MAX_OUT = 32
"""Rounds that a worker remembers to be out of; the oldest are forgotten."""


class WorkerCore(Core):
    """The state machine of one worker.

    Args:
        me: The agent's identity.
        replica: The workers that switch together.
        member: Its place in the replica.
        size: How many members the replica has.
        version: The version that its weights have already (0: none).
        in_place: Copies overwrite the weights in use, so that the first copied byte of a round
            leaves them torn until a commit.
    """

    def __init__(
        self,
        me: Identity,
        replica: str,
        member: int,
        size: int,
        *,
        version: int = 0,
        in_place: bool = True,
    ) -> None:
        super().__init__(me)
        self.replica = replica
        self.member = member
        self.size = size
        self.in_place = in_place
        self.state = WorkerState(version=version)
        self.queue: list[Work] = []
        self.running: Work | None = None
        self._repeats = Repeats()

    @property
    def current(self) -> int:
        """The version that this worker is at; 0 while it has none or is torn."""
        return 0 if self.state.torn else self.state.version

    @property
    def phase(self) -> Phase:
        rnd = self.state.round
        if rnd is None:
            return Phase.IDLE
        return Phase.DRAINING if rnd.ending is not None else rnd.phase

    # ------------------------------------------------------------ sessions

    def hello(self) -> m.WorkerHello:
        """Begins a new session; returns its first message, which announces all that is known."""
        me, state = self.me, self.state
        self._forget_unmapped_offers()
        return m.WorkerHello(
            self.begin_session(),
            PROTOCOLS,
            me.instance,
            me.channel,
            self.replica,
            self.member,
            self.size,
            me.host,
            me.device,
            me.processes,
            me.locked,
            me.software,
            state.version,
            state.torn,
            state.committed,
            None if state.round is None else state.round.announcement(),
            [RoundRef(*key) for key in state.out],
            [Taken(trainer, sorted(numbers)) for trainer, numbers in state.mappings.items()],
            state.note,
            me.job,
        )

    def _forget_unmapped_offers(self) -> None:
        """Some may have been retired meanwhile; the living ones come again."""
        state = self.state
        state.offers = [
            offer
            for offer in state.offers
            if not state.mappings.get(offer.trainer, set()).isdisjoint(offer.buffers)
        ]
        living = {(offer.trainer, offer.number) for offer in state.offers}
        note = state.note
        seen = [ref for ref in note.seen if (ref.trainer, ref.number) in living]
        state.note = TakeNote(seen, note.takes, note.complete, note.missing)

    def on_welcome(self, message: m.Welcome) -> None:
        """Everything outstanding comes from the broker, behind its Welcome."""

    def on_refused(self, code: Code, text: str) -> None:
        """Its place was given to another: it is out of every round, whatever it voted."""
        if code is Code.PLACE_TAKEN:
            self.state.pending = None
            if self.state.round is not None:
                self._abort(self.state.round, code, text)

    def beat(self) -> None:
        """A sign of life; to be called as often as the broker asks for."""
        self.post(m.Beat(self.session.number, self.phase, self.state.progress % 2**31))
        rnd = self.state.round
        if rnd is not None and self.phase is Phase.STAGING and not rnd.began:
            # Its first Staged will say so, too; but until then another limit would count.
            rnd.began = True
            self.post(m.Ready(self.session.number, *rnd.key))
        waits = self.connected and self.running is None and not self.queue
        if rnd is None or not waits or self.phase not in (Phase.STAGING, Phase.VOTED):
            self._repeats.due(None)
        elif self._repeats.due((rnd.key, rnd.phase, self.state.progress, len(rnd.batches))):
            self._say_again(rnd)

    def _say_again(self, rnd: CurrentRound) -> None:
        """Repeats what the broker may not have heard; it counts each once."""
        staged = [key for key, batch in rnd.batches.items() if batch.state is BatchState.STAGED]
        for key in staged[-MAX_ANSWERS:]:
            self._post_staged(rnd, key, False)
        if rnd.phase is Phase.VOTED:
            self._post_vote(rnd)

    def _post_staged(self, rnd: CurrentRound, key: BatchKey, vote: bool) -> None:
        rnd.began = True
        proofs, tally = rnd.batches[key].proofs, rnd.tally if vote else None
        self.post(m.Staged(self.session.number, *rnd.key, *key, vote, proofs, tally))

    def _post_vote(self, rnd: CurrentRound) -> None:
        self.post(m.Vote(self.session.number, *rnd.key, rnd.tally))

    # ------------------------------------------------------------ the application's thread

    def next_work(self) -> Work | None:
        """Begins the next piece of work, if none is running."""
        if self.running is not None or not self.queue:
            return None
        work = self.running = self.queue.pop(0)
        rnd = self.state.round
        if isinstance(work, PrepareWork):
            assert rnd is not None
            rnd.hooked = True
        elif isinstance(work, CopyWork):
            assert rnd is not None
            batch = work.batch
            rnd.batches[batch.rank, batch.seq].state = BatchState.READING
            rnd.was_torn = self.state.torn
            self.state.torn = self.state.torn or self.in_place
        elif isinstance(work, CommitWork):
            assert rnd is not None
            rnd.phase = Phase.COMMITTING
        return work

    def prepared(
        self, ok: bool, text: str = "", *, covered: bool = False, tally: Tally | None = None
    ) -> None:
        """The prepare hook returned (`ok`) or raised. `covered`: the worker wants nothing."""
        rnd = self._done(PrepareWork)
        if rnd.ending is not None:
            self._end(rnd)
        elif not ok:
            self._reject(rnd, Code.PREPARE_FAILED, text)
        else:
            rnd.phase = Phase.STAGING
            rnd.covered, rnd.tally = covered, tally
            if rnd.batches:
                for batch in rnd.batches.values():
                    self._add(CopyWork(rnd.key, batch.message, batch.body))
            else:
                rnd.began = True
                self.post(m.Ready(self.session.number, *rnd.key))
            self._vote_if_complete(rnd)

    def copied(
        self,
        ok: bool,
        code: Code = Code.COPY_FAILED,
        text: str = "",
        *,
        covered: bool = False,
        missing: str = "",
        untouched: bool = False,
        kept: bool = False,
        proofs: Sequence[Proof] = (),
        tally: Tally | None = None,
    ) -> None:
        """A batch was taken in, its device work is done and no view of it is left; or it failed.

        `covered`: all wanted regions are staged by now; `missing` names those that are not.
        `untouched`: nothing of it was wanted, and not a byte was written.
        `kept`: it failed, and something still looks into it; `let_go` says when nothing does.
        `proofs`: digests of what was read. `tally`: what the round has brought so far.
        """
        work = self.running
        assert isinstance(work, CopyWork)
        rnd = self._done(CopyWork)
        if untouched:
            self.state.torn = rnd.was_torn
        if kept:
            self._hold(rnd, code, text)
            return
        if rnd.ending is not None:
            self._end(rnd)
            return
        if not ok:
            self._reject(rnd, code, text)
            return
        batch = rnd.batches[work.batch.rank, work.batch.seq]
        batch.state, batch.body, batch.proofs = BatchState.STAGED, None, list(proofs)
        rnd.covered, rnd.missing, rnd.tally = covered, missing, tally
        vote = self._complete(rnd)
        if vote and not covered:
            self._reject(rnd, Code.INCOMPLETE, f"not covered: {missing}")
            return
        if vote:
            rnd.phase = Phase.VOTED
        self._post_staged(rnd, (work.batch.rank, work.batch.seq), vote)

    def let_go(self) -> None:
        """Nothing looks into the memory of the round any more that a callback had kept views of."""
        rnd = self.state.round
        if rnd is not None and rnd.kept:
            rnd.kept = False
            self._end(rnd)

    def committed(
        self,
        ok: bool,
        text: str = "",
        *,
        prepare_us: int = 0,
        copy_us: int = 0,
        commit_us: int = 0,
    ) -> None:
        """The commit hook returned (`ok`) or raised; times in microseconds."""
        rnd = self._done(CommitWork)
        state = self.state
        text = text[:MAX_TEXT]
        state.committed = CommitNote(*rnd.key, rnd.terms.version, ok, text, rnd.receivers)
        if ok:
            state.version, state.torn, state.left = rnd.terms.version, False, ""
        else:
            state.torn = True
            state.note_left(rnd, text)
        times, version = (prepare_us, copy_us, commit_us), rnd.terms.version
        self.post(m.Committed(self.session.number, *rnd.key, ok, text, *times, version))
        if rnd.ending is not None:
            self.post(m.Drained(self.session.number, *rnd.key, state.torn))
        self._leave()

    def aborted(self) -> None:
        """The abort hook has returned."""
        self._finish_work(AbortWork)

    def planned(self, note: TakeNote, mapped: dict[str, set[int]]) -> None:
        """All offers that were known when the work began are mapped and planned.

        `mapped`: trainer instance -> buffers that are mapped by now; the others of the offers are
        given back.
        """
        self._finish_work(PlanWork)
        state = self.state
        state.note = note
        seen = {(ref.trainer, ref.number) for ref in note.seen}
        for trainer, numbers in mapped.items():
            state.mappings.setdefault(trainer, set()).update(numbers)
        for offer in state.offers:
            left = set(offer.buffers) - state.mappings.get(offer.trainer, set())
            if left and (offer.trainer, offer.number) in seen:
                self.post(m.Unmapped(self.session.number, offer.trainer, sorted(left)))
        self.post(m.Take(self.session.number, note))

    def unmapped(self) -> None:
        """The buffers of the work are unmapped."""
        work = self._finish_work(UnmapWork)
        assert isinstance(work, UnmapWork)
        mapped = self.state.mappings.get(work.trainer)
        if mapped is not None:
            mapped.difference_update(work.buffers)
            if not mapped:
                del self.state.mappings[work.trainer]
        self.post(m.Unmapped(self.session.number, work.trainer, work.buffers))

    def dropped(self) -> None:
        """What was running is not done any more: the worker has said goodbye, or is about to."""
        self.running = None

    def withdraw(self, text: str) -> bool:
        """Leaves the round by itself, before its vote; False: it is too late, or there is none."""
        rnd = self.state.round
        if rnd is None or rnd.phase not in (Phase.PREPARING, Phase.STAGING):
            return False
        self._abort(rnd, Code.WITHDRAWN, text)
        return True

    def _finish_work(self, kind: type[Work]) -> Work:
        work, self.running = self.running, None
        assert isinstance(work, kind), f"{kind.__name__} is not what was running"
        self.state.progress += 1
        return work

    def _done(self, kind: type[Work]) -> CurrentRound:
        self._finish_work(kind)
        rnd = self.state.round
        assert rnd is not None
        return rnd

    def _add(self, work: Work) -> None:
        self.queue.append(work)
        self.effects.append(WorkAdded())

    # ------------------------------------------------------------ what the broker says

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        match message:
            case m.Deliver():
                self._on_deliver(message, body)
            case m.Prepare():
                self._on_prepare(message)
            case m.Commit():
                self._on_commit((message.group, message.call))
            case m.Total():
                self._on_total((message.group, message.call), message.total)
            case m.Abort() | m.Expelled():
                self._on_abort((message.group, message.call), message.code, message.text)
            case m.Torn():
                self._on_torn((message.group, message.call), message.text)
            case m.Offered():
                self._on_offered(message)
            case m.Unmap():
                self._drop_buffers(message.trainer, set(message.buffers))
            case m.TrainerGone():
                self._on_trainer_gone(message.trainer)
            case _:
                pass

    def _on_prepare(self, message: m.Prepare) -> None:
        state = self.state
        key = (message.group, message.call)
        note = state.committed
        if key in state.out:
            self.post(m.Drained(self.session.number, *key, state.torn))
            return
        if note is not None and (note.group, note.call) == key:
            self._repeat_committed(note)
            return
        if state.round is not None and state.round.key == key:
            rnd = state.round
            if rnd.kept and rnd.ending is not None:
                self._reject_reading(rnd, *rnd.ending)  # What said so may have been lost.
            elif rnd.phase is Phase.STAGING and not rnd.batches:
                self.post(m.Ready(self.session.number, *key))
            return
        if message.terms.version < state.version:
            text = f"version {message.terms.version} is below this worker's {state.version}"
            code = Code.VERSION_BELOW_WORKER
            self._note_out(key)
            self.post(m.Reject(self.session.number, *key, code, text, state.torn))
            return
        rnd = CurrentRound(key, message.terms, message.receivers)
        if state.round is None:
            self._start(rnd)
        else:
            state.pending = rnd
            self._abort(state.round, Code.NO_ROUND, "a newer round begins")

    def _start(self, rnd: CurrentRound) -> None:
        self.state.round = rnd
        self._add(PrepareWork(rnd.key, rnd.terms, rnd.receivers))

    def _find(self, key: RoundKey) -> CurrentRound | None:
        rounds = (self.state.round, self.state.pending)
        return next((rnd for rnd in rounds if rnd is not None and rnd.key == key), None)

    def _on_deliver(self, message: m.Deliver, body: bytes | None) -> None:
        if not message.registered:
            # It carries handles: from here on its buffers count as mapped, wanted or not.
            self.state.mappings.setdefault(message.trainer, set()).update(message.buffers)
        rnd = self._find((message.group, message.call))
        if rnd is None or rnd.ending is not None:
            return
        if message.total is not None:
            rnd.total = message.total
        key = (message.rank, message.seq)
        held = rnd.batches.get(key)
        if held is None:
            rnd.batches[key] = HeldBatch(message, body)
            if rnd.phase is Phase.STAGING:
                self._add(CopyWork(rnd.key, message, body))
        elif held.state is BatchState.STAGED:
            self._post_staged(rnd, key, rnd.phase is Phase.VOTED)
        if rnd.phase is Phase.STAGING:
            self._vote_if_complete(rnd)

    def _on_total(self, key: RoundKey, total: int) -> None:
        rnd = self._find(key)
        if rnd is not None and rnd.ending is None:
            rnd.total = total
            if rnd.phase is Phase.VOTED:
                self._post_vote(rnd)
            self._vote_if_complete(rnd)

    def _complete(self, rnd: CurrentRound) -> bool:
        # The total comes with the last batches: before that, none of the others is looked at.
        return rnd.total == len(rnd.batches) and all(
            batch.state is BatchState.STAGED for batch in rnd.batches.values()
        )

    def _vote_if_complete(self, rnd: CurrentRound) -> None:
        if rnd.phase is not Phase.STAGING or not self._complete(rnd):
            return
        if rnd.covered:
            rnd.phase = Phase.VOTED
            self._post_vote(rnd)
        else:
            missing = rnd.missing or "the round brought nothing that this worker wants"
            self._reject(rnd, Code.INCOMPLETE, f"not covered: {missing}")

    def _on_commit(self, key: RoundKey) -> None:
        rnd, note = self.state.round, self.state.committed
        if rnd is not None and rnd.key == key and rnd.ending is None:
            if rnd.phase is Phase.VOTED and not rnd.decided:
                rnd.decided = True
                self._add(CommitWork(key, rnd.terms.version))
        elif note is not None and (note.group, note.call) == key:
            self._repeat_committed(note)

    def _repeat_committed(self, note: CommitNote) -> None:
        key = (note.group, note.call)
        self.post(m.Committed(self.session.number, *key, note.ok, note.text, version=note.version))

    def _on_abort(self, key: RoundKey, code: Code, text: str) -> None:
        state = self.state
        if state.pending is not None and state.pending.key == key:
            state.pending = None
        if state.round is not None and state.round.key == key:
            self._abort(state.round, code, text)
            return
        note = state.committed
        if note is None or (note.group, note.call) != key:
            self._note_out(key)
        self.post(m.Drained(self.session.number, *key, state.torn))

    def _on_torn(self, key: RoundKey, text: str) -> None:
        note = self.state.committed
        if note is not None and note.ok and (note.group, note.call) == key:
            self.state.torn = True
            if self.state.round is not None:
                self.state.round.was_torn = True
            self.effects.append(ToldTorn(note.version, text))

    # ------------------------------------------------------------ ways out

    def _hold(self, rnd: CurrentRound, code: Code, text: str) -> None:
        """The worker is out of the round, but the memory of a batch is still looked into.

        As if its copy went on: it drains, and is free for another round, when that has ended.
        """
        rnd.kept = True
        self.effects.append(Holding())
        if rnd.ending is None:
            self.queue = [work for work in self.queue if not isinstance(work, CopyWork)]
            rnd.ending = (code, text[:MAX_TEXT])
            self.state.note_left(rnd, text)
            self._reject_reading(rnd, *rnd.ending)
        self._run_abort_hook(rnd, *rnd.ending)
        rnd.hooked = False

    def _reject_reading(self, rnd: CurrentRound, code: Code, text: str) -> None:
        torn = self.state.torn
        self.post(m.Reject(self.session.number, *rnd.key, code, text, torn, reading=True))

    def _abort(self, rnd: CurrentRound, code: Code, text: str) -> None:
        """Ends the round now, or when the work at hand is done: a copy cannot be interrupted."""
        if rnd.ending is not None:
            return
        rnd.ending = (code, text)
        self.state.note_left(rnd, text)
        mine = (PrepareWork, CopyWork, CommitWork)
        self.queue = [work for work in self.queue if not isinstance(work, mine)]
        if not isinstance(self.running, mine):
            self._end(rnd)

    def _end(self, rnd: CurrentRound) -> None:
        """Nothing of the round is being read any more: says Drained, then runs the abort hook."""
        assert rnd.ending is not None
        self._note_out(rnd.key)
        self.post(m.Drained(self.session.number, *rnd.key, self.state.torn))
        self._run_abort_hook(rnd, *rnd.ending)
        self._leave()

    def _reject(self, rnd: CurrentRound, code: Code, text: str) -> None:
        self._note_out(rnd.key)
        text = text[:MAX_TEXT]
        self.state.note_left(rnd, text)
        self.queue = [work for work in self.queue if not isinstance(work, CopyWork)]
        self.post(m.Reject(self.session.number, *rnd.key, code, text, self.state.torn))
        self._run_abort_hook(rnd, code, text)
        self._leave()

    def _run_abort_hook(self, rnd: CurrentRound, code: Code, text: str) -> None:
        if rnd.hooked:
            self._add(AbortWork(rnd.key, code, text, self.state.torn))

    def _leave(self) -> None:
        """The round is over for this worker; the next may begin."""
        self.state.round = None
        pending, self.state.pending = self.state.pending, None
        if pending is not None:
            self._start(pending)

    def _note_out(self, key: RoundKey) -> None:
        if key not in self.state.out:
            self.state.out.append(key)
            del self.state.out[:-MAX_OUT]

    # ------------------------------------------------------------ offers and mappings

    def _on_offered(self, message: m.Offered) -> None:
        state = self.state
        known = {(offer.trainer, offer.number) for offer in state.offers}
        if (message.trainer, message.number) in known:
            self.post(m.Take(self.session.number, state.note))
            return
        state.offers.append(OfferNote(message.trainer, message.number, list(message.buffers)))
        self._plan()

    def _plan(self) -> None:
        if not any(isinstance(work, PlanWork) for work in self.queue):
            self._add(PlanWork())

    def _on_trainer_gone(self, trainer: str) -> None:
        offered = [offer.buffers for offer in self.state.offers if offer.trainer == trainer]
        self._drop_buffers(trainer, self.state.mappings.get(trainer, set()).union(*offered))

    def _drop_buffers(self, trainer: str, numbers: set[int]) -> None:
        state = self.state
        before = len(state.offers)
        state.offers = [
            offer
            for offer in state.offers
            if offer.trainer != trainer or not numbers.issuperset(offer.buffers)
        ]
        if len(state.offers) != before:
            living = {(offer.trainer, offer.number) for offer in state.offers}
            seen = [ref for ref in state.note.seen if (ref.trainer, ref.number) in living]
            takes = [
                Taken(t.trainer, [n for n in t.buffers if t.trainer != trainer or n not in numbers])
                for t in state.note.takes
            ]
            state.note = TakeNote(seen, takes, False, state.note.missing)
            self._plan()
        self._add(UnmapWork(trainer, sorted(numbers)))
