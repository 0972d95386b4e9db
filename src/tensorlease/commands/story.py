"""The command `tensorlease story`: what happened to one version of a channel."""

from __future__ import annotations

import click
import msgspec

from tensorlease.broker.stories import Story
from tensorlease.protocol.errors import RefusedError
from tensorlease.protocol.records import QueryKind

from .query import ask, broker_options


class VersionNumber(click.IntRange):
    """A number that says what it is where it is none."""

    name = "version: a whole number of at least 1"


@click.command()
@click.argument("channel")
@click.argument("version", type=VersionNumber(min=1))
@broker_options
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def story(
    channel: str, version: int, endpoint: str, job: str, timeout_s: float, as_json: bool
) -> None:
    """Tell what happened to a VERSION of a CHANNEL: who did what when, and what took the time.

    The last line of each attempt names its critical path: who was waited for, and for what. What
    is called broker there are also the ways of the messages, and processes that could not run.
    """
    reply, body = ask(
        QueryKind.STORY,
        endpoint=endpoint,
        job=job,
        channel=channel,
        version=version,
        timeout_s=timeout_s,
    )
    if reply.code is not None:
        text = f"the broker knows of no round for version {version} of channel {channel!r}"
        raise RefusedError(f"{text}; it keeps the last ones only", reply.code.value)
    if as_json:
        click.echo(body)
        return
    for attempt in msgspec.json.decode(body, type=Story).rounds:
        ended = f"{attempt.outcome}: {attempt.reason}" if attempt.reason else attempt.outcome
        click.echo(f"call {attempt.call} of group {attempt.group}: {ended or attempt.state}")
        for line in attempt.lines:
            click.echo(f"  {line.at_s * 1000:10.2f} ms  {line.text}")
        click.echo(attempt.summary)
