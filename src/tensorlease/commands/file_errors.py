"""What can be wrong with a model's files, read or written."""

from __future__ import annotations

from pathlib import Path

from tensorlease.protocol.errors import TensorleaseError


class CheckpointError(TensorleaseError):
    """A file that is not what it should be; nothing was published.

    Attributes:
        path: The file, or the directory.
    """

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path


class OutputError(TensorleaseError):
    """A version cannot be written; no part of it is left.

    Attributes:
        path: The directory that was to have it.
        text: Why not, and the way out.
    """

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path
        self.text = text
