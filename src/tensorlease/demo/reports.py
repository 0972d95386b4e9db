"""What the demo's processes are told, and what they tell."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

TRAINERS = 2
REPLICAS = {"solo": 1, "pair": 2}
"""The replicas and how many members each has."""
CHANNEL = "demo"
LIMIT_S = 60.0
"""How long anything may take before the demo gives up."""


class Size(Struct, frozen=True):
    """How large the model is."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 64
    """The longest text that it sees, in tokens."""
    vocabulary: int = 2048


LEAST_STEPS = 40
"""Gradient steps after which the model is better than the frequencies of tokens."""


class Plan(Struct, frozen=True):
    """What is to be done; the same for all processes."""

    pieces: list[bytes]
    """The text of each token."""
    size: Size
    versions: int
    steps: int
    """Gradient steps between two versions."""
    batch: int
    """Texts a step and trainer."""
    held_out: int
    """Texts of `context` predicted tokens that the workers measure the loss with."""
    line: int
    """Tokens of a line that the workers write."""
    seed: int
    device: str = "cpu"
    """Where the weights are: cpu, or cuda."""
    by_hand: bool = False
    """The trainers cut the model themselves: FSDP2 needs a GPU for each of them."""
    directory: str = ""
    """Where the broker's socket is, the processes of a group meet, and logs go."""

    @property
    def learns(self) -> bool:
        """Whether it trains long enough to beat a model that knows how frequent tokens are."""
        return (self.versions - 1) * self.steps >= LEAST_STEPS

    @property
    def endpoint(self) -> str:
        """The broker's address."""
        return f"ipc://{self.directory}/broker.sock"


class Receiver(Struct, frozen=True):
    """A worker's part of a round; times in seconds."""

    name: str
    nbytes: int
    prepare_s: float
    copy_s: float
    commit_s: float


class Started(Struct, frozen=True, tag=True):
    """A process is ready for its work."""

    text: str


class Progress(Struct, frozen=True, tag=True):
    """A trainer has made a step."""

    version: int
    """The version that is under way."""
    step: int
    loss: float


class Published(Struct, frozen=True, tag=True):
    """A trainer hands out a version."""

    version: int
    digest: str
    """Of all parameters, gathered from all trainers."""


class Round(Struct, frozen=True, tag=True):
    """A round has ended."""

    version: int
    outcome: str
    seconds: float
    loss: float | None
    """The mean training loss since the version before; None for the first."""
    receivers: list[Receiver]


class Wrote(Struct, frozen=True, tag=True):
    """A worker has used a version's weights."""

    version: int
    loss: float
    """On the held-out text, in nats a byte."""
    line: str
    digest: str
    """Of all parameters, as this worker's replica holds them."""


class Failed(Struct, frozen=True, tag=True):
    """A process cannot go on."""

    text: str


Report = Started | Progress | Published | Round | Wrote | Failed
Tell = Callable[[Report], None]
