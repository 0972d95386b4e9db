"""Shadows: copies of a trainer's tensors that workers can map, made anew at each publish.

They lie in shared memory, or in staging memory of the tensors' own GPU. The tensors themselves stay
where they are, in the trainer's own memory, on any device and in any layout; workers read the
shadow, which may have another dtype. So the tensors may be written as soon as the shadow is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from msgspec import Struct

from ..protocol.dtypes import ITEM_SIZES
from ..protocol.errors import ConfigError
from ..protocol.tables import Buffer, TensorEntry
from .casting import convert, meant, why_not
from .copying import Run, copy_runs
from .errors import ExportError
from .filling import check_memory
from .memory import ExportedMemory, MemoryKind
from .pieces import Pieces
from .placement import NamedTensors, Placed, place, text_of
from .source import Gpu, RegisteredBuffers, allocate_for, check_own, empty_buffer, entry_of, pack
from .unmoved import Unmoved

Dtypes = torch.dtype | Mapping[str, torch.dtype] | Callable[[str], torch.dtype | None]
"""The dtype of all tensors, or of each by its name; what a mapping lacks, or a function returns
None for, keeps its own."""

Beside = Callable[[int], MemoryKind] | None
"""Gives memory of a GPU for the shadows of what lies there; None: they go where all others do."""


# What torch's stubs do not say.
_copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = getattr(  # noqa: B009
    torch, "_foreach_copy_"
)


class _Copied(Struct):
    """A box of an original, and the tensor in its shadow that it is copied into."""

    placed: Placed
    dtype: torch.dtype
    tied: list[Placed]
    """Other names of the same elements, which lie there once."""
    target: torch.Tensor | None = None


class ShadowBuffers(RegisteredBuffers):
    """Shadows of registered tensors; keeps both until `close`."""

    def __init__(
        self,
        buffers: list[Buffer],
        memory: list[ExportedMemory],
        placed: list[Placed],
        copied: list[_Copied],
        dtypes: dict[str, torch.dtype],
        beside: Beside,
    ) -> None:
        super().__init__(buffers, memory, placed)
        self._beside = beside
        self._copied = copied
        self._dtypes = dtypes

    def _lie_in(self, buffers: list[Buffer], memory: list[ExportedMemory]) -> None:
        super()._lie_in(buffers, memory)
        self._places = []  # The tensors themselves lie wherever they do.

    def _made_anew(
        self, memory: MemoryKind, numbers: Iterator[int], gpu: Gpu
    ) -> tuple[list[Buffer], list[ExportedMemory]]:
        return _make(self._copied, self._placed, self._dtypes, memory, numbers, self._beside)

    @property
    def shadows(self) -> bool:
        """See `RegisteredBuffers.shadows`."""
        return True

    def check(self) -> None:
        """Raises `ExportError`, naming the tensor, if an original cannot be copied any more.

        Its data may be replaced by other data of its shape and dtype, on any device; tied tensors
        must go on being tied.
        """
        if self._are_unmoved():
            self._check_memory()
            return
        for copied in self._copied:
            _check_as_placed(copied.placed)
            for other in copied.tied:
                _check_as_placed(other)
                if _lies_at(other) != _lies_at(copied.placed):
                    raise ExportError(
                        other.name,
                        f"was one tensor with {copied.placed.name!r} when it was registered and is"
                        " none any more: close these buffers and register again",
                    )
        for empty in self._empty:
            _check_as_placed(empty)
        self._check_memory()
        given = {id(each.tensor): each.tensor for each in self._placed if each.nbytes}
        self._unmoved = Unmoved(list(given.values()))

    def _are_unmoved(self) -> bool:
        """Whether the originals are as they were when they were looked at one by one."""
        return (
            self._unmoved is not None
            and not any(each.left_behind for each in self._distributed)
            and all(each.is_as_given for each in self._empty)
            and self._unmoved.holds()
        )

    def fill(self) -> None:
        """Copies every original into its shadow, converting it where the dtypes differ.

        To be called when nobody reads the shadow; nobody may write to the originals meanwhile.

        Raises:
            ExportError: An original cannot be copied; see `check`. The shadow may be half filled.
        """
        self.check()
        copied_now = self._copied
        for device in {copied.placed.tensor.device for copied in copied_now}:
            if device.type != "cpu":
                # Another thread's stream may have written them.
                torch.accelerator.synchronize(device)
        runs: list[Run] = []
        fused: list[tuple[torch.Tensor, torch.Tensor]] = []
        # In inference mode, since tensors made in it are read as well.
        with torch.inference_mode():
            for copied in copied_now:
                source, target = copied.placed.box(), copied.target
                assert target is not None
                same = source.dtype == target.dtype and source.device == target.device
                if same and source.is_contiguous() and source.is_cuda:
                    fused.append((_flat(target), _flat(source)))
                elif same and source.is_contiguous():
                    nbytes = source.numel() * source.element_size()
                    runs.append(Run(target.data_ptr(), source.data_ptr(), nbytes))
                else:
                    convert(target, source)
            if fused:
                _copy_on_devices(fused)
            copy_runs(runs)
        for memory in {memory.device: memory for memory in self._memory}.values():
            if memory.device.type != "cpu":
                memory.written()
                # The originals may be written as soon as this returns, by any stream.
                torch.accelerator.current_stream(memory.device).synchronize()

    def close(self) -> None:
        """See `RegisteredBuffers.close`; the originals have nothing to do with it."""
        super().close()
        self._copied = []


def register_shadow(
    named_tensors: NamedTensors,
    *,
    memory: MemoryKind,
    numbers: Iterator[int],
    regions: Pieces | None = None,
    dtype: Dtypes | None = None,
    beside: Beside = None,
) -> ShadowBuffers:
    """Makes shadows of tensors, which stay where they are; nothing is copied before `fill`.

    Memory needed: the bytes of all tensors in the dtypes of their shadows, once; tied tensors
    count once.

    Args:
        named_tensors: Names and tensors, on any device; they need not be contiguous.
        memory: The kind of memory that the shadows lie in.
        numbers: Gives the number of each new buffer.
        regions: For plain tensors that are pieces of larger ones.
        dtype: The dtypes of the shadows; None: each tensor's own.
        beside: Gives the memory for shadows of tensors of a GPU.

    Raises:
        ExportError: A tensor cannot be copied, or not converted; its name, why, and the way out.
        SharedMemoryError, GpuMemoryError: There is not enough room; nothing is left behind.
    """
    placed = place(named_tensors, regions, ExportError)
    dtypes = _dtypes_of(placed, dtype)
    copied: dict[object, _Copied] = {}
    for tensor in placed:
        if not tensor.nbytes:
            continue
        check_own(tensor)
        target = dtypes[tensor.name]
        key = (_lies_at(tensor), tensor.shape, tensor.region, tensor.dtype, target)
        if key in copied:
            copied[key].tied.append(tensor)
        else:
            copied[key] = _Copied(tensor, target, [])
    every = list(copied.values())
    buffers, exported = _make(every, placed, dtypes, memory, numbers, beside)
    return ShadowBuffers(buffers, exported, placed, every, dtypes, beside)


def _make(
    every: list[_Copied],
    placed: list[Placed],
    dtypes: dict[str, torch.dtype],
    memory: MemoryKind,
    numbers: Iterator[int],
    beside: Beside,
) -> tuple[list[Buffer], list[ExportedMemory]]:
    """Makes the memory of the shadows and sets their targets, of all or none; nothing is copied."""
    exported: list[ExportedMemory] = []
    buffers: list[Buffer] = []
    targets: list[tuple[_Copied, torch.Tensor]] = []
    try:
        for kind, group, nbytes in _packed(every, memory, beside):
            number = next(numbers)
            segment = allocate_for([each.placed.name for each, _ in group], kind, nbytes, number)
            exported.append(segment)
            entries: list[TensorEntry] = []
            for each, offset in group:
                targets.append((each, _tensor_in(segment, offset, each)))
                name = str(each.dtype).removeprefix("torch.")
                entries.append(entry_of(each.placed, offset, None, name))
                entries += [entry_of(other, offset, each.placed.name, name) for other in each.tied]
            buffers.append(Buffer(number, nbytes, segment.handle, entries))
        if empty := [tensor for tensor in placed if not tensor.nbytes]:
            names = {name: str(kind).removeprefix("torch.") for name, kind in dtypes.items()}
            buffers.append(empty_buffer(next(numbers), empty, names))
    except BaseException:
        for segment in exported:
            segment.free()
        raise
    for each, target in targets:
        each.target = target
    return buffers, exported


def _packed(
    every: list[_Copied], memory: MemoryKind, beside: Beside
) -> Iterator[tuple[MemoryKind, list[tuple[_Copied, int]], int]]:
    """Yields of each segment where it is to be, what lies in it at which offset, and its bytes."""
    groups: dict[int | None, list[_Copied]] = {}
    for each in every:
        device = each.placed.device
        ordinal = device.index if beside is not None and device.type == "cuda" else None
        groups.setdefault(ordinal, []).append(each)
    for ordinal, members in groups.items():
        kind = memory if ordinal is None or beside is None else beside(ordinal)
        sizes = [each.placed.region.count * each.dtype.itemsize for each in members]
        for group, nbytes in pack(sizes):
            yield kind, [(members[index], offset) for index, offset in group], nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor: not every dtype has a copy kernel."""
    return tensor.reshape(-1).view(torch.uint8)


