"""A trainer and a worker at the desk: they say messages by hand, and keep what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from tensorlease.protocol import messages as m
from tensorlease.protocol.records import (
    BatchRef,
    Code,
    CommitNote,
    Distribution,
    Fate,
    LeaseNote,
    LiveNote,
    OfferRef,
    Outcome,
    Process,
    Proof,
    ReceiverId,
    RoundRef,
    RoundResult,
    Taken,
    TakeNote,
    Tally,
    Terms,
    TrainerRound,
    WorkerRound,
)

if TYPE_CHECKING:
    from .harness import Desk

M = TypeVar("M", bound=m.FromBroker)

NOTHING_TAKEN = TakeNote([], [], False, [])
PROTOCOL = (1, 1)


class Agent:
    """What a trainer and a worker have in common.

    Attributes:
        heard: What the broker told it, but for beats; `bodies` are the bodies beside.
        session: The number of its present session.
        connected: It has a session, and has not left.
    """

    def __init__(
        self, desk: Desk, instance: str, channel: str, host: str, device: str, pid: int | None
    ) -> None:
        self.desk = desk
        self.instance = instance
        self.channel = channel
        self.host = host
        self.device = device
        self.processes = [Process(pid or 100 + int(instance[:8], 16), 7)]
        self.session = 0
        self.progress = 0
        self.connected = False
        self.heard: list[m.FromBroker] = []
        self.bodies: list[bytes | None] = []

    def on_told(self, message: m.FromBroker) -> None:
        if isinstance(message, m.BeatOk):
            self.heard.pop()
            self.bodies.pop()

    def got(self, kind: type[M]) -> list[M]:
        """Returns the messages of this kind that it was told, since it last forgot."""
        return [message for message in self.heard if isinstance(message, kind)]

    def last(self, kind: type[M]) -> M:
        """Returns the last message of this kind."""
        found = self.got(kind)
        assert found, f"{self.instance} heard no {kind.__name__}, but {self.kinds()}"
        return found[-1]

    def kinds(self) -> list[type[m.FromBroker]]:
        """Returns the kinds of what it was told, in order; Members left out."""
        return [type(message) for message in self.heard if not isinstance(message, m.Members)]

    def forget(self) -> None:
        self.heard.clear()
        self.bodies.clear()

    def say(self, message: m.FromAgent, body: bytes = b"") -> None:
        assert isinstance(self, Rank | Member)
        desk = self.desk
        desk.feed(desk.ledger.message(self.instance, message, body, desk.now), self)

    def greet(self, message: m.TrainerHello | m.WorkerHello) -> None:
        """Says this Hello, as it is."""
        assert isinstance(self, Rank | Member)
        self.desk.feed(self.desk.ledger.hello(message, self.desk.now), self)
        self.connected = True

    def gone(self, how: str = "killed") -> None:
        """All its processes are provably gone."""
        self.connected = False
        self.desk.feed(self.desk.ledger.gone(self.instance, how, self.desk.now))

    def leave(self) -> None:
        self.say(m.Bye(self.session))
        self.connected = False

    def drop(self) -> None:
        """The broker drops its session whole."""
        self.connected = False
        self.desk.feed(self.desk.ledger.session_lost(self.instance, self.desk.now))


class Opening(Struct):
    """A call as a rank remembers it: what its next Hello announces."""

    terms: Terms
    leases: dict[int, LeaseNote] = {}
    receivers: list[ReceiverId] | None = None
    total: int | None = None
    void: bool = False
    result: RoundResult | None = None


class Rank(Agent):
    """A trainer; it remembers its calls until the next one is opened."""

    def __init__(
        self,
        desk: Desk,
        instance: str,
        channel: str,
        host: str,
        device: str,
        pid: int | None,
        rank: int,
        of: int,
        group: str,
    ) -> None:
        super().__init__(desk, instance, channel, host, device, pid)
        self.rank = rank
        self.of = of
        self.group = group
        self.distribution = Distribution.COLOCATED
        self.call = 0
        self.calls: dict[int, Opening] = {}
        self.offers: dict[int, tuple[list[int], bytes]] = {}

    def hello_message(self) -> m.TrainerHello:
        """Begins a session; returns the Hello that announces all that it remembers."""
        self.session += 1
        return m.TrainerHello(
            self.session,
            PROTOCOL,
            self.instance,
            self.channel,
            self.group,
            self.rank,
            self.of,
            self.distribution,
            self.host,
            self.device,
            self.processes,
            True,
            "test",
            max((n for n, x in self.calls.items() if x.result is not None), default=0),
            [
                TrainerRound(
                    number, x.terms, x.receivers, list(x.leases.values()), x.total, x.void, x.result
                )
                for number, x in self.calls.items()
            ],
        )

    def hello(self) -> None:
        self.greet(self.hello_message())

    def returns(self) -> None:
        """Says Hello, and behind it what that cannot carry: offers and unreleased batches."""
        batches = [
            (call, opening, lease)
            for call, opening in self.calls.items()
            for lease in opening.leases.values()
            if opening.result is None and not lease.released
        ]
        self.hello()
        for number, (buffers, body) in self.offers.items():
            self.say(m.Offer(self.session, number, buffers, 8), body)
        for call, opening, lease in batches:
            total = opening.total if opening.total == lease.seq + 1 else None
            again = m.Batch(
                self.session,
                call,
                lease.seq,
                lease.buffers,
                lease.registered,
                8,
                total,
                lease.proofs,
                lease.via,
            )
            self.say(again, b"table")

    def on_told(self, message: m.FromBroker) -> None:
        super().on_told(message)
        match message:
            case m.Welcome():
                self.group = message.group
            case m.Opened() if message.call in self.calls:
                self.calls[message.call].receivers = message.receivers
            case m.Release() if message.call in self.calls:
                leases = self.calls[message.call].leases
                leases[message.seq] = replace(leases[message.seq], released=True)
            case m.Finished() if message.result.call in self.calls:
                self.calls[message.result.call].result = message.result
            case m.Voided() if message.call in self.calls:
                self.calls[message.call].void = False
            case _:
                pass

    def open(
        self,
        version: int = 1,
        *,
        call: int | None = None,
        min_replicas: int = 1,
        strict: bool = False,
        base: int | None = None,
        open_s: float = 0.0,
        verify: bool = False,
    ) -> None:
        """Opens its next call; `base`: the round is a subset against that version."""
        terms = Terms(version, min_replicas, strict, base is not None, base or 0, open_s)
        terms = replace(terms, verify=verify)
        self.call = self.call + 1 if call is None else call
        self.calls = {n: x for n, x in self.calls.items() if n >= self.call - 1}
        self.calls[self.call] = Opening(terms)
        self.say(m.Open(self.session, self.call, terms))

    def batch(
        self,
        seq: int = 0,
        *,
        total: int | None = None,
        buffers: Sequence[int] | None = None,
        registered: bool = False,
        body: bytes = b"table",
        call: int | None = None,
        proofs: Sequence[Proof] = (),
        via: Sequence[str] = (),
    ) -> None:
        """A batch of 8 bytes; a ring batch unless it is `registered`."""
        said, ways = list(proofs), list(via)
        call = self.call if call is None else call
        numbers = [seq] if buffers is None else list(buffers)
        if call in self.calls:
            opening = self.calls[call]
            known = opening.leases.get(seq)
            released = known is not None and known.released
            opening.leases[seq] = LeaseNote(seq, numbers, registered, 8, released, said, ways)
            opening.total = total if total is not None else opening.total
        message = m.Batch(self.session, call, seq, numbers, registered, 8, total, said, ways)
        self.say(message, body)

    def close(self, total: int) -> None:
        self.calls[self.call].total = total
        self.say(m.Close(self.session, self.call, total))

    def publish(self, version: int = 1, batches: int = 1, *, min_replicas: int = 1) -> None:
        """Open and all batches at once, as a steady round travels."""
        self.open(version, min_replicas=min_replicas)
        for seq in range(batches):
            self.batch(seq, total=batches if seq == batches - 1 else None)

    def void(self, call: int | None = None) -> None:
        call = self.call if call is None else call
        if call in self.calls:
            self.calls[call].void = True
        self.say(m.Void(self.session, call))

    def offer(self, *buffers: int, number: int = 0, body: bytes = b"offer") -> None:
        self.offers[number] = (list(buffers), body)
        self.say(m.Offer(self.session, number, list(buffers), 8), body)

    def retire(self, *buffers: int) -> None:
        self.say(m.Retire(self.session, list(buffers)))

    def released(self) -> list[int]:
        """Returns the batches of its present call that came back."""
        return [release.seq for release in self.got(m.Release) if release.call == self.call]

    def result(self) -> RoundResult:
        """Returns the result that it was told last."""
        return self.last(m.Finished).result

    def outcome(self) -> Outcome:
        return self.result().outcome

    def fate(self, member: Member) -> Fate:
        """Returns the fate of this receiver in the last result."""
        return next(r.fate for r in self.result().receivers if r.instance == member.instance)

    def finished(self) -> bool:
        return bool(self.got(m.Finished))


class Member(Agent):
    """A worker; it speaks of the round that it was last asked to prepare, unless told else."""

    def __init__(
        self,
        desk: Desk,
        instance: str,
        channel: str,
        host: str,
        device: str,
        pid: int | None,
        replica: str,
        member: int,
        of: int,
    ) -> None:
        super().__init__(desk, instance, channel, host, device, pid)
        self.replica = replica
        self.member = member
        self.of = of
        self.version = 0
        self.torn = False
        self.committed: CommitNote | None = None
        self.note = NOTHING_TAKEN
        self.prepare: m.Prepare | None = None
        # Of a relay: who reads for it.
        self.readers: list[Process] | None = None

    @property
    def id(self) -> ReceiverId:
        return ReceiverId(self.instance, self.replica, self.member, self.processes, self.readers)

    def hello_message(
        self,
        *,
        round: WorkerRound | None = None,
        out: Sequence[tuple[str, int]] = (),
        mappings: Sequence[Taken] = (),
    ) -> m.WorkerHello:
        """Begins a session; returns a Hello that announces its version and this."""
        self.session += 1
        return m.WorkerHello(
            self.session,
            PROTOCOL,
            self.instance,
            self.channel,
            self.replica,
            self.member,
            self.of,
            self.host,
            self.device,
            self.processes,
            True,
            "test",
            self.version,
            self.torn,
            self.committed,
            round,
            [RoundRef(*key) for key in out],
            list(mappings),
            self.note,
            readers=self.readers,
        )

    def note_of(self) -> LiveNote:
        """Returns what its live file says, if it is a relay."""
        pid, readers = self.processes[0].pid, self.readers
        assert readers is not None
        return LiveNote(self.channel, self.replica, self.member, pid, readers)

    def readers_gone(self, how: str = "ended") -> None:
        """All that read for it are provably gone."""
        self.desk.feed(self.desk.ledger.readers_gone(self.instance, how, self.desk.now))

    def unread(self, *others: Member) -> None:
        """Says that nothing reads for these any more."""
        self.say(m.Unread(self.session, [other.instance for other in others]))

    def orphans(self) -> list[str]:
        """Returns the instances of which it was told last that they may be read for."""
        return [orphan.instance for orphan in self.last(m.Orphans).orphans]

    def hello(
        self,
        *,
        round: WorkerRound | None = None,
        out: Sequence[tuple[str, int]] = (),
        mappings: Sequence[Taken] = (),
    ) -> None:
        self.greet(self.hello_message(round=round, out=out, mappings=mappings))

    def inside(
        self,
        *staged: tuple[int, int],
        voted: bool = False,
        proofs: Sequence[Proof] = (),
        tally: Tally | None = None,
    ) -> WorkerRound:
        """Returns the round that it was last asked to prepare, as its Hello announces it."""
        asked = self.prepare
        assert asked is not None
        done = [BatchRef(*key, list(proofs)) for key in staged]
        terms, receivers = asked.terms, asked.receivers
        return WorkerRound(asked.group, asked.call, terms, receivers, done, [], voted, False, tally)

    def on_told(self, message: m.FromBroker) -> None:
        super().on_told(message)
        if isinstance(message, m.Prepare):
            self.prepare = message

    @property
    def key(self) -> tuple[str, int]:
        """The round that it was last asked to prepare."""
        assert self.prepare is not None, f"{self.instance} was asked to prepare nothing"
        return self.prepare.group, self.prepare.call

    def readies(self) -> None:
        self.say(m.Ready(self.session, *self.key))

    def stages(
        self,
        *seqs: int,
        rank: int = 0,
        vote: bool = False,
        key: tuple[str, int] | None = None,
        proofs: Sequence[Proof] = (),
        tally: Tally | None = None,
    ) -> None:
        """Says Staged of these batches; with the last of them its vote."""
        for seq in seqs:
            last = vote and seq == seqs[-1]
            key = key or self.key
            said = tally if last else None
            self.say(m.Staged(self.session, *key, rank, seq, last, list(proofs), said))

    def votes(self, tally: Tally | None = None) -> None:
        self.say(m.Vote(self.session, *self.key, tally))

    def ran_commit(self, *, ok: bool = True, text: str = "") -> m.Committed:
        """Its commit hook has run; it remembers that for its next Hello, and returns the answer."""
        asked = self.prepare
        assert asked is not None
        version = asked.terms.version
        self.committed = CommitNote(*self.key, version, ok, text, asked.receivers)
        if ok:
            self.version, self.torn = version, False
        else:
            self.torn = True
        return m.Committed(self.session, *self.key, ok, text, 10, 20, 30)

    def commits(self, *, ok: bool = True, text: str = "") -> None:
        self.say(self.ran_commit(ok=ok, text=text))

    def rejects(
        self,
        code: Code = Code.COPY_FAILED,
        text: str = "broken",
        *,
        torn: bool = False,
        reading: bool = False,
    ) -> None:
        self.say(m.Reject(self.session, *self.key, code, text, torn, reading))

    def drains(self, *, torn: bool = False, key: tuple[str, int] | None = None) -> None:
        self.say(m.Drained(self.session, *(key or self.key), torn))

    def takes(self, trainer: Rank, *buffers: int, complete: bool = True, number: int = 0) -> None:
        """Answers this trainer's offer, beside what it takes of others."""
        seen = [ref for ref in self.note.seen if ref.trainer != trainer.instance]
        takes = [taken for taken in self.note.takes if taken.trainer != trainer.instance]
        self.note = TakeNote(
            [*seen, OfferRef(trainer.instance, number)],
            [*takes, Taken(trainer.instance, list(buffers))],
            complete,
            [] if complete else ["layers.0.weight"],
        )
        self.say(m.Take(self.session, self.note))

    def unmaps(self, trainer: Rank, *buffers: int) -> None:
        self.say(m.Unmapped(self.session, trainer.instance, list(buffers)))

    def serves(self, seqs: Sequence[int] = (0,), *, rank: int = 0) -> None:
        """Stages these batches, votes and commits: all that a round asks of it."""
        self.stages(*seqs, rank=rank, vote=True)
        self.commits()
