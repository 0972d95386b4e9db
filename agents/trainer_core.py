"""The trainer's half of the rules, as a pure state machine.

It mints the identity of rounds and leases, remembers everything that the broker has not closed,
announces it at each Hello, and says when memory may be written again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from ..protocol import messages as m
from ..protocol.errors import RefusedError
from ..protocol.records import (
    Code,
    Distribution,
    Fate,
    Holder,
    LeaseNote,
    Proof,
    Receivers,
    ReplicaResult,
    ReplicaState,
    RoundResult,
    Terms,
    TrainerRound,
)
from .core import PROTOCOLS, Core, Effect, Identity


class RoundOpened(Effect, frozen=True):
    """The receivers are fixed."""

    call: int
    receivers: Receivers


class Released(Effect, frozen=True):
    """Nobody reads this batch any more."""

    call: int
    seq: int


class LeaseStuck(Effect, frozen=True):
    """These silent but living receivers keep the lease."""

    call: int
    seq: int
    holders: list[Holder]


class RoundFinished(Effect, frozen=True):
    call: int
    result: RoundResult


class RoundRefused(Effect, frozen=True):
    """The broker did not open the round; none of its batches went anywhere."""

    call: int
    code: Code
    text: str


class RoundVoided(Effect, frozen=True):
    """The round's memory may be written: it can no longer commit, or was decided before."""

    call: int
    decided: bool


class BuffersRetired(Effect, frozen=True):
    buffers: list[int]


class RetireDenied(Effect, frozen=True):
    buffers: list[int]
    text: str


class MembersChanged(Effect, frozen=True):
    """The broker has told of the replicas; `known`: by then it had all offers of this trainer."""

    replicas: list[ReplicaState]
    known: bool = True


class TrainerLease(Struct):
    """A batch of this rank, and whether its bytes are still promised to somebody."""

    seq: int
    buffers: list[int]
    registered: bool
    nbytes: int
    body: bytes | None
    # Digests of its buffers, in a verified round.
    proofs: list[Proof]
    released: bool = False
    # The broker said so, and does not count it in the window; it says so again after each Hello.
    stuck: bool = False
    # How its bytes travel.
    via: list[str] = field(default_factory=list)


class Call(Struct):
    """A round as this rank knows it."""

    call: int
    terms: Terms
    leases: dict[int, TrainerLease] = field(default_factory=dict)
    # Those that are not released; a ring round may have thousands that are.
    held: dict[int, TrainerLease] = field(default_factory=dict)
    # Fixed at admission; None: not heard of yet.
    receivers: Receivers | None = None
    # The manifest, once closed.
    total: int | None = None
    # Void was asked for; and answered, or the broker is provably gone.
    void: bool = False
    voided: bool = False
    result: RoundResult | None = None
    refused: bool = False

    @property
    def ended(self) -> bool:
        return self.result is not None or self.refused

    @property
    def released(self) -> bool:
        return not self.held

    @property
    def outstanding(self) -> int:
        """Batches that count in the window."""
        return sum(not lease.stuck for lease in self.held.values())

    @property
    def complete(self) -> bool:
        """Whether no batch follows."""
        return self.total is not None or self.ended

    @property
    def forgettable(self) -> bool:
        """An ended round matters while one of its leases does.

        Voided registered memory may be written at once; a ring slot waits for its readers.
        """
        held = self.held.values()
        return self.ended and all(self.voided and lease.registered for lease in held)


class OfferNote(Struct):
    number: int
    buffers: list[int]
    nbytes: int
    body: bytes
    via: list[str]


class TrainerState(Struct):
    """All that a trainer's core remembers."""

    group: str
    # The highest call that has ended, as far as this rank knows.
    last_call: int = 0
    last_version: int = 0
    calls: dict[int, Call] = field(default_factory=dict)
    offers: dict[int, OfferNote] = field(default_factory=dict)
    retiring: set[int] = field(default_factory=set)
    # Buffers that nobody has mapped any more, of offers that are not wholly retired.
    retired: set[int] = field(default_factory=set)
    # Batches that may be unreleased at a time, stuck ones not counted; 0: no broker said yet.
    window: int = 0
    replicas: list[ReplicaState] = field(default_factory=list)
    # Batches of a refused round are refused one by one; its call may be opened again before that is
    # heard. How many such answers are yet to come, by call, in this session.
    echoes: dict[int, int] = field(default_factory=dict)


