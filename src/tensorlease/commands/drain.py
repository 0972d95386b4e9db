"""The command `tensorlease drain`: no new rounds, and a wait for those under way."""

from __future__ import annotations

import time

import click
import msgspec
from msgspec import Struct

from tensorlease.broker.queries import Status
from tensorlease.protocol.errors import DeadlineError, RefusedError
from tensorlease.protocol.records import QueryKind

from .query import Asker, broker_options

LOOK_S = 0.2
"""Between two looks."""
WAITING = frozenset({"opening", "finished"})
"""States of rounds that are not under way: not admitted yet, or ended with leases still held."""


class Left(Struct):
    """What is left to be waited for."""

    under_way: list[str]
    """A line for each round."""
    not_admitted: int
    """Rounds that have been opened, and wait until rounds are admitted again."""


def left(seen: Status) -> Left:
    """Sees what rounds are under way. Pure."""
    lines = [
        f"channel {channel.name}: version {rnd.version}, {rnd.state} for {rnd.phase_s:.0f} s"
        f"{rnd.waits_for and f', waits for {rnd.waits_for}'}"
        for channel in seen.channels
        for rnd in channel.rounds
        if rnd.state not in WAITING
    ]
    opening = sum(rnd.state == "opening" for channel in seen.channels for rnd in channel.rounds)
    return Left(lines, opening)


@click.command()
@broker_options
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0.0, max=86_400.0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the rounds under way.",
)
@click.option("--undo", is_flag=True, help="Let the broker admit rounds again.")
@click.option("--json", "as_json", is_flag=True, help="Print what is left as JSON, in the end.")
def drain(
    endpoint: str, job: str, timeout_s: float, limit_s: float, undo: bool, as_json: bool
) -> int:
    """Have the broker admit no new round, and wait for those under way.

    Trainers that open a round meanwhile wait, up to their own limit, and go on after --undo, or with
    the next broker. Exits with 1 if rounds are still under way after the limit; the broker stays
    drained then, as it does after Ctrl+C.
    """
    with Asker(endpoint, job, timeout_s) as asker:
        if undo:
            reply, _ = asker.ask(QueryKind.RESUME)
            if reply.code is not None:
                text = "the broker was told to end and admits no round any more; start it again"
                raise RefusedError(text, reply.code.value)
            click.echo("{}" if as_json else "rounds are admitted again")
            return 0
        asker.ask(QueryKind.DRAIN)
        found = _wait(asker, limit_s)
    if as_json:
        click.echo(msgspec.json.encode(found))
    if found.under_way:
        rounds = "; ".join(found.under_way)
        raise DeadlineError(
            f"still under way after {limit_s:g} s: {rounds}; no new one is admitted until"
            " `tensorlease drain --undo`"
        )
    if not as_json:
        waiting = f"; {found.not_admitted} wait to be admitted" if found.not_admitted else ""
        click.echo(f"drained: no round is under way{waiting}. `tensorlease drain --undo` ends it")
    return 0


def _wait(asker: Asker, limit_s: float) -> Left:
    """Waits until nothing is under way, and says on stderr what it waits for when that changes."""
    deadline = time.monotonic() + limit_s
    said: list[str] = []
    while True:
        found = left(asker.status())
        left_s = deadline - time.monotonic()
        if not found.under_way or left_s <= 0:
            return found
        # Without the seconds, which change all the time.
        rounds = [line.partition(",")[0] for line in found.under_way]
        if rounds != said:
            said = rounds
            for line in found.under_way:
                click.echo(f"waits for {line}", err=True)
        time.sleep(min(LOOK_S, left_s))
