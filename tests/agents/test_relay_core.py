"""A relay finds out what is read for those before it in between two rounds, and says it once."""

from __future__ import annotations

import msgspec

from tensorlease.agents.relay_core import RelayCore
from tensorlease.agents.work import CopyWork, PrepareWork, UnreadWork
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, LiveNote, Orphan, Process

from .cores import EPOCH, GROUP, IDENTITY, ME, effects, posts, welcome
from .worker_rounds import deliver, prepare, take

READERS = [Process(71, 9)]
FIRST, SECOND = (Orphan(name * 16, READERS) for name in "ef")


def make(*, asks: bool = True) -> RelayCore:
    """Returns a core that has joined."""
    core = RelayCore(IDENTITY, "a", 0, 1, readers=READERS, asks=asks)
    core.hello()
    welcome(core)
    effects(core)
    return core


def tell(core: RelayCore, *orphans: Orphan) -> None:
    core.receive(m.Orphans(EPOCH, ME, list(orphans)))


def test_its_hello_and_its_live_file_say_who_reads_for_it() -> None:
    core = make()
    assert core.hello().readers == READERS
    note = msgspec.msgpack.decode(core.live_note, type=LiveNote)
    assert note == LiveNote("policy", "a", 0, 100, READERS)


def test_what_it_finds_out_is_said_and_asked_no_more() -> None:
    core = make()
    tell(core, FIRST, SECOND)
    assert take(core, UnreadWork) == UnreadWork([FIRST, SECOND])
    assert core.wants([FIRST])
    core.found_out(True)
    assert posts(core) == [m.Unread(1, [FIRST.instance, SECOND.instance])]
    assert core.next_work() is None


def test_a_member_that_leaves_it_to_another_asks_nothing() -> None:
    core = make(asks=False)
    tell(core, FIRST)
    assert core.next_work() is None


def test_it_asks_nobody_in_the_midst_of_a_round_of_its_own() -> None:
    core = make()
    prepare(core)
    take(core, PrepareWork)
    core.prepared(True)
    deliver(core, 0)
    take(core, CopyWork)
    tell(core, FIRST)
    core.copied(True, covered=True)
    assert core.next_work() is None
    core.receive(m.Abort(EPOCH, ME, GROUP, 1, Code.VOID, "void"))
    core.next_work()
    core.aborted()
    assert take(core, UnreadWork) == UnreadWork([FIRST])


def test_it_asks_before_a_round_that_comes_later() -> None:
    core = make()
    tell(core, FIRST)
    prepare(core)
    take(core, UnreadWork)
    core.found_out(True)
    take(core, PrepareWork)


def test_what_the_broker_has_found_out_meanwhile_matters_no_more() -> None:
    core = make()
    tell(core, FIRST)
    take(core, UnreadWork)
    tell(core)
    assert not core.wants([FIRST])
    core.found_out(False)
    assert posts(core) == []
    assert core.next_work() is None


def test_one_that_dies_while_it_asks_for_another_is_asked_for_next() -> None:
    core = make()
    tell(core, FIRST)
    take(core, UnreadWork)
    tell(core, FIRST, SECOND)
    core.found_out(True)
    assert take(core, UnreadWork) == UnreadWork([SECOND])


def test_what_was_given_up_is_asked_again_when_the_broker_says_so() -> None:
    core = make()
    tell(core, FIRST)
    take(core, UnreadWork)
    core.found_out(False)
    assert core.next_work() is None
    core.hello()
    welcome(core)
    tell(core, FIRST)
    assert take(core, UnreadWork) == UnreadWork([FIRST])
