"""The story of a version: what happened in each attempt to make it, and what it waited for.

Pure functions over the ledger's state. Times in answers are seconds since the round was opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from .critical_path import Part, parts, sentence
from .ledger.state import Receiver, Round, State


class StoryLine(Struct):
    """One thing that happened."""

    at_s: float
    """Since the round was opened."""
    text: str


class RoundStory(Struct):
    """One attempt to make the version."""

    call: int
    group: str
    state: str
    outcome: str
    reason: str
    lines: list[StoryLine]
    summary: str = ""
    """One sentence: how long it took, and for what."""
    path: list[Part] = []
    """The parts of its critical path, the longest first; together they are the whole time."""


class Story(Struct):
    """All attempts to make one version of a channel, the oldest first."""

    channel: str
    version: int
    rounds: list[RoundStory]
    versions: list[int] = []
    """Of which the broker knows a round on this channel, rising."""
    keeps: int = 0
    """How many ended rounds of a channel it remembers; older ones are forgotten."""


def story(state: State, channel: str, version: int, now: float) -> Story:
    """The timeline of every known attempt to make a version; no rounds when none is known.

    Args:
        state: The ledger's; it is not changed.
        channel: The channel's name.
        version: The version.
        now: Monotonic seconds.
    """
    known = state.channels.get(channel)
    rounds = [] if known is None else [*known.history, *known.rounds.values()]
    seen: dict[tuple[str, int], Round] = {rnd.key: rnd for rnd in rounds if rnd.version == version}
    ordered = sorted(seen.values(), key=lambda rnd: (rnd.opened_at, rnd.call))
    return Story(
        channel,
        version,
        [_round_story(rnd, now) for rnd in ordered],
        sorted({rnd.version for rnd in rounds}),
        state.settings.history,
    )


def _round_story(rnd: Round, now: float) -> RoundStory:
    result = rnd.result
    return RoundStory(
        rnd.call,
        rnd.group,
        rnd.state.value,
        "" if result is None else result.outcome.value,
        "" if result is None else result.reason,
        [
            StoryLine(max(0.0, at - rnd.opened_at), text)
            for at, text in sorted(_happened(rnd), key=lambda line: line[0])
            if at
        ],
        sentence(rnd, now),
        parts(rnd, now),
    )


def _happened(rnd: Round) -> Iterator[tuple[float, str]]:
    """Each thing that happened, with its time; 0: it did not."""
    yield rnd.opened_at, "opened"
    yield rnd.admitted_at, f"admitted with {len(rnd.receivers)} receivers"
    for lease in rnd.leases.values():
        name = f"batch {lease.rank}.{lease.seq} ({lease.nbytes} bytes)"
        yield lease.at, f"{name} leased"
        yield lease.released_at, f"{name} released"
    for receiver in rnd.receivers.values():
        name = with_pid(receiver)
        yield receiver.ready_at, f"{name} ready"
        yield receiver.voted_at, f"{name} voted complete"
        yield receiver.committed_at, f"{name} committed"
    yield rnd.decided_at, "decided: commit"
    for note in rnd.notes:
        yield note.at, note.text
    outcome = "" if rnd.result is None else f": {rnd.result.outcome.value}"
    yield rnd.finished_at, f"finished{outcome}"


def with_pid(receiver: Receiver) -> str:
    """Names a receiver: `replica/member (pid N)`."""
    id = receiver.id
    return f"{id.replica}/{id.member} (pid {id.processes[0].pid})"
