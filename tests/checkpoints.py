"""What tests of checkpoints share: models in files, and files that are broken in each way."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def tensors(mib: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Some of every kind, and random bytes of so many MiB: three quarters in one tensor."""
    import torch

    made = torch.Generator().manual_seed(seed)
    found = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.arange(12.0).reshape(3, 4).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "eighth": torch.ones(5).to(torch.float8_e4m3fn),
        "ids": torch.arange(6).reshape(2, 3),
        "weight": torch.arange(6.0),
    }
    for part, count in (("large", 3), ("small", 1)) if mib else ():
        rows = mib * 2**20 * count // 4 // 2048
        whole = torch.randint(0, 256, (rows, 2048), dtype=torch.uint8, generator=made)
        found[part] = whole.view(torch.int16)
    return found


def save(directory: Path, files: dict[str, dict[str, Tensor]], *, index: bool = False) -> Path:
    """Writes a model's files by the library, and their index if asked to."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    places = {}
    for name, content in files.items():
        save_file(content, directory / name)
        places.update(dict.fromkeys(content, name))
    if index:
        write_index(directory, places)
    return directory


def write_index(directory: Path, places: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def two_files(directory: Path) -> dict[str, str]:
    """A good model of two files with an index; returns which tensor is where."""
    content = tensors()
    names = list(content)
    halves = {FIRST: names[:4], SECOND: names[4:]}
    files = {file: {name: content[name] for name in part} for file, part in halves.items()}
    save(directory, files, index=True)
    return {name: file for file, part in halves.items() for name in part}


class Entry(NamedTuple):
    """A tensor in a header, as it is written here by hand."""

    dtype: str
    shape: list[int]
    offsets: list[int]


def by_hand(path: Path, entries: dict[str, Entry], nbytes: int) -> None:
    """Writes a file as its header says, right or wrong."""
    header = json.dumps(
        {
            name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": e.offsets}
            for name, e in entries.items()
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))


class Broken(NamedTuple):
    """A directory that is no model."""

    make: Callable[[Path], object]
    says: tuple[str, ...]
    """Parts of the error, in order."""
    code: int = 1


def _two_files_and(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(directory: Path) -> None:
        two_files(directory)
        change(directory)

    return make


def _cut(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])


def _index_names_another(directory: Path) -> None:
    write_index(directory, two_files(directory) | {"ghost": SECOND})


def _index_leads_away(directory: Path) -> None:
    write_index(directory, two_files(directory) | {"odd": "../" + FIRST})


def _two_indexes(directory: Path) -> None:
    two_files(directory)
    (directory / INDEX).rename(directory / "x.safetensors.index.json")
    (directory / "y.safetensors.index.json").touch()


def _twice(directory: Path) -> None:
    content = tensors()
    save(directory, {"a.safetensors": content, "b.safetensors": {"odd": content["odd"]}})


def _unnumbered(directory: Path) -> None:
    content = tensors()
    save(directory, {"model-00001-of-00003.safetensors": content})


def _file(entries: dict[str, Entry], nbytes: int) -> Callable[[Path], object]:
    return lambda directory: by_hand(directory / "model.safetensors", entries, nbytes)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").write_bytes(content)


_GOOD = Entry("F32", [2], [0, 8])
_TWICE = (
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
)
BROKEN = {
    "empty directory": Broken(
        lambda directory: None, ("no *.safetensors file is in it", "name the directory"), 2
    ),
    "missing shard": Broken(
        _two_files_and(lambda d: (d / SECOND).unlink()),
        (SECOND, "is missing", INDEX, "'eighth' and 3 more", "fetch it"),
    ),
    "missing number": Broken(
        _unnumbered, ("model-00002-of-00003.safetensors", "is missing", "00001-of-00003")
    ),
    "tensor only in the index": Broken(
        _index_names_another, (SECOND, "tensor 'ghost' is not in it", INDEX, "fetch both")
    ),
    "index that leads away": Broken(_index_leads_away, (INDEX, "'odd'", "../" + FIRST)),
    "index that is none": Broken(
        _two_files_and(lambda d: (d / INDEX).write_text('{"weight_map": 3}')),
        (INDEX, "is no index", "weight_map", "fetch the file again"),
    ),
    "cut off index": Broken(
        _two_files_and(lambda d: _cut(d / INDEX, 40)), (INDEX, "is no index", "truncated")
    ),
    "several indexes": Broken(
        _two_indexes, ("2 indexes", "x.safetensors.index.json, y.safetensors.index.json"), 2
    ),
    "cut off": Broken(
        _two_files_and(lambda d: _cut(d / SECOND, (d / SECOND).stat().st_size - 1)),
        (SECOND, "is cut off", "tensor 'flags' is not whole", "fetch the file again"),
    ),
    "cut off in its header": Broken(
        _two_files_and(lambda d: _cut(d / FIRST, 50)), (FIRST, "cut off in its header")
    ),
    "cut off in its first bytes": Broken(
        _two_files_and(lambda d: _cut(d / FIRST, 5)), (FIRST, "it has 5 bytes")
    ),
    "no safetensors file": Broken(
        _bytes(b"<html><body>404 Not Found</body></html>"),
        ("model.safetensors", "is no safetensors file"),
    ),
    "pointer of git-lfs": Broken(
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ("model.safetensors", "git lfs pull"),
    ),
    "header that is no JSON": Broken(
        _bytes(struct.pack("<Q", 4) + b"{abc1234"),
        ("model.safetensors", "damaged header", "fetch the file again"),
    ),
    "wrong length of a tensor": Broken(
        _file({"b": _GOOD, "a": Entry("F32", [2, 4], [8, 16])}, 16),
        ("damaged header", "tensor 'a', F32 of [2, 4], needs 32 bytes and has 8"),
    ),
    "hole between tensors": Broken(
        _file({"b": _GOOD, "a": Entry("F32", [1], [12, 16])}, 16),
        ("model.safetensors", "damaged header", "`a`"),
    ),
    "name that comes twice in a header": Broken(
        _bytes(struct.pack("<Q", len(_TWICE)) + _TWICE + bytes(8)),
        ("model.safetensors", "damaged header", "`a`"),
    ),
    "unknown dtype": Broken(
        _file({"b": _GOOD, "a": Entry("F42", [2], [8, 16])}, 16),
        ("model.safetensors", "tensor 'a' has the dtype F42", "pip install --upgrade safetensors"),
    ),
    "dtype that torch lacks": Broken(
        _file({"a": Entry("F6_E2M3", [4], [0, 3])}, 3),
        ("model.safetensors", "tensor 'a' has the dtype F6_E2M3", "convert it"),
    ),
    "name that is too long": Broken(
        _file({"n" * 600: _GOOD}, 8), ("model.safetensors", "tensor 'nnn", "no usable name")
    ),
    "too many dimensions": Broken(
        _file({"a": Entry("F32", [1] * 20, [0, 4])}, 4),
        ("model.safetensors", "tensor 'a' has the shape (1, 1,"),
    ),
    "name in two files": Broken(
        _twice, ("b.safetensors", "tensor 'odd' is in a.safetensors too", "move the file away")
    ),
    "no tensors": Broken(_file({}, 0), ("its files have no tensor",)),
    "directory in place of a file": Broken(
        lambda d: (d / "model.safetensors").mkdir(), ("model.safetensors", "cannot be read")
    ),
}
