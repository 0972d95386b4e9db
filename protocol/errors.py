"""The one tree of errors: each says what happened, to whom and what to do, and carries its fields."""

from __future__ import annotations


class TensorleaseError(Exception):
    """Root of everything that tensorlease raises on purpose."""


class ConfigError(TensorleaseError):
    """A setting, an address or a path that cannot work; nothing was started."""

    @property
    def problems(self) -> tuple[object, ...]:
        """Each thing that cannot work, to be said in a line of its own."""
        return (self,)


class ProtocolError(TensorleaseError):
    """Bytes or a message that break the protocol; the message names the field."""


class RefusedError(TensorleaseError):
    """The broker refused a request.

    Attributes:
        code: One of `tensorlease.protocol.messages.Code`, as its text.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class NoBrokerError(TensorleaseError):
    """No broker answers where the agent looked; the message says where, and how to start one."""


class DeadlineError(TensorleaseError, TimeoutError):
    """A call's own limit has passed. The round itself may still go on: its outcome can be asked."""


class RoundFailedError(TensorleaseError):
    """A round ended without committing on every replica.

    Attributes:
        result: The `RoundResult` that names each replica, each receiver and what became of it.
    """

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


class ClosedError(TensorleaseError):
    """The agent was closed, or belongs to another process (it was created before a fork)."""


class InternalError(TensorleaseError):
    """A state machine was asked for a transition that its table does not have: a defect."""
