"""What a named tensor is: its dtype, its global shape, and the box of it that this process holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch.nn.parameter import is_lazy

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.errors import ConfigError
from ..protocol.regions import MAX_DIMS, Region, whole
from ..protocol.tables import MAX_NAME
from .errors import TensorError
from .pieces import Pieces, Place, boxes_of, mapping_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Placed(Struct, frozen=True):
    """A box of a named tensor with strided memory of its own, and its place in the global shape."""

    name: str
    tensor: torch.Tensor
    """The local tensor itself, as given; the box is all of it, or some of its rows."""
    dtype: str
    shape: tuple[int, ...]
    """The global shape."""
    region: Region

    contiguous: bool
    """Whether the box's elements lie in row-major order without gaps."""
    device: torch.device
    local_shape: tuple[int, ...]
    """Shape of the local tensor."""
    first_row: int = 0
    """The row of the local tensor at which the box begins."""
    distributed: DTensor | None = None
    """The DTensor whose local tensor it was when it was given."""
    own: bool = False
    """Whether nobody else has the tensor, a view that was made for this."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return self.region.count * ITEM_SIZES[self.dtype]

    @property
    def is_part(self) -> bool:
        """Whether the local tensor has other boxes too."""
        return self.local_shape != self.region.length

    @property
    def bytes_offset(self) -> int:
        """Where the box begins in the tensor's storage, in bytes."""
        offset = int(self.tensor.storage_offset())
        if self.first_row:
            offset += self.first_row * self.tensor.stride(0)
        return offset * ITEM_SIZES[self.dtype]

    @property
    def address(self) -> int:
        """Where the box begins in memory now: the tensor may have been given other memory."""
        address = self.tensor.data_ptr()
        if self.first_row:
            address += self.first_row * self.tensor.stride(0) * ITEM_SIZES[self.dtype]
        return address

    @property
    def left_behind(self) -> bool:
        """Whether its DTensor looks elsewhere by now, or otherwise, so that nobody looks at this one."""
        if self.distributed is None:
            return False
        with torch.no_grad():
            local = self.distributed.to_local()
        return local is not self.tensor and _look_of(local) != _look_of(self.tensor)

    @property
    def is_as_given(self) -> bool:
        """Whether its tensor has the dtype and shape that it had, and is plain memory, anywhere."""
        tensor = self.tensor
        return (
            str(tensor.dtype) == f"torch.{self.dtype}"
            and tuple(tensor.shape) == self.local_shape
            and not (tensor.is_conj() or tensor.is_neg())
            and not _is_wrapper(tensor)
        )

    @property
    def has_memory(self) -> bool:
        """Whether its tensor's storage has all that it looks at: one may be shrunk under it."""
        tensor = self.tensor
        if not tensor.numel():
            return True
        end = tensor.storage_offset() + reach_of(tensor.shape, tensor.stride())
        return end * tensor.element_size() <= tensor.untyped_storage().nbytes()

    def box(self) -> torch.Tensor:
        """Returns the box as a tensor, of shape `region.length`, which has no part in autograd."""
        tensor = self.tensor.detach()
        if not self.is_part:
            return tensor
        return tensor.narrow(0, self.first_row, self.region.length[0])


