"""A model in a directory of safetensors files: checked as a whole, then read piece by piece."""

from __future__ import annotations

import io
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from tensorlease.agents.packing import cut
from tensorlease.protocol.dtypes import ITEM_SIZES
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.regions import MAX_DIMS, MAX_LENGTH, Region
from tensorlease.protocol.tables import MAX_NAME

from .file_errors import CheckpointError

if TYPE_CHECKING:
    import torch

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"

DTYPES: Final = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "U16": "uint16",
        "U32": "uint32",
        "U64": "uint64",
        "I8": "int8",
        "I16": "int16",
        "I32": "int32",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F4": "float4_e2m1fn_x2",
    }
)
"""torch's name of each dtype of the format that torch has."""

_LFS: Final = b"version https://git-lfs"
_NUMBERED: Final = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_AGAIN: Final = "fetch the file again"
_MAX_HEADER: Final = 100_000_000
"""Bytes of a header that the format's library reads at most."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    """A name of `ITEM_SIZES`."""
    shape: tuple[int, ...]
    """As torch has it."""
    offset: int
    """Where its bytes begin in the file."""

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class FileState(NamedTuple):
    """What shows that a file is another, or was written to."""

    device: int
    inode: int
    size: int
    changed_ns: int


class StoredFile(NamedTuple):
    """A file, and those of its tensors that belong to the model, in the order of their bytes."""

    path: Path
    tensors: Sequence[StoredTensor]
    state: FileState
    """What it was when it was checked."""


class Part(NamedTuple):
    """A tensor, or a box of one that is large."""

    stored: StoredTensor
    box: Region
    tensor: torch.Tensor
    """The box, of shape `box.length`; the next part is read into the same memory."""

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Global shape and start of the box; None: it is the whole tensor."""
        shape = self.stored.shape
        return None if self.box.is_whole(shape) else (shape, self.box.start)


class Checkpoint(NamedTuple):
    """All files of a model; every one of them was found to be complete."""

    files: Sequence[StoredFile]
    notes: Sequence[str]
    """What else is there, and is not part of the model."""

    @property
    def tensors(self) -> list[StoredTensor]:
        """All tensors."""
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self, most: int) -> Iterator[Part]:
        """Yields all tensors, those of more than `most` bytes in several boxes.

        They are read and not mapped: who reads a mapped file that is cut off meanwhile is killed.

        Raises:
            CheckpointError: A file has changed since it was checked.
        """
        memory = bytearray(max(most, *ITEM_SIZES.values()))
        for file in self.files:
            yield from _read(file, memory, most)
        for file in self.files:
            _require_unchanged(file)


