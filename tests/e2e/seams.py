"""Places in an agent's process at which it stops and says so, for tests that then kill it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tensorlease.agents.dealer import Dealer
from tensorlease.agents.intake import Copied, Intake
from tensorlease.agents.poll_loop import Ready
from tensorlease.agents.work import CopyWork
from tensorlease.protocol.codec import decode_from_agent, decode_from_broker

HOLD_S = 60.0


class Seam:
    """Holds a thread of this process at places like `sent:Staged:1`.

    `sending:` is before a message leaves, `sent:` after; `received:` after it was handled. These
    hold the poll thread with the agent's lock, so that the process does nothing at all any more.
    `in:prepare`, `in:copy`, `in:commit`, `in:abort` hold the application's thread. The number
    says at which of the next ones.

    Args:
        say: Tells the test `("at", place)`.
    """

    def __init__(self, say: Callable[[Any], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        # Places, and how many passes are left until each holds.
        self._left: dict[tuple[str, str], int] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._go = threading.Event()
        # What is raised, once, by who comes to `in:NAME`.
        self._failures: dict[str, str] = {}
        self._patch()

    def hold(self, place: str) -> None:
        """Holds who comes there, once."""
        what, name, count = place.split(":")
        with self._lock:
            self._go.clear()
            self._left[what, name] = int(count)
            self._texts[what, name] = place

    def fail(self, name: str, text: str) -> None:
        """Has what comes to `in:NAME` raise, once."""
        self._failures[name] = text

    def go(self) -> None:
        """Lets who is held go on, and holds nobody any more."""
        with self._lock:
            self._left.clear()
            self._go.set()

    def at(self, what: str, name: str) -> None:
        """Somebody comes here."""
        if what == "in" and name in self._failures:
            raise RuntimeError(self._failures.pop(name))
        with self._lock:
            if (what, name) not in self._left:
                return
            self._left[what, name] -= 1
            if self._left[what, name]:
                return
            del self._left[what, name]
            self._say(("at", self._texts[what, name]))
        if not self._go.wait(HOLD_S):
            raise TimeoutError(f"held at {what}:{name} for {HOLD_S} s")

    def _patch(self) -> None:
        receive, send, copy = Dealer.receive, Dealer.send, Intake.copy
        seam = self

        def receiving(dealer: Dealer, ready: Ready) -> Iterator[list[bytes]]:
            for frames in receive(dealer, ready):
                yield frames
                # Here again: it was handled.
                seam.at("received", type(decode_from_broker(frames[0])).__name__)

        def sending(dealer: Dealer, messages: deque[list[bytes]]) -> None:
            one: deque[list[bytes]] = deque()
            while messages and not one:
                name = type(decode_from_agent(messages[0][0])).__name__
                seam.at("sending", name)
                one.append(messages.popleft())
                send(dealer, one)
                if not one:
                    seam.at("sent", name)
            # What the socket did not take waits for room; by another try it would pass unseen.
            messages.extendleft(one)
            if not one:
                send(dealer, messages)

        def copying(intake: Intake, work: CopyWork) -> Copied:
            seam.at("in", "copy")
            return copy(intake, work)

        Dealer.receive = receiving  # type: ignore[method-assign, assignment]
        Dealer.send = sending  # type: ignore[method-assign, assignment]
        Intake.copy = copying  # type: ignore[method-assign, assignment]
