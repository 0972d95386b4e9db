"""The ledger: who holds what, until when. Events and the time go in, effects come out.

    ledger = Ledger(epoch, settings, now=now)
    effects = ledger.hello(message, now)
    effects = ledger.message(instance, message, body, now)
    effects = ledger.gone(instance, "process ended", now)
    effects = ledger.tick(now)            # no later than ledger.next_check

It does no I/O and looks at no clock. `validate` cross-checks every reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...protocol import messages as m
from ...protocol.records import Code, LiveNote
from . import admission, deadlines, members, offers, relays, rounds
from .book import Book
from .effects import Effect
from .state import NOBODY, Peer, RoundState, Settings, State
from .validate import validate


class Ledger:
    """The broker's ledger.

    Args:
        epoch: The random id of this run of the broker, 16 hexadecimal digits.
        settings: Durations and limits.
        now: Monotonic seconds.
        expected: Instances that must announce themselves, or be told `gone`, before anything is
            decided, admitted or released: those that are known to live (their locks are held), and
            those whose death is yet to be settled (their locks are free).
        recover: Listen for announcements until the recovery deadline even if none is expected
            (agents without locks may be there).
        relays_noted: What relays have left in their live files, by instance.
    """

    def __init__(
        self,
        epoch: str,
        settings: Settings,
        *,
        now: float,
        expected: Collection[str] = (),
        recover: bool = False,
        relays_noted: Mapping[str, LiveNote] | None = None,
    ) -> None:
        state = State(epoch, settings)
        if expected or recover:
            state.recovering_until = now + settings.durations.recovery_s
            # Agents that cannot be known by name: only the deadline ends the window.
            state.expected = set(expected) | ({NOBODY} if recover else set())
        state.relays = {name: relays.noted(note) for name, note in (relays_noted or {}).items()}
        state.next_check = now
        self.book = Book(state)

    @property
    def state(self) -> State:
        return self.book.state

    @property
    def next_check(self) -> float:
        """When `tick` must be called at the latest, in monotonic seconds."""
        return self.state.next_check

    def hello(self, message: m.TrainerHello | m.WorkerHello, now: float) -> list[Effect]:
        """An agent opens a session, or a new one. The shell has verified its processes."""
        self._begin(now)
        members.on_hello(self.book, message)
        return self._end()

    def message(self, instance: str, message: m.FromAgent, body: bytes, now: float) -> list[Effect]:
        """A message over the session of `instance`; one of an older session is dropped."""
        self._begin(now)
        peer = self.state.peers.get(instance)
        if peer is not None and getattr(message, "session", 0) == peer.session:
            members.heard(self.book, peer)
            self._dispatch(peer, message, body)
        return self._end()

    def _dispatch(self, peer: Peer, message: m.FromAgent, body: bytes) -> None:
        book = self.book
        if isinstance(message, m.Beat):
            members.on_beat(book, peer, message)
        elif isinstance(message, m.Bye):
            members.on_bye(book, peer)
        elif peer.worker is not None:
            if not self._from_worker(peer, message):
                self._misplaced(peer, message)
        elif not self._from_trainer(peer, message, body):
            self._misplaced(peer, message)

    def _from_worker(self, peer: Peer, message: m.FromAgent) -> bool:
        book = self.book
        match message:
            case m.Staged():
                rounds.on_staged(book, peer, message)
            case m.Committed():
                rounds.on_committed(book, peer, message)
            case m.Vote():
                rounds.on_vote(book, peer, message)
            case m.Ready():
                rounds.on_ready(book, peer, message)
            case m.Reject():
                rounds.on_reject(book, peer, message)
            case m.Drained():
                rounds.on_drained(book, peer, message)
            case m.Take():
                offers.on_take(book, peer, message)
            case m.Unmapped():
                offers.on_unmapped(book, peer, message)
            case m.Unread():
                relays.on_unread(book, peer, message)
            case _:
                return False
        return True

    def _from_trainer(self, peer: Peer, message: m.FromAgent, body: bytes) -> bool:
        book = self.book
        match message:
            case m.Batch():
                rounds.on_batch(book, peer, message, body)
            case m.Open():
                rounds.on_open(book, peer, message)
            case m.Close():
                rounds.on_close(book, peer, message)
            case m.Void():
                rounds.on_void(book, peer, message)
            case m.Offer():
                offers.on_offer(book, peer, message, body)
            case m.Retire():
                offers.on_retire(book, peer, message)
            case _:
                return False
        return True

    def _misplaced(self, peer: Peer, message: m.FromAgent) -> None:
        kind = "trainer" if peer.trainer is not None else "worker"
        text = f"{type(message).__name__} is nothing that a {kind} sends"
        self.book.end_session(peer, Code.BAD_MESSAGE, text)

    def session_lost(self, instance: str, now: float) -> list[Effect]:
        """The shell dropped the session whole (overflow, unreachable)."""
        self._begin(now)
        members.on_session_lost(self.book, instance)
        return self._end()

    def gone(self, instance: str, how: str, now: float) -> list[Effect]:
        """All processes of this agent are provably gone; others may read for it, if it is a relay."""
        self._begin(now)
        members.on_gone(self.book, instance, how)
        return self._end()

    def readers_gone(self, instance: str, how: str, now: float) -> list[Effect]:
        """All processes that read for this relay, which had ended before, are provably gone."""
        self._begin(now)
        relays.on_readers_gone(self.book, instance, how)
        return self._end()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: ends phases and looks for silence."""
        self._begin(now)
        deadlines.check(self.book)
        return self._end()

    def stop(self, now: float) -> list[Effect]:
        """Admits nothing from here on, until `resume`; rounds under way go on."""
        self._begin(now)
        self.state.stopping = True
        return self._end()

    def resume(self, now: float) -> list[Effect]:
        """Admits rounds again, those that have waited first."""
        self._begin(now)
        self.state.stopping = False
        self.book.kick = True
        return self._end()

    def busy(self) -> bool:
        """Whether a round is under way."""
        return any(
            rnd.state in (RoundState.STAGING, RoundState.COMMITTING) for rnd in self.book.rounds()
        )

    def validate(self) -> None:
        """Raises AssertionError if any reference or counter is wrong."""
        validate(self.state)

    def _begin(self, now: float) -> None:
        self.book.now = now
        self.book.effects = []

    def _end(self) -> list[Effect]:
        book = self.book
        while book.kick:
            book.kick = False
            admission.try_admit(book)
        for channel in self.state.channels.values():
            if channel.members_changed:
                members.tell_members(book, channel)
        return book.effects
