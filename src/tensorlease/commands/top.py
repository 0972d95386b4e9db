"""The command `tensorlease top`: what a broker holds, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from tensorlease.broker.queries import Status
from tensorlease.protocol.errors import DeadlineError, NoBrokerError

from .frame import frame, rates
from .keys import Keys
from .orderly import end_at_sigterm
from .query import Asker, broker_options
from .status import console_of_output


class Watch:
    """Asks a broker for its status now and then, and makes a frame of each answer.

    Args:
        asker: How it asks.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._before: Status | None = None
        self._asked_at = 0.0

    def look(self, height: int | None) -> RenderableType:
        """Asks once; returns what is to be shown.

        Raises:
            NoBrokerError: Nothing listens, and nothing ever did.
            DeadlineError: The broker does not answer, and never did.
            RefusedError: This user may not ask.
        """
        try:
            seen = self._asker.status()
        except (NoBrokerError, DeadlineError) as error:
            if self._before is None:
                raise
            # Agents wait for the next broker as well.
            return Text(" ".join(str(error).split()), style="red")
        now = time.monotonic()
        made = frame(seen, rates(self._before, seen, now - self._asked_at), height)
        self._before, self._asked_at = seen, now
        return made


@click.command()
@broker_options
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=3600.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one look as text, and end.")
def top(endpoint: str, job: str, timeout_s: float, interval_s: float, once: bool) -> None:
    """Watch a broker: who is in which stage of a round, who is waited for, and how fast it goes.

    On a terminal q or Ctrl+C ends it; elsewhere each look is printed as text. Each look is one
    question to the broker, as `tensorlease status` asks it.
    """
    console = console_of_output()
    end_at_sigterm()
    with Asker(endpoint, job, timeout_s) as asker:
        watch = Watch(asker)
        if once:
            console.print(watch.look(None))
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            _live(watch, console, interval_s)
        else:
            for look in _looks(lambda: watch.look(None), interval_s):
                console.print(look)
                console.print()
                console.file.flush()


def _looks(look: Callable[[], RenderableType], interval_s: float) -> Iterator[RenderableType]:
    while True:
        began = time.monotonic()
        yield look()
        time.sleep(max(0.0, began + interval_s - time.monotonic()))


def _live(watch: Watch, console: Console, interval_s: float) -> None:
    first = watch.look(console.height)  # Before the screen is taken: no broker is one line.
    screen = Live(
        first,
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    keys = Keys()
    # Not `with`: a signal in the middle of an `__enter__` would leave the terminal changed.
    try:
        keys.start()
        screen.start(refresh=True)
        began = time.monotonic()
        while not keys.pressed("q", max(0.01, began + interval_s - time.monotonic())):
            began = time.monotonic()
            screen.update(watch.look(console.height), refresh=True)
    finally:
        screen.stop()
        keys.stop()