def _copy_on_devices(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first, by few calls for each device."""
    for device in {target.device for target, _ in pairs}:
        here = [pair for pair in pairs if pair[0].device == device]
        _copy_all([target for target, _ in here], [source for _, source in here])


def _dtypes_of(placed: list[Placed], given: Dtypes | None) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor's shadow; refuses what cannot be converted, by name."""
    if given is not None and not (isinstance(given, torch.dtype | Mapping) or callable(given)):
        raise ConfigError(
            f"dtype {given!r}: must be a torch.dtype, a dict of names and dtypes, or a function that"
            f" returns the dtype for a name, or None to keep it{meant(given)}"
        )
    if isinstance(given, Mapping):
        known = {tensor.name for tensor in placed}
        for name in given:
            if name not in known:
                raise ExportError(str(name), "has a dtype but was not given")
    found: dict[str, torch.dtype] = {}
    for tensor in placed:
        if tensor.name in found:
            continue
        held = tensor.tensor.dtype
        if given is None or isinstance(given, torch.dtype):
            wanted: object = given
        elif isinstance(given, Mapping):
            wanted = given.get(tensor.name)
        else:
            wanted = given(tensor.name)
        wanted = held if wanted is None else wanted
        if not isinstance(wanted, torch.dtype):
            raise ExportError(
                tensor.name,
                f"was given the dtype {wanted!r}, which is no torch.dtype{meant(wanted)}",
            )
        if str(wanted).removeprefix("torch.") not in ITEM_SIZES:
            raise ExportError(tensor.name, f"cannot become {wanted}, which has no byte view")
        if reason := why_not(held, wanted, tensor.device):
            raise ExportError(
                tensor.name,
                f"is {held} and cannot become {wanted}: {reason}; leave it out, or give dtype= as a"
                " function that returns None for it",
            )
        found[tensor.name] = wanted
    return found


def _lies_at(placed: Placed) -> tuple[object, ...]:
    """Returns where its elements lie; equal for tied tensors and no others."""
    tensor = placed.tensor
    return (tensor.device, placed.address, tensor.stride(), tuple(tensor.shape))


def _check_as_placed(placed: Placed) -> None:
    if placed.left_behind or not placed.is_as_given:
        raise ExportError(
            placed.name,
            f"was replaced since it was registered (now {text_of(placed.tensor)},"
            f" then {placed.dtype} of {placed.local_shape}): close these buffers and register again",
        )
    check_memory(placed)


def _tensor_in(segment: ExportedMemory, offset: int, copied: _Copied) -> torch.Tensor:
    shape = copied.placed.region.length
    nbytes = prod(shape) * copied.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device=segment.device)
    raw.set_(segment.storage(offset, nbytes))
    return raw.view(copied.dtype).view(shape)
