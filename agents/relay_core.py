"""A relay's half of the rules: others read for it, also when it has ended, or those before it had.

The broker keeps what such a one held, and tells the next relay of its replica. That one asks those
who read, in between two rounds of its own, and says so when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..protocol import messages as m
from ..protocol.records import LiveNote, Orphan, Process
from .core import Identity
from .work import UnreadWork
from .worker_core import WorkerCore


class RelayCore(WorkerCore):
    """The state machine of one worker for which other processes read.

    Args:
        me, replica, member, size: See `WorkerCore`.
        readers: The processes that read for it; none: they cannot be named.
        asks: Whether it finds out what is read for the relays before it; one member of a replica
            is enough.
    """

    def __init__(
        self,
        me: Identity,
        replica: str,
        member: int,
        size: int,
        *,
        readers: Sequence[Process] = (),
        asks: bool = True,
    ) -> None:
        super().__init__(me, replica, member, size)
        self.readers = list(readers)
        self._asks = asks

    @property
    def live_note(self) -> bytes:
        me = self.me
        pid = me.processes[0].pid
        note = LiveNote(me.channel, self.replica, self.member, pid, self.readers)
        return msgspec.msgpack.encode(note)

    def hello(self) -> m.WorkerHello:
        return msgspec.structs.replace(super().hello(), readers=self.readers)

    def on_message(self, message: m.FromBroker, body: bytes | None) -> None:
        if isinstance(message, m.Orphans):
            self.state.orphans = message.orphans if self._asks else []
            self.queue = [work for work in self.queue if not isinstance(work, UnreadWork)]
            self._ask()
        else:
            super().on_message(message, body)

    def wants(self, orphans: list[Orphan]) -> bool:
        """Whether one of these still matters: the broker may have found out by itself."""
        return any(orphan in self.state.orphans for orphan in orphans)

    def found_out(self, unread: bool) -> None:
        """The work of finding out has ended; `unread`: nothing reads for these any more.

        Else it was given up, until the broker asks again.
        """
        work = self._finish_work(UnreadWork)
        assert isinstance(work, UnreadWork)
        self.state.orphans = [x for x in self.state.orphans if x not in work.orphans]
        if unread:
            instances = [orphan.instance for orphan in work.orphans]
            self.post(m.Unread(self.session.number, instances))
        self._ask()

    def _leave(self) -> None:
        super()._leave()
        self._ask()

    def _ask(self) -> None:
        """Asks in between two rounds: what ends another's update would end its own, too."""
        state = self.state
        at_it = any(isinstance(work, UnreadWork) for work in (self.running, *self.queue))
        if state.orphans and not at_it and state.round is None:
            self._add(UnreadWork(state.orphans))