def reach_of(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the elements from a box's first to its last, with what lies between them."""
    return 1 + sum((n - 1) * step for n, step in zip(lengths, strides, strict=True))


def holds_pieces(placed: Iterable[Placed]) -> bool:
    """Whether of any name less than the whole global shape is there."""
    lacking: dict[str, int] = {}
    for box in placed:
        lacking[box.name] = lacking.get(box.name, prod(box.shape)) - box.region.count
    return any(lacking.values())


def place(
    named_tensors: NamedTensors, regions: Pieces | None, error: type[TensorError]
) -> list[Placed]:
    """Returns what each tensor is, in order: one box, or several of one name for row blocks.

    Args:
        named_tensors: Names and tensors, or DTensors, whose local tensors are meant.
        regions: For plain tensors that are pieces: their place.
        error: What to raise for a tensor that cannot take part; it names the tensor.
    """
    pieces = mapping_of(regions)
    placed: list[Placed] = []
    names: set[str] = set()
    for name, tensor in pairs_of(named_tensors):
        check_tensor_name(name, error)
        if name in names:
            raise error(name, "was given twice: give each tensor a name of its own")
        names.add(name)
        placed += place_one(name, tensor, pieces.pop(name, None), error)
    for name in pieces:
        raise error(
            str(name),
            "has a region but was not given: regions= has the names under which the tensors are"
            " given",
        )
    return placed


def pairs_of(named_tensors: object) -> list[tuple[str, torch.Tensor]]:
    """Returns names and tensors; raises `ConfigError` for what has none."""
    if isinstance(named_tensors, torch.nn.Module):
        return list(tensors_of(named_tensors).items())
    given = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if isinstance(given, Iterable) and not isinstance(given, torch.Tensor | str):
        pairs = list(given)
        if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            return [(name, tensor) for name, tensor in pairs]
    raise ConfigError(
        f"a {type(named_tensors).__name__} is no names and tensors: give a model, or a dict of them"
    )


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters, and the buffers that its state has, by each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def check_tensor_name(name: object, error: type[TensorError]) -> None:
    """Raises `error` unless a tensor can have this name."""
    if isinstance(name, str) and name.isascii() and 0 < len(name) <= MAX_NAME:
        return  # nearly all of them
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME:
            return
    except UnicodeEncodeError:
        pass  # lone surrogates, which UTF-8 does not have
    it_is = "" if isinstance(name, str) else f"name {name!r} is of type {type(name).__name__}, and "
    raise error(str(name), f"has no usable name: {it_is}text of 1 to {MAX_NAME} bytes is")


def place_one(
    name: str, tensor: torch.Tensor, given: Place | None, error: type[TensorError]
) -> list[Placed]:
    """Returns what one tensor is; see `place`. `given`: where it lies, for a plain piece."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        hint = ": torch.from_numpy makes one that shares its memory" if kind == "ndarray" else ""
        raise error(name, f"is a {kind}, not a torch.Tensor{hint}")
    if is_lazy(tensor):
        raise error(name, "is not initialised yet: run the module once first")
    if tensor.dim() > MAX_DIMS:
        raise error(name, f"has {tensor.dim()} dimensions; {MAX_DIMS} can be described")
    distributed = as_dtensor(tensor)
    if distributed is not None:
        if given is not None:
            raise error(name, "is a DTensor, which says its region itself: leave it out of regions")
        shape = tuple(distributed.shape)
        boxes = [_shard_of(name, distributed, error)]
        with torch.no_grad():  # else to_local makes a new tensor for the graph
            tensor = distributed.to_local()
    elif given is not None:
        shape, boxes = boxes_of(name, given, tuple(tensor.shape), error)
    else:
        shape = tuple(tensor.shape)
        boxes = [whole(shape)]
    dtype = _check_kind(name, tensor, error)
    local = tuple(tensor.shape)
    if len(boxes) == 1 and local != boxes[0].length:
        raise error(name, f"has the local shape {local}, its placement says {boxes[0].length}")
    placed: list[Placed] = []
    row = 0
    for box in boxes:
        part = tensor if len(boxes) == 1 else tensor.detach().narrow(0, row, box.length[0])
        contiguous = part.is_contiguous()
        placed.append(
            Placed(
                name,
                tensor,
                dtype,
                shape,
                box,
                contiguous,
                tensor.device,
                local,
                row,
                distributed,
            )
        )
        row += box.length[0] if box.length else 0
    return placed


def _check_kind(name: str, tensor: torch.Tensor, error: type[TensorError]) -> str:
    """Returns the dtype's name; raises `error` unless the tensor is plain strided memory."""
    if tensor.is_meta:
        raise error(name, "is on the meta device and has no bytes: load or initialise it first")
    # A class of its own dispatch keeps its bytes elsewhere (several tensors, or none at all).
    # One that only overrides functions, as engines' parameters do, is plain memory.
    if _is_wrapper(tensor):
        raise error(
            name,
            f"is a {type(tensor).__name__}, whose memory is not its own: give its inner tensors, each"
            " under a name",
        )
    if tensor.is_quantized:
        raise error(
            name, "is quantized: give its int_repr() and its scales as tensors of their own"
        )
    if tensor.layout is not torch.strided:
        raise error(
            name, f"has the layout {tensor.layout}: give its indices and values as plain tensors"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise error(
            name, "is a lazy conjugate or negative: call .resolve_conj().resolve_neg() first"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise error(name, f"has the dtype {tensor.dtype}, which has no byte view: convert it first")
    return dtype


def text_of(tensor: torch.Tensor) -> str:
    """Returns what a tensor is, for a message that says what it is no more."""
    kind = f" in a {type(tensor).__name__}" if _is_wrapper(tensor) else ""
    lazily = ", conjugated or negated lazily" if tensor.is_conj() or tensor.is_neg() else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)}{kind}{lazily}"


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return _dispatch_of(type(tensor)) is not _dispatch_of(torch.Tensor)


def _dispatch_of(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _look_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns where a tensor lies, and all that says which values it has there."""
    address = tensor.data_ptr() if tensor.numel() else None
    steps = None if tensor.is_contiguous() else tensor.stride()
    lazily = (tensor.is_conj(), tensor.is_neg())
    return (address, tensor.dtype, tensor.shape, steps, lazily)


def as_dtensor(tensor: torch.Tensor) -> DTensor | None:
    """Returns the tensor, if it is one of several ranks'."""
    # Whoever has made a DTensor has imported its module; nobody else need pay for it.
    if "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def _shard_of(name: str, tensor: DTensor, error: type[TensorError]) -> Region:
    """Returns the box that this rank holds of a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in tensor.placements:
        # Exact types: an interleaved shard is a Shard to isinstance in some releases of torch,
        # and its rows are no box.
        if type(placement) not in (Shard, Replicate):
            raise error(
                name,
                f"has the placement {placement}, which is no box of its global shape:"
                " redistribute it to Shard and Replicate first",
            )
    if tensor.device_mesh.get_coordinate() is None:
        raise error(name, "is a DTensor of a device mesh that this rank is not part of")
    lengths, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    # An empty shard's offset may lie past the end; an empty box may begin anywhere inside.
    shape = tuple(tensor.shape)
    begin = tuple(min(start, size) for start, size in zip(starts, shape, strict=True))
    return Region(begin, tuple(lengths))
