"""Where the members of one server come together, each with what it has, and one acts for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from .member import LOOK_S, UpdateError

T = TypeVar("T")


class _Turn(Generic[T]):
    def __init__(self) -> None:
        self.there: dict[int, T] = {}
        self.done: Future[None] = Future()


class Meeting(Generic[T]):
    """A place for so many members.

    Args:
        size: How many they are.
        act: Called with what each has, in the order of their places, by whoever comes last.
    """

    def __init__(self, size: int, act: Callable[[list[T]], object]) -> None:
        self._size: Final = size
        self._act = act
        self._lock = threading.Lock()
        self._turn: _Turn[T] = _Turn()

    def come(self, place: int, what: T, goes_on: Callable[[], bool]) -> None:
        """Returns when all have come, and it was acted on; raises what that raised.

        Args:
            place: Which member comes.
            what: What it has.
            goes_on: Whether it still waits for the others. Once all have come, it does.

        Raises:
            UpdateError: It does not wait any more.
        """
        with self._lock:
            turn = self._turn
            turn.there[place] = what
            if last := len(turn.there) == self._size:
                self._turn = _Turn()
        if last:
            try:
                self._act([turn.there[each] for each in sorted(turn.there)])
            except BaseException as error:
                turn.done.set_exception(error)
                raise
            turn.done.set_result(None)
            return
        while True:
            try:
                turn.done.result(LOOK_S)
            except TimeoutError:
                if turn.done.done():
                    raise
                with self._lock:
                    if self._turn is turn and not goes_on():
                        del turn.there[place]
                        raise UpdateError(
                            f"the round failed while GPU {place} of the server had a batch, and"
                            f" {self._size - len(turn.there) - 1} others had none: ranks that"
                            " send to one server must send the same number of batches"
                        ) from None
            else:
                return
