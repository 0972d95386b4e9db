"""Who tells an engine of a round, where that is not a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .trainer import TrainerAgent


class Control(Protocol):
    """Leads engines through the rounds of a trainer: `tensorlease.engines.VLLMControl`, say."""

    def wait_ready(self, trainer: TrainerAgent, timeout: float) -> object:
        """Waits until what it leads can be part of the trainer's next round.

        Args:
            trainer: Who publishes.
            timeout: Limit in seconds.

        Raises:
            DeadlineError: It cannot, in time.
            TensorleaseError: It leads no more.
        """
