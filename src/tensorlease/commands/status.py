"""The command `tensorlease status`: what a broker holds, for people or as JSON."""

from __future__ import annotations

import sys

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorlease.broker.config import Limits
from tensorlease.broker.queries import ChannelStatus, Counters, ReplicaStatus, RoundStatus, Status
from tensorlease.protocol.errors import ConfigError, TensorleaseError
from tensorlease.protocol.records import QueryKind

from .concerns import CONDITIONS, concerns, weights
from .query import ask, broker_options
from .units import size

MAX_LEASES = 5
"""Leases of a round that are shown, the oldest first."""
NEEDS_A_LOOK = 1
UNBOUNDED = 10_000
"""Columns that there are where there is no terminal."""


@click.command(epilog=f"With --exit-code something needs a look where {CONDITIONS}.")
@broker_options
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit with 0 if all is well, 1 if something needs a look, 2 without an answer.",
)
def status(endpoint: str, job: str, timeout_s: float, as_json: bool, exit_code: bool) -> int:
    """Ask a broker what it holds: channels, replicas, rounds, leases, and who is stuck."""
    try:
        _, body = ask(QueryKind.STATUS, endpoint=endpoint, job=job, timeout_s=timeout_s)
    except TensorleaseError as error:
        if exit_code:
            raise ConfigError(str(error)) from error
        raise
    seen = msgspec.json.decode(body, type=Status)
    if as_json:
        # Beside whatever else it says, which a newer broker may know more of.
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        click.echo(msgspec.json.encode({**fields, "look": concerns(seen)}))
    else:
        show(seen, console_of_output())
    return NEEDS_A_LOOK if exit_code and concerns(seen) else 0


def console_of_output() -> Console:
    """What prints on stdout; in a pipe or a file lines are as long as they are."""
    return Console() if sys.stdout.isatty() else Console(width=UNBOUNDED)


def show(seen: Status, console: Console) -> None:
    """Prints a status as tables, and below them what needs a look."""
    say(console, f"broker {seen.epoch}, {seen.agents} agents")
    say(console, _counted(seen.counters))
    say(console, _limited(seen.limits))
    for channel in seen.channels:
        if not (channel.group or channel.replicas or channel.rounds or channel.ended):
            continue  # Nobody is there, and nothing was: a name that somebody had misspelt, say.
        say(console, "")
        say(console, f"channel {channel.name}, last version {channel.last_version}")
        _show_channel(channel, console)
    for mapping in seen.mappings:
        say(
            console,
            f"{mapping.buffers} buffers of trainer {mapping.trainer} are mapped by "
            f"{len(mapping.workers)} workers",
        )
    found = concerns(seen)
    if found:
        say(console, "")
    for line in found:
        say(console, f"look: {line}", style="red")


def say(console: Console, text: str, style: str = "") -> None:
    """Prints a line as it is, however long: what is pasted elsewhere stays whole."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _limited(limits: Limits) -> str:
    return (
        f"at most {limits.max_agents} agents, {limits.max_queue_messages} messages or"
        f" {size(limits.max_queue_bytes)} unsent to one, {limits.window} batches unreleased by a"
        f" trainer, of {size(limits.max_body_bytes)} each"
    )


def _counted(counters: Counters) -> str:
    parts = [f"{counters.messages_received} messages in, {counters.messages_sent} out"]
    if counters.unsent_messages:
        parts.append(f"{counters.unsent_messages} unsent ({size(counters.unsent_bytes)})")
    for count, what in (
        (counters.bad_messages, "bad messages"),
        (counters.refusals, "refusals"),
        (counters.lost_sessions, "sessions dropped"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return ", ".join(parts)


def _show_channel(channel: ChannelStatus, console: Console) -> None:
    agents = table("agent", "pid", "device", "via", "state", "heard", "version", "ready")
    group = channel.group
    for rank in group.ranks if group is not None else ():
        name = f"trainer rank {rank.place}"
        heard = f"{rank.heard_s:.1f} s"
        via = ", ".join(rank.via)
        row(agents, name, rank.pid, rank.device, via, rank.state, heard, "", "")
    for replica in channel.replicas:
        ready = "yes" if replica.ready else f"no: {replica.reason}"
        for worker in replica.members:
            name = f"worker {replica.replica}/{worker.place}"
            heard = f"{worker.heard_s:.1f} s"
            cells = (worker.pid, worker.device, "", worker.state, heard, version_of(replica), ready)
            row(agents, name, *cells)
    if agents.row_count:
        console.print(agents)
    if channel.rounds:
        rounds = table("round", "state", "age", "in phase", "leases", "bytes", "waits for")
        for rnd in channel.rounds:
            name = f"version {rnd.version} call {rnd.call}"
            leases = f"{rnd.held} held, {rnd.stuck} stuck" if rnd.stuck else f"{rnd.held} held"
            ages = f"{rnd.age_s:.1f} s", f"{rnd.phase_s:.1f} s"
            row(rounds, name, rnd.state, *ages, leases, size(rnd.held_bytes), rnd.waits_for)
        console.print(rounds)
    _show_leases(channel.rounds, console)
    if channel.ended:
        last = channel.ended[0]
        say(console, f"{last.ended_s:.1f} s ago: {last.summary}")


def _show_leases(rounds: list[RoundStatus], console: Console) -> None:
    leases = table("lease", "state", "age", "bytes", "held by")
    more = 0
    for rnd in rounds:
        for lease in rnd.leases[:MAX_LEASES]:
            name = f"version {rnd.version} batch {lease.rank}.{lease.seq}"
            age = f"{lease.age_s:.1f} s"
            row(leases, name, lease.state, age, size(lease.nbytes), ", ".join(lease.holders))
        more += max(0, rnd.held - MAX_LEASES)
    if leases.row_count:
        console.print(leases)
    if more:
        say(console, f"and {more} younger leases")


def version_of(replica: ReplicaStatus) -> str:
    """What a replica is at, in a word or two."""
    words = weights(replica).partition(":")[0]
    return words or str(replica.current or "none")


def table(*columns: str) -> Table:
    """A table without lines."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def row(table: Table, *cells: object) -> None:
    """Adds a row; nothing in it is taken for markup."""
    table.add_row(*(escape(str(cell)) for cell in cells))