class TrainerCore(Core):
    """The state machine of one trainer rank.

    Args:
        me: The agent's identity.
        rank: Its place among the trainers of the channel.
        world_size: How many there are.
        group: The random id that all ranks of a run share; empty: the broker names it.
        distribution: Which trainers' batches a worker takes.
    """

    REPEATED = (m.Bye, m.Offer, m.Batch, m.Retire)

    def __init__(
        self,
        me: Identity,
        rank: int,
        world_size: int,
        group: str,
        distribution: Distribution,
    ) -> None:
        super().__init__(me)
        self.rank = rank
        self.world_size = world_size
        self.distribution = distribution
        self.state = TrainerState(group)
        # How the bytes of each buffer travel; those of which it is not said are not in it.
        self.via: dict[int, str] = {}
        self._last_via: tuple[list[int], list[str]] = ([], [])

    # ------------------------------------------------------------ sessions

    def hello(self) -> m.TrainerHello:
        """Begins a new session; returns its first message, which announces all that is open."""
        state = self.state
        me = self.me
        state.echoes.clear()
        return m.TrainerHello(
            self.begin_session(),
            PROTOCOLS,
            me.instance,
            me.channel,
            state.group,
            self.rank,
            self.world_size,
            self.distribution,
            me.host,
            me.device,
            me.processes,
            me.locked,
            me.software,
            state.last_call,
            [self._announce(call) for call in state.calls.values() if not call.refused],
            state.last_version,
            me.job,
        )

    def _announce(self, call: Call) -> TrainerRound:
        for lease in call.leases.values():
            lease.stuck = False
        notes = [
            LeaseNote(x.seq, x.buffers, x.registered, x.nbytes, x.released, x.proofs, x.via)
            for x in call.leases.values()
        ]
        void = call.void and not call.voided
        return TrainerRound(
            call.call, call.terms, call.receivers, notes, call.total, void, call.result
        )

    def on_welcome(self, message: m.Welcome) -> None:
        """Repeats what a Hello cannot carry: the bodies of offers and batches, and requests."""
        state = self.state
        state.group = message.group
        state.window = message.window
        state.last_version = max(state.last_version, message.last_version)
        if not any(not call.ended for call in state.calls.values()):
            state.last_call = max(state.last_call, message.last_call)
        if self.session.leaving:
            return  # Its goodbye comes next.
        for offer in state.offers.values():
            self._post_offer(offer)
        for call in state.calls.values():
            if not call.ended:
                for lease in call.leases.values():
                    if not lease.released:
                        self._post_batch(call, lease)
        if state.retiring:
            self.post(m.Retire(self.session.number, sorted(state.retiring)))

    # ------------------------------------------------------------ what the application asks

    def next_call(self) -> int:
        """The broker does not count a call that it refused."""
        opened = [number for number, call in self.state.calls.items() if not call.refused]
        return max([self.state.last_call, *opened]) + 1

    def check_open(self, terms: Terms) -> None:
        """Raises what `open` would raise."""
        for call in self.state.calls.values():
            if not call.ended:
                text = (
                    f"call {call.call} (version {call.terms.version}) is still under way; "
                    "wait for its end, or void it"
                )
                raise RefusedError(text, Code.BUSY.value)
        if terms.version < self.state.last_version:
            text = (
                f"version {terms.version} is below {self.state.last_version}, the channel's last; "
                f"publish {self.state.last_version + 1} or higher"
            )
            raise RefusedError(text, Code.VERSION_NOT_RISING.value)

    def open(self, terms: Terms) -> int:
        """Opens the next round and returns its call.

        Raises:
            RefusedError: an earlier round has not ended, or the version does not rise.
        """
        self.check_open(terms)
        number = self.next_call()
        self._forget_ended()
        self.state.calls[number] = Call(number, terms)
        self.post(m.Open(self.session.number, number, terms))
        return number

    def _forget_ended(self) -> None:
        for number, call in list(self.state.calls.items()):
            if call.forgettable:
                del self.state.calls[number]

    def batch(
        self,
        call: int,
        buffers: list[int],
        *,
        registered: bool,
        nbytes: int,
        body: bytes | None = None,
        last: bool = False,
        proofs: Iterable[Proof] = (),
    ) -> int:
        """Hands out a batch; its bytes stay put until `Released`. Returns its number.

        `proofs`: in a verified round, the digests of its buffers.

        Raises:
            RefusedError: the round has ended or is closed, or the window is full.
        """
        entry = self._open_call(call)
        window = self.state.window
        if self.window_full(call):
            text = (
                f"{entry.outstanding} batches of call {call} are unreleased; the window is {window}"
            )
            raise RefusedError(text, Code.WINDOW.value)
        seq = len(entry.leases)
        lease = TrainerLease(
            seq, buffers, registered, nbytes, body, list(proofs), via=self._via_of(buffers)
        )
        entry.leases[seq] = entry.held[seq] = lease
        if last:
            entry.total = seq + 1
        self._post_batch(entry, lease)
        return seq

    def window_full(self, call: int) -> bool:
        """Whether `batch` would be refused for the number of unreleased ones."""
        entry, window = self.state.calls.get(call), self.state.window
        return entry is not None and 0 < window <= entry.outstanding

    def close(self, call: int) -> None:
        """Says that no batch follows; `batch(last=True)` says it without a message of its own."""
        entry = self._open_call(call)
        entry.total = len(entry.leases)
        self.post(m.Close(self.session.number, call, entry.total))

    def _open_call(self, call: int) -> Call:
        entry = self.state.calls.get(call)
        if entry is None or entry.ended or entry.total is not None:
            has = "was closed" if entry is not None and not entry.ended else "has ended"
            text = (
                f"call {call} is not open: it {has}, so that no batch can follow; open a new round"
            )
            raise RefusedError(text, Code.NO_ROUND.value)
        return entry

    def void(self, call: int) -> None:
        """Asks for the licence to write before the release; answered by `RoundVoided`."""
        entry = self.state.calls.get(call)
        if entry is None or entry.voided or entry.refused:
            self.effects.append(RoundVoided(call, False))
            return
        entry.void = True
        self.post(m.Void(self.session.number, call))

    def broker_gone(self) -> None:
        """The broker is provably gone: what was asked to be void can no longer commit by it.

        The next Hello announces the void rounds, so no successor lets one of them commit.
        """
        for entry in self.state.calls.values():
            if entry.void and not entry.voided:
                self.effects.append(RoundVoided(entry.call, False))

    def offer(self, number: int, buffers: list[int], nbytes: int, body: bytes) -> None:
        """Offers registered buffers to all workers of the channel, now and later."""
        via = self._via_of(buffers)
        offer = self.state.offers[number] = OfferNote(number, buffers, nbytes, body, via)
        self._post_offer(offer)

    def retire(self, buffers: list[int]) -> None:
        """Takes buffers back; answered by `BuffersRetired` when nobody has them mapped."""
        self.state.retiring |= set(buffers)
        self.post(m.Retire(self.session.number, sorted(buffers)))

    def may_write(self, buffer: int) -> bool:
        """Whether this buffer's bytes are promised to nobody."""
        return not any(
            buffer in lease.buffers
            for call in self.state.calls.values()
            if not call.voided
            for lease in call.held.values()
        )

    def leased(self, buffers: Collection[int]) -> list[Call]:
        """Returns the rounds by which bytes of these buffers are promised to somebody."""
        wanted = set(buffers)
        return [
            call
            for call in self.state.calls.values()
            if not call.voided
            and any(
                not lease.released and not wanted.isdisjoint(lease.buffers)
                for lease in call.leases.values()
            )
        ]

    def _post_offer(self, offer: OfferNote) -> None:
        message = m.Offer(self.session.number, offer.number, offer.buffers, offer.nbytes, offer.via)
        self.post(message, offer.body)

    def _post_batch(self, call: Call, lease: TrainerLease) -> None:
        total = call.total if call.total == lease.seq + 1 else None
        message = m.Batch(
            self.session.number,
            call.call,
            lease.seq,
            lease.buffers,
            lease.registered,
            lease.nbytes,
            total,
            lease.proofs,
            lease.via,
        )
        self.post(message, lease.body)

    def _via_of(self, buffers: list[int]) -> list[str]:
        """Returns how the bytes of these travel; at once where they are the same list again."""
        if self._last_via[0] is not buffers:
            ways = {self.via[number] for number in buffers if number in self.via}
            self._last_via = buffers, sorted(ways)
        return self._last_via[1]

    # ------------------------------------------------------------ what the broker says

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        match message:
            case m.Release():
                self._on_release(message)
            case m.Finished():
                self._on_finished(message.result)
            case m.Opened():
                entry = self.state.calls.get(message.call)
                self.state.echoes.pop(message.call, None)
                if entry is not None and entry.receivers is None:
                    entry.receivers = message.receivers
                    self.effects.append(RoundOpened(message.call, message.receivers))
            case m.OpenRefused():
                self._on_refused(message)
            case m.Voided():
                entry = self.state.calls.get(message.call)
                if entry is not None and entry.void and not entry.voided:
                    entry.voided = True
                    self.effects.append(RoundVoided(message.call, message.decided))
            case m.Stuck():
                entry = self.state.calls.get(message.call)
                lease = None if entry is None else entry.leases.get(message.seq)
                if lease is not None:
                    lease.stuck = True
                self.effects.append(LeaseStuck(message.call, message.seq, message.holders))
            case m.Members():
                self.state.replicas = message.replicas
                known = max(self._staying_offers(), default=-1) < message.offers
                self.effects.append(MembersChanged(message.replicas, known))
            case m.Retired():
                self._on_retired(message.buffers)
            case m.RetireRefused():
                self.state.retiring.difference_update(message.buffers)
                self.effects.append(RetireDenied(message.buffers, message.text))
            case _:
                pass

    def _staying_offers(self) -> list[int]:
        """Offers that were not asked back: the broker may have forgotten the others by now."""
        leaving = self.state.retiring | self.state.retired
        return [
            n for n, offer in self.state.offers.items() if not leaving.issuperset(offer.buffers)
        ]

    def _on_retired(self, buffers: list[int]) -> None:
        state = self.state
        state.retiring.difference_update(buffers)
        state.retired.update(buffers)
        for number, offer in list(state.offers.items()):
            if state.retired.issuperset(offer.buffers):
                del state.offers[number]
                state.retired.difference_update(offer.buffers)
        self.effects.append(BuffersRetired(buffers))

    def _on_release(self, message: m.Release) -> None:
        entry = self.state.calls.get(message.call)
        lease = None if entry is None else entry.leases.get(message.seq)
        if entry is not None and lease is not None and not lease.released:
            lease.released = True
            lease.body = None
            del entry.held[message.seq]
            self.effects.append(Released(message.call, message.seq))

    def _on_finished(self, result: RoundResult) -> None:
        if result.group != self.state.group:
            return
        self.state.last_call = max(self.state.last_call, result.call)
        if any(replica.current == result.version for replica in result.replicas):
            self.state.last_version = max(self.state.last_version, result.version)
        entry = self.state.calls.get(result.call)
        if entry is not None and entry.result is None:
            entry.result = result
            self._note_replicas(result)
            for lease in entry.leases.values():
                lease.body = None
            self.effects.append(RoundFinished(result.call, result))

    def _note_replicas(self, result: RoundResult) -> None:
        """The broker tells of replicas when they come and go, not of each version they reach."""
        told = {replica.replica: replica for replica in result.replicas}
        self.state.replicas = [
            _renewed(known, told[known.replica]) if known.replica in told else known
            for known in self.state.replicas
        ]

    def _on_refused(self, message: m.OpenRefused) -> None:
        self.state.last_call = max(self.state.last_call, message.last_call)
        self.state.last_version = max(self.state.last_version, message.last_version)
        entry = self.state.calls.get(message.call)
        echoes = self.state.echoes.get(message.call, 0)
        if message.code is Code.NO_ROUND and echoes:
            self.state.echoes[message.call] = echoes - 1
            return
        if entry is None or entry.refused or entry.receivers is not None:
            return
        self.state.echoes[message.call] = len(entry.held) - (message.code is Code.NO_ROUND)
        # It was never admitted: none of its batches went anywhere, also if its result is known.
        entry.refused = entry.result is None
        for lease in entry.leases.values():
            if not lease.released and not entry.refused:
                self.effects.append(Released(message.call, lease.seq))
            lease.released = True
            lease.body = None
        entry.held.clear()
        if entry.refused:
            self.effects.append(RoundRefused(message.call, message.code, message.text))


def _renewed(known: ReplicaState, told: ReplicaResult) -> ReplicaState:
    torn = told.fate is Fate.TORN or (known.torn and told.current == 0)
    return replace(known, current=told.current, torn=torn)
