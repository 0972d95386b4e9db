"""The command `tensorlease story`: what happened to one version of a channel."""

from __future__ import annotations

import click
import msgspec

from tensorlease.broker.stories import Story
from tensorlease.protocol.errors import RefusedError
from tensorlease.protocol.records import QueryKind

from .query import ask, broker_options

MAX_SPANS = 8
"""Spans of versions that a text names, the newest ones."""


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
    told = msgspec.json.decode(body, type=Story)
    if reply.code is not None:
        raise RefusedError(unknown(told), reply.code.value)
    if as_json:
        click.echo(body)
        return
    for attempt in told.rounds:
        ended = f"{attempt.outcome}: {attempt.reason}" if attempt.reason else attempt.outcome
        click.echo(f"call {attempt.call} of group {attempt.group}: {ended or attempt.state}")
        for line in attempt.lines:
            click.echo(f"  {line.at_s * 1000:10.2f} ms  {line.text}")
        click.echo(attempt.summary)


def unknown(told: Story) -> str:
    """Says that there is no story, and of which versions there is one."""
    text = f"the broker knows of no round for version {told.version} of channel {told.channel!r}"
    if not told.versions:
        return f"{text}, nor for any other of it; `tensorlease status` names the channels"
    return (
        f"{text}; it has {spans(told.versions)}; of rounds that have ended it keeps the last {told.keeps} of a"
        " channel since it was started, older ones are forgotten"
    )


def spans(versions: list[int]) -> str:
    """Names rising versions in a few words: `version 2`, `versions 1, 4 to 9 and 12`."""
    found: list[tuple[int, int]] = []
    for version in versions:
        if found and version == found[-1][1] + 1:
            found[-1] = found[-1][0], version
        else:
            found.append((version, version))
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in found]
    if len(versions) == 1:
        return f"version {texts[0]}"
    more = ", and earlier ones" if len(texts) > MAX_SPANS else ""
    *first, last = texts[-MAX_SPANS:]
    return f"versions {', '.join(first)}{' and ' if first else ''}{last}{more}"