class _Slice(Protocol):
    """What `get_slice` gives."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class _Opened(Protocol):
    """An open file."""

    def offset_keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


_open: Final[Callable[[str, str], AbstractContextManager[_Opened]]] = safe_open


class _Index(Struct):
    """The file that says which tensor is in which file."""

    weight_map: dict[str, str]


# ---------------------------------------------------------------- checking


def read_checkpoint(directory: Path) -> Checkpoint:
    """Finds a model's files, by their index if there is one, and checks the header of each.

    Raises:
        ConfigError: There is no model in the directory.
        CheckpointError: A file is missing, cut off or damaged, or a tensor cannot be sent; names
            both.
    """
    present = sorted(path for path in directory.glob(f"*{SUFFIX}"))
    index = _find_index(directory)
    if not present and index is None:
        raise ConfigError(
            f"{directory}: no *{SUFFIX} file is in it; name the directory that has the model's"
        )
    found = _without_index(present) if index is None else _by_index(index, present)
    if not found.tensors:
        raise CheckpointError(directory, "its files have no tensor")
    return found


def _find_index(directory: Path) -> Path | None:
    found = sorted(directory.glob(f"*{SUFFIX}.index.json"))
    if len(found) < 2:
        return found[0] if found else None
    if directory / INDEX in found:
        return directory / INDEX
    names = ", ".join(path.name for path in found)
    raise ConfigError(
        f"{directory}: has {len(found)} indexes ({names}), of which none is {INDEX}: leave one"
    )


def _without_index(present: list[Path]) -> Checkpoint:
    for path in present:
        if numbered := _NUMBERED.fullmatch(path.name):
            stem, _, count = numbered.groups()
            for number in range(1, int(count) + 1):
                name = f"{stem}-{number:0{len(count)}}-of-{count}{SUFFIX}"
                if not (path.parent / name).exists():
                    raise CheckpointError(
                        path.parent / name,
                        f"is missing: {path.name} says that there are {int(count)}; fetch it",
                    )
    files: list[StoredFile] = []
    homes: dict[str, Path] = {}
    for path in present:
        file = _check(path)
        for tensor in file.tensors:
            if (other := homes.setdefault(tensor.name, path)) != path:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} is in {other.name} too, and there is no {INDEX} that"
                    " says which one counts; move the file away that does not belong to the model",
                )
        files.append(file)
    return Checkpoint(files, [])


def _by_index(index: Path, present: list[Path]) -> Checkpoint:
    wanted: dict[str, set[str]] = {}
    for name, file_name in _read_index(index).items():
        if Path(file_name).name != file_name:
            raise CheckpointError(
                index, f"tensor {name!r} is said to be in {file_name!r}, which is no file's name"
            )
        wanted.setdefault(file_name, set()).add(name)
    files: list[StoredFile] = []
    notes: list[str] = []
    for file_name, names in sorted(wanted.items()):
        path = index.parent / file_name
        if not path.exists():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                path,
                f"is missing: {index.name} names it, for tensor {min(names)!r}{more}; fetch it",
            )
        file = _check(path)
        tensors = file.tensors
        if absent := sorted(names - {tensor.name for tensor in tensors}):
            raise CheckpointError(
                path,
                f"tensor {absent[0]!r} is not in it, though {index.name} says so; fetch both again",
            )
        if others := sorted(tensor.name for tensor in tensors if tensor.name not in names):
            notes.append(
                f"{path.name}: tensor {others[0]!r} is not part of the model: the index does not"
                " say that it is here" + (f"; nor are {len(others) - 1} more" * (len(others) > 1))
            )
        mine = [tensor for tensor in tensors if tensor.name in names]
        files.append(StoredFile(path, mine, file.state))
    ignored = [path.name for path in present if path.name not in wanted]
    if ignored:
        notes.append(f"not part of the model, by its index: {', '.join(ignored)}")
    return Checkpoint(files, notes)


def _read_index(index: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            index,
            f"is no index of a model: {error}; {_AGAIN}, or remove it if the *{SUFFIX} files are"
            " all of the model",
        ) from None
    except OSError as error:
        raise CheckpointError(index, f"cannot be read: {error.strerror}") from None


def _check(path: Path) -> StoredFile:
    """Returns all tensors of a file, in the order of their bytes."""
    state = _state(path)
    try:
        try:
            with _open(str(path), "pt") as opened:
                return StoredFile(path, list(_stored_in(path, opened)), state)
        except SafetensorError as error:
            raise CheckpointError(path, _diagnose(path, str(error))) from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None


def _stored_in(path: Path, opened: _Opened) -> Iterator[StoredTensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    # The format has no room between tensors.
    offset = 8 + length
    for name in opened.offset_keys():
        stored = _stored(path, name, opened.get_slice(name), offset)
        offset += stored.nbytes
        yield stored


def _stored(path: Path, name: str, piece: _Slice, offset: int) -> StoredTensor:
    kind, shape = piece.get_dtype(), tuple(piece.get_shape())
    dtype = DTYPES.get(kind)
    reason = ""
    if dtype is None:
        reason = f"has the dtype {kind}, which torch does not have; convert it to another"
    elif not 0 < len(name.encode()) <= MAX_NAME:
        reason = f"has no usable name: text of 1 to {MAX_NAME} bytes is"
    elif len(shape) > MAX_DIMS or any(length > MAX_LENGTH for length in shape):
        reason = f"has the shape {shape}, which is more than can be described"
    elif kind == "F4" and (not shape or shape[-1] % 2):
        reason = f"has the shape {shape}, whose last axis is no whole number of bytes"
    if dtype is None or reason:
        raise CheckpointError(path, f"tensor {name[:80]!r} {reason}")
    if kind == "F4":
        # The file counts numbers, torch the bytes that have two of them.
        shape = (*shape[:-1], shape[-1] // 2)
    return StoredTensor(name, dtype, shape, offset)


class _Entry(Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _diagnose(path: Path, said: str) -> str:
    """Says what is wrong with a file that the library refuses, and with which tensor."""
    said = said.rpartition("header: ")[2]
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(len(_LFS))
        if begin == _LFS:
            return "is a pointer of git-lfs, not the file itself: git lfs pull"
        if size < 8:
            return f"is no safetensors file, or cut off: it has {size} bytes; {_AGAIN}"
        (length,) = struct.unpack("<Q", begin[:8])
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            return f"is no safetensors file, or cut off in its header ({said}); {_AGAIN}"
        file.seek(8)
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {
            name: msgspec.json.decode(raw, type=_Entry, strict=True)
            for name, raw in entries.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"has a damaged header ({said}); {_AGAIN}"
    room = size - 8 - length
    for name, entry in tensors.items():
        if f"`{entry.dtype}`" in said and entry.dtype not in DTYPES:
            return (
                f"tensor {name!r} has the dtype {entry.dtype}, which safetensors does not know;"
                " a newer version may: pip install --upgrade safetensors"
            )
        if entry.dtype in DTYPES and entry.dtype != "F4":
            begin_at, end_at = entry.data_offsets
            need = prod(entry.shape) * ITEM_SIZES[DTYPES[entry.dtype]]
            if end_at - begin_at != need:
                return (
                    f"has a damaged header: tensor {name!r}, {entry.dtype} of {entry.shape}, needs"
                    f" {need} bytes and has {end_at - begin_at}; {_AGAIN}"
                )
    end, last = max(
        ((entry.data_offsets[1], name) for name, entry in tensors.items()), default=(0, "")
    )
    if end > room:
        return (
            f"is cut off: it has {size} bytes of {8 + length + end}, so that tensor {last!r} is not"
            f" whole; {_AGAIN}"
        )
    return f"has a damaged header ({said}); {_AGAIN}"


# ---------------------------------------------------------------- reading


def _state(path: Path) -> FileState:
    """Returns what shows that a file has changed; raises `CheckpointError` for what is no file."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(path, "cannot be read: it is no ordinary file")
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _require_unchanged(file: StoredFile) -> None:
    """Raises `CheckpointError` if the file is not the one that was checked."""
    if _state(file.path) != file.state:
        raise _changed(file.path)


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(path, "has changed while it was read; push it again when it is written")


def _read(file: StoredFile, memory: bytearray, most: int) -> Iterator[Part]:
    """Yields all tensors of a file, in boxes of at most `most` bytes or one element."""
    import torch

    try:
        with open(file.path, "rb", buffering=0, opener=_without_waiting) as opened:
            for stored in file.tensors:
                item, dtype = ITEM_SIZES[stored.dtype], getattr(torch, stored.dtype)
                offset = stored.offset
                for box in cut(stored.shape, item, max(most, item)):
                    nbytes = box.count * item
                    _require_unchanged(file)
                    _fill(opened, file.path, offset, memoryview(memory)[:nbytes])
                    offset += nbytes
                    flat = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
                    yield Part(stored, box, flat.view(dtype).view(box.length))
    except OSError as error:
        raise CheckpointError(file.path, f"cannot be read: {error.strerror}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; what has become a pipe in its place has nobody who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _fill(opened: io.FileIO, path: Path, offset: int, target: memoryview) -> None:
    """Reads what lies at `offset`, as much as the target has room for."""
    opened.seek(offset)
    while target:
        if not (count := opened.readinto(target)):
            raise _changed(path)
        target = target[count:]
