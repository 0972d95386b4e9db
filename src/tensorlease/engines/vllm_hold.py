"""How a vLLM server is held during an update, and in what state a failure leaves it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from .vllm_server import ControlledServer, ServerError


class HoldState(Enum):
    """What a server does with requests, as far as its leader knows."""

    SERVING = "serving"
    """It answers them."""
    PAUSED = "paused"
    """It takes none; its memory is where it was."""
    ASLEEP = "asleep"
    """It takes none; its weights are on the host, its KV cache is dropped."""
    WEIGHTS_AWAKE = "held with its weights awake and without KV cache"
    """It takes none; weights can be written."""


class Hold:
    """Holds one server: by a pause, or asleep, so that an update finds room on its GPU.

    Errors say in what state the server is left. Each call begins from any state: what is there
    already, a server leaves as it is.

    Args:
        server: Whose requests are held.
        pause: What becomes of requests: "keep", "wait" or "abort"; see vLLM's `/pause`.
        sleep: Whether it sleeps (level 1): its weights go to the host and come back, and its KV
            cache is dropped until the update is over.
        limit_s: Gives how long the server may take for each step, in seconds.
    """

    def __init__(
        self, server: ControlledServer, pause: str, sleep: bool, limit_s: Callable[[], float]
    ) -> None:
        self.state = HoldState.SERVING
        self._server = server
        self._pause = pause
        self._sleep = sleep
        self._limit_s = limit_s

    def begin(self) -> None:
        """Holds requests; the weights can be written when it returns.

        Raises:
            ServerError: It is not held, or its weights are not awake.
        """
        if not self._sleep:
            self._post("/pause", HoldState.PAUSED, mode=self._pause)
            return
        self._post("/sleep", HoldState.ASLEEP, level="1", mode=self._pause)
        # The KV cache stays away until the update is over: that is the room for it.
        self._post("/wake_up", HoldState.WEIGHTS_AWAKE, tags="weights")

    def end(self) -> None:
        """Lets the server go on, with the weights that it has now.

        Raises:
            ServerError: It does not.
        """
        if not self._sleep:
            self._post("/resume", HoldState.SERVING)
            return
        self._awake(self._post("/wake_up", HoldState.SERVING, tags=["kv_cache", "scheduling"]))

    def undo(self) -> None:
        """Lets a server whose weights were not touched go on, from whatever state.

        Raises:
            ServerError: It does not.
        """
        if not self._sleep:
            self._post("/resume", HoldState.SERVING)
            return
        self._awake(self._post("/wake_up", HoldState.SERVING))

    def _post(self, path: str, then: HoldState, **query: str | list[str]) -> Any:
        try:
            answer = self._server.post(path, None, self._limit_s(), **query)
        except ServerError as error:
            left = self.state.value
            if not error.refused and then is not self.state:
                left += f", or {then.value}"
            raise ServerError(
                f"{error}; the server is left {left}", refused=error.refused
            ) from None
        self.state = then
        return answer

    def _awake(self, answer: Any) -> None:
        """Raises if it says that it sleeps on: of tags, one of which is awake, vLLM wakes none."""
        status = answer.get("status") if isinstance(answer, dict) else None
        if status not in (None, "awake"):
            self.state = HoldState.WEIGHTS_AWAKE
            raise ServerError(
                f"{self._server.url}/wake_up answered {status!r}; the server is left"
                f" {self.state.value}",
                refused=True,
            )
