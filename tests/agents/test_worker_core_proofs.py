"""A worker's core keeps what it said with Staged and Vote: whatever repeats them says it again."""

from __future__ import annotations

from tensorlease.agents.repeats import EVERY_BEATS
from tensorlease.agents.work import CopyWork
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import BatchRef, Proof, Tally, WorkerRound

from .cores import posts
from .worker_rounds import KEY, deliver, staging, take, total

PROOFS = [Proof(3, b"8 bytes.")]
TALLY = Tally(99, 1, ["extra"])
STAGED = m.Staged(1, *KEY, 0, 0, False, PROOFS)
VOTE = m.Vote(1, *KEY, TALLY)


def test_a_staged_carries_its_proofs_and_a_vote_the_tally() -> None:
    core = staging()
    deliver(core, 0)
    deliver(core, 1)
    total(core, 2)
    for covered in (False, True):
        take(core, CopyWork)
        core.copied(True, covered=covered, proofs=PROOFS, tally=TALLY)
    assert posts(core)[-2:] == [STAGED, m.Staged(1, *KEY, 0, 1, True, PROOFS, TALLY)]


def test_a_vote_on_its_own_carries_the_tally_of_the_last_batch() -> None:
    core = staging()
    deliver(core, 0)
    take(core, CopyWork)
    core.copied(True, covered=True, proofs=PROOFS, tally=TALLY)
    total(core, 1)
    assert posts(core)[-2:] == [STAGED, VOTE]


def test_what_is_repeated_and_announced_says_the_same() -> None:
    core = staging()
    deliver(core, 0)
    take(core, CopyWork)
    core.copied(True, covered=True, proofs=PROOFS, tally=TALLY)
    assert core.state.round is not None
    announcement: WorkerRound | None = core.state.round.announcement()
    assert announcement is not None
    assert (announcement.staged, announcement.tally) == ([BatchRef(0, 0, PROOFS)], None)
    total(core, 1)
    posts(core)
    for _ in range(EVERY_BEATS + 1):
        core.beat()
    assert [message for message in posts(core) if not isinstance(message, m.Beat)] == [STAGED, VOTE]
    deliver(core, 0)
    assert posts(core) == [m.Staged(1, *KEY, 0, 0, True, PROOFS, TALLY)]
    announcement = core.hello().round
    assert announcement is not None and announcement.voted
    assert announcement.tally == TALLY
