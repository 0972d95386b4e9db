"""Writes one version as safetensors files, in a directory that is there only once all of it is."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file

from .checkpoint import DTYPES, INDEX, SUFFIX
from .file_errors import OutputError
from .units import size

if TYPE_CHECKING:
    import torch

_METADATA: Final = "__metadata__"
"""Not a tensor, in the header of a file."""
_UNFINISHED: Final = re.compile(r"\.version-\d+\.\d+")
"""Names of directories that are being written: the version and the process."""
_ROOM: Final = 2**20
"""Bytes beyond the tensors and what is said of them."""
_SAID: Final = 300
"""Bytes that headers and the index have of a tensor at most, beside its name four times over."""


@contextmanager
def claimed(output: Path) -> Iterator[Callable[[], None]]:
    """Makes the directory of all versions, for this process alone to write to.

    Gives what raises `OutputError` if another directory, or none, is in its place.

    Raises:
        OutputError: Another process writes to it, or nobody can.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        opened = os.open(output, os.O_RDONLY)
    except OSError as error:
        raise OutputError(output, _unwritable(error)) from None
    try:
        _claim(output, opened)
        yield partial(_require_same, output, opened)
    finally:
        os.close(opened)


def _require_same(output: Path, opened: int) -> None:
    try:
        same = os.path.samestat(os.stat(output), os.fstat(opened))
    except OSError:
        same = False
    if not same:
        raise OutputError(output, "was removed or replaced while pull wrote to it: start it again")


def _claim(output: Path, opened: int) -> None:
    alone = True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = "another pull writes to it: give each a directory of its own"
        raise OutputError(output, text) from None
    except OSError:
        alone = False  # Some network file systems have no locks.
    try:
        for left in os.listdir(output) if alone else ():
            if _UNFINISHED.fullmatch(left):
                shutil.rmtree(output / left)  # Whoever wrote it was killed.
    except OSError as error:
        raise OutputError(output, _unwritable(error)) from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise OutputError(output, "may not be written to: give another --output")


class VersionFiles:
    """The files of one version: collected, and written as soon as there are enough for a file.

    Until `finish` they lie in a hidden directory beside the one that they are to have; `drop`
    removes it.

    Args:
        output: The directory of all versions.
        version: The version.
        most: Bytes of a file's tensors, which are kept in memory until it is written; a larger
            tensor has a file of its own.

    Raises:
        OutputError: The version is there already, or nothing can be written.
    """

    def __init__(self, output: Path, version: int, most: int) -> None:
        self.path: Final = output / f"version-{version}"
        self._temporary: Final = output / f".version-{version}.{os.getpid()}"
        self._most: Final = most
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        # The names in each file, in order.
        self._written: list[list[str]] = []
        self._total = 0
        # What headers and the index will have of all tensors.
        self._said = 0
        if os.path.lexists(self.path):
            raise OutputError(self.path, "is there already: move it away, or give another --output")
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise OutputError(self.path, _unwritable(error)) from None

    @property
    def files(self) -> int:
        """How many files were written."""
        return len(self._written)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor in; no view of it is kept.

        Raises:
            OutputError: safetensors has no such dtype or name, or it cannot be written.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES.values():
            raise OutputError(
                self.path, f"tensor {name!r} is {dtype}, which safetensors files cannot have"
            )
        if name == _METADATA:
            raise OutputError(
                self.path, f"tensor {name!r} has a name that safetensors files keep for themselves"
            )
        nbytes = tensor.nbytes
        if self._pending and self._pending_bytes + nbytes > self._most:
            self._flush()
        self._said += _SAID + 4 * len(name.encode())
        self._check_room(nbytes)
        self._total += nbytes
        if nbytes >= self._most:
            self._write({name: tensor})
            return
        self._pending[name] = _copy(tensor)
        self._pending_bytes += nbytes

    def finish(self) -> None:
        """Writes what is left, and gives the directory its name.

        Raises:
            OutputError: It cannot be written.
        """
        if self._pending or not self._written:
            self._flush()
        count = len(self._written)
        try:
            places: dict[str, str] = {}
            for number, names in enumerate(self._written):
                file_name = f"model-{number + 1:05}-of-{count:05}{SUFFIX}"
                if count == 1:
                    file_name = f"model{SUFFIX}"
                self._part(number).rename(self._temporary / file_name)
                places |= dict.fromkeys(names, file_name)
            if count > 1:
                index = {"metadata": {"total_size": self._total}, "weight_map": places}
                text = msgspec.json.format(msgspec.json.encode(index), indent=2)
                (self._temporary / INDEX).write_bytes(text)
            self._temporary.rename(self.path)
        except OSError as error:
            raise OutputError(self.path, _unwritable(error)) from None

    def drop(self) -> None:
        """Removes what was not finished."""
        self._pending.clear()
        with suppress(FileNotFoundError):
            shutil.rmtree(self._temporary)

    def _part(self, number: int) -> Path:
        return self._temporary / f"{number}{SUFFIX}"

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        self._write(pending)

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self._part(len(self._written))
        try:
            save_file(tensors, path, metadata={"format": "pt"})
            # The library makes files that are for nobody else; the directory has the user's mode.
            path.chmod(self._temporary.stat().st_mode & 0o666)
        except (OSError, SafetensorError) as error:
            raise OutputError(self.path, _unwritable(error)) from None
        self._written.append(list(tensors))

    def _check_room(self, nbytes: int) -> None:
        """What is only collected has no place on the disk yet, and must find one later."""
        need = self._pending_bytes + nbytes + self._said + _ROOM
        try:
            free = shutil.disk_usage(self._temporary).free
        except OSError as error:
            raise OutputError(self.path, _unwritable(error)) from None
        if free < need:
            raise OutputError(
                self.path,
                f"cannot be written: needs {size(need)} more, {size(free)} free on its disk; make"
                " room, or give another --output",
            )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """By its bytes: there are dtypes that torch itself cannot copy."""
    import torch

    flat = tensor.contiguous().view(-1).view(torch.uint8).clone()
    return flat.view(tensor.dtype).view(tensor.shape)


def _unwritable(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot be written: {said}; make room, or give another --output"
