"""What `tensorlease top` shows at one moment, for a terminal or as text."""

from __future__ import annotations

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.text import Text

from tensorlease.broker.queries import ChannelStatus, Status

from .concerns import concerns
from .standing import Row, rows, stages
from .status import row, table, version_of
from .units import per_second, size

MAX_CONCERNS = 5
MAX_ENDED = 3
LEAST_ROWS = 3
"""Workers of a channel that are shown however low the terminal is."""


class Rates(Struct):
    """Messages a second between two looks."""

    received: float
    sent: float


def rates(before: Status | None, seen: Status, between_s: float) -> Rates | None:
    """Messages a second; None: it is the first look, or the broker is another one."""
    if before is None or before.epoch != seen.epoch or between_s <= 0:
        return None
    old, new = before.counters, seen.counters
    return Rates(
        (new.messages_received - old.messages_received) / between_s,
        (new.messages_sent - old.messages_sent) / between_s,
    )


def frame(seen: Status, rate: Rates | None, height: int | None = None) -> Group:
    """All of it.

    Args:
        seen: The status.
        rate: Messages a second, where they are known.
        height: Lines that there are; None: as many as are needed.
    """
    words = [f"broker {seen.epoch}", f"{seen.agents} agents"]
    if rate is not None:
        words.append(f"messages {per_second(rate.received)} in, {per_second(rate.sent)} out")
    parts: list[RenderableType] = [_line(", ".join(words), "bold")]
    found = concerns(seen)
    parts += [_line(f"look: {text}", "red") for text in found[:MAX_CONCERNS]]
    if len(found) > MAX_CONCERNS:
        parts.append(_line(f"look: and {len(found) - MAX_CONCERNS} more: tensorlease status"))
    heads = [_head(channel) for channel in seen.channels]
    tails = [_tail(channel) for channel in seen.channels]
    workers = [_workers(channel) for channel in seen.channels]
    # A table has a line of its own for the names of its columns, and maybe one for those left out.
    taken = len(parts) + sum(
        len(head) + len(tail) + 2 for head, tail in zip(heads, tails, strict=True)
    )
    room = None if height is None else height - taken
    for head, tail, found_rows in zip(heads, tails, workers, strict=True):
        parts += head
        shown = found_rows if room is None else found_rows[: max(LEAST_ROWS, room)]
        if room is not None:
            room -= len(shown)
        parts += _table(shown, len(found_rows) - len(shown))
        parts += tail
    if not seen.channels:
        parts.append(_line("no agent has joined yet"))
    return Group(*parts)


def _workers(channel: ChannelStatus) -> list[Row]:
    return rows(channel, {replica.replica: version_of(replica) for replica in channel.replicas})


def _head(channel: ChannelStatus) -> list[RenderableType]:
    trainers = 0 if channel.group is None else len(channel.group.ranks)
    words = [
        f"channel {channel.name}: version {channel.last_version}",
        f"{trainers} trainers, {len(channel.replicas)} replicas",
        f"{per_second(channel.rounds_per_s)} rounds, {size(channel.bytes_per_s)}/s",
    ]
    lines: list[RenderableType] = [_line(""), _line("   ".join(words), "bold")]
    for rnd in channel.rounds:
        held = f"{rnd.held} leases, {size(rnd.held_bytes)}"
        text = f"version {rnd.version} {rnd.state} for {rnd.phase_s:.1f} s   {held}"
        parts = (text, stages(rnd), rnd.waits_for and f"waits for {rnd.waits_for}")
        lines.append(_line("   ".join(part for part in parts if part), "cyan"))
    return lines


def _table(shown: list[Row], more: int) -> list[RenderableType]:
    if not shown:
        return []
    made = table("worker", "pid", "version", "stage", "batches", "bytes", "still", "note")
    for it in shown:
        note = it.note or ("the others wait for it" if it.straggles else "")
        still = f"{it.still_s:.1f} s" if it.still_s else ""
        owed, nbytes = (str(it.owed), size(it.nbytes)) if it.stage != "idle" else ("", "")
        row(made, it.worker, it.pid, it.version, it.stage, owed, nbytes, still, note)
        made.rows[-1].style = "red" if it.bad else "yellow" if it.straggles else ""
    for column in made.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    return [made, _line(f"and {more} more workers", "dim")] if more else [made]


def _tail(channel: ChannelStatus) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for ended in channel.ended[:MAX_ENDED]:
        style = "dim" if ended.outcome == "committed" else "red"
        lines.append(_line(f"{ended.ended_s:.0f} s ago: {ended.summary}", style))
    return lines


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
