"""Watches a loader while it loads, and notes which element of which source goes where.

Every operation that torch dispatches is seen. Copies are followed, also through tensors that the
loader makes for a while; what is worked out from a source's values is not followed, but remembered,
so that its name is not taken for one that is only copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .callback_sink import watch
from .marks import mark_of
from .strides import Axis, Span, apart, carried

_COPIES: Final = {"aten::copy_"}
_CLONES: Final = {"aten::clone", "aten::_to_copy"}
_UNWRITTEN: Final = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
"""What makes memory that nobody has written."""
_OVERWRITES: Final = {"aten::fill_", "aten::zero_"}
"""What leaves nothing of what was there before."""
_MOVES_NOTHING: Final = {"aten::is_pinned", "aten::record_stream", "aten::set_"}
# What hands out values, or where they lie, without an operation.
_ESCAPES: Final = {"__array__", "__dlpack__", "data_ptr", "numpy", "tolist", "untyped_storage"}
# Of these, and of others, what may decide what Python does next.
_DECIDES: Final = {"__array__", "__bool__", "__index__", "__int__", "numpy", "tolist"}

_OWN: Final = ("aten.", "prim.", "prims.")

Parameters = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Note(NamedTuple):
    """A strided box of a source, and where it was copied to."""

    name: str
    axes: tuple[Axis, ...]
    target: int
    """Offset in the memory that is written, in elements."""
    origin: int
    """Offset in the source, in elements."""
    dtype: torch.dtype
    """What is written."""
    converted: bool
    mark: torch.Tensor
    """Of what was written."""

    @property
    def written(self) -> Span:
        """What is written."""
        return Span(self.target, tuple((axis.size, axis.target) for axis in self.axes))


class Memory:
    """What is known of one storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # Keeps its number from being given to another, and not its bytes.
        self._watch: Final = watch(storage)
        # Others have its bytes, perhaps longer than there is a storage.
        self.lent: Final = not storage.resizable()
        self.source: str | None = None
        self.notes: list[Note] = []
        # Names, and why what they have brought here is no copy.
        self.computed: dict[str, str] = {}
        # Names of which something was ever written here; and what was copied.
        self.ever: set[str] = set()
        self.brought: dict[str, set[tuple[tuple[Axis, ...], int]]] = {}
        # Names that had been copied here when something else was written there.
        self.overwritten: set[str] = set()
        # Nothing that was seen has written it; and: it got something from such memory.
        self.unwritten = False
        self.unseen = False
        # Something was seen to write it; and where what was of no source.
        self.seen = False
        self.constants: list[Span] = []
        # The parameters that lie in it; and whether that was asked.
        self.parameters: set[str] = set()
        self.located = False

    @property
    def names(self) -> set[str]:
        """Whose values it holds."""
        names = {note.name for note in self.notes} | self.computed.keys()
        return names if self.source is None else names | {self.source}

    @property
    def alive(self) -> bool:
        """Whether something has it still."""
        return not self._watch.expired()


class Recorder:
    """What a loader does with the sources that it is given.

    Args:
        parameters: Returns the names and tensors of the model as they are when it is called.
        locate: Whether to ask for them whenever memory is written that is not known: where the
            parameters are others while they are loaded.
    """

    def __init__(self, parameters: Parameters, *, locate: bool = False) -> None:
        self._parameters = parameters
        self._locate = locate
        self._memories: dict[int, Memory] = {}
        self.sources: Final[dict[str, torch.Tensor]] = {}
        """What was given, by name, as tensors without memory."""
        self.touched: Final[set[str]] = set()
        """Names of which some value was read."""
        self.reasons: Final[dict[str, str]] = {}
        """Names that are not only copied, and why."""
        self.escaped: Final[set[str]] = set()
        """Names of which values went where they cannot be followed."""
        self.decides = ""
        """Why nothing can be repeated: what the loader does may be another thing next time."""
        # A number that Python has read, and of which sources, until an operation is given it.
        self._read: tuple[object, set[str]] | None = None
        # What the parameters had before: memory that none is seen to write must have it after.
        self._before: Final[list[tuple[Memory, torch.Tensor]]] = []
        for _, tensor, memory in self.locate():
            if not locate:
                self._before.append((memory, mark_of(tensor.detach())))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what this thread does until the block has ended."""
        with _Functions(self), _Operations(self):
            yield

    def source(self, name: str, tensor: torch.Tensor) -> None:
        """Says what a source is: a row-major tensor, with storage of its own."""
        storage = tensor.untyped_storage()
        self._memories[storage._cdata] = memory = Memory(storage)
        memory.source = name
        self.sources[name] = tensor.detach().to("meta")

    def locate(self) -> list[tuple[str, torch.Tensor, Memory]]:
        """Looks where the parameters lie now; returns those that have memory."""
        found: list[tuple[str, torch.Tensor, Memory]] = []
        for name, tensor in self._parameters():
            if has_memory(tensor):
                memory = self._memory(tensor)
                memory.parameters.add(name)
                found.append((name, tensor, memory))
        return found

    def look_back(self) -> None:
        """Looks for parameters that have changed, and that nothing was seen to write."""
        self._settle()
        now = {id(memory): tensor for _, tensor, memory in self.locate()}
        for memory, mark in self._before:
            tensor = now.get(id(memory))
            if tensor is not None and not memory.seen and bool(mark_of(tensor.detach()) != mark):
                memory.unseen = True
                memory.ever |= self.escaped  # If it was one of these; else it may be any.

    @property
    def memories(self) -> list[Memory]:
        """All that is known."""
        return list(self._memories.values())

    # ------------------------------------------------------------ what has happened

    def escape(self, tensors: Iterable[torch.Tensor], how: str) -> None:
        """Values, or the place, of these went where they cannot be followed."""
        for name in self._names_in(tensors):
            self.touched.add(name)
            self.escaped.add(name)
            self.reasons.setdefault(name, f"its values are taken by {how}")

    def decide(self, tensors: Iterable[torch.Tensor], how: str) -> None:
        """What Python does next may depend on the values of these."""
        if names := self._names_in(tensors):
            self._decided(names, how)

    def _decided(self, names: Iterable[str], how: str) -> None:
        if not self.decides:
            first = ", ".join(sorted(names)[:3])
            self.decides = f"what the loader does may depend on the values of {first} ({how})"

    def _settle(self) -> None:
        """A number was read, and no operation was given it."""
        if self._read is not None:
            self._decided(self._read[1], "a number is read")
            self._read = None

    def _number(self, given: list[torch.Tensor], out: object) -> None:
        """Python has got something of these that is no tensor."""
        names = self._names_in(given)
        if not names:
            return
        self._settle()
        if isinstance(out, bool):
            self._decided(names, "a truth value is read")
        else:
            self._read = out, names

    def require_apart(self, written: Iterable[torch.Tensor]) -> None:
        """Raises if something is to be written to a trainer's memory: others read what is there."""
        for tensor in written:
            memory = self._memories.get(_key(tensor))
            if memory is not None and memory.source is not None and memory.lent:
                raise RuntimeError(
                    f"the loader writes to {memory.source} in place, which is the trainer's memory:"
                    " clone it first"
                )

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes what one operation, that was done, has moved; raises nothing."""
        op = str(func._schema.name)
        try:
            self._operation(op, func, args, kwargs, out)
        except Exception as error:  # noqa: BLE001 - the loader must go on as without this
            if not self.decides:
                self.decides = f"{op} could not be followed ({error})"

    def _operation(self, op: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._read is not None and any(_scalars((args, kwargs), self._read[0])):
            self._read = None
        if any(map(_is_wrapped, _all_tensors((args, kwargs, out)))):
            self.escape(_tensors((args, kwargs)), "a tensor that is no plain one")
            return
        made = list(_tensors(out))
        if op in _MOVES_NOTHING or any(tensor.is_meta for tensor in made):
            return
        if op in _COPIES:
            self._copied(args[0], args[1], op)
            return
        if op == "aten::_foreach_copy_":
            for target, origin in zip(args[0], args[1], strict=True):
                self._copied(target, origin, op)
            return
        if op in _CLONES:
            self._copied(out, args[0], op)
            return
        if op == "aten::cat" and made and made[0].numel():
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            begin = 0
            for part in args[0]:
                if part.dim() == out.dim():
                    self._copied(out.narrow(axis, begin, part.shape[axis]), part, op)
                    begin += part.shape[axis]
            return
        if op == "aten::stack":
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            for place, part in enumerate(args[0]):
                self._copied(out.select(axis, place), part, op)
            return
        given = list(_tensors((args, kwargs)))
        written = [tensor for tensor in _written(func, args, kwargs) if tensor.numel()]
        if op in _UNWRITTEN:
            for tensor in made:
                self._memory(tensor).unwritten = bool(tensor.numel())
            return
        held = {_key(tensor) for tensor in given}
        new = [tensor for tensor in made if _key(tensor) not in held]
        if not written and not new and made:
            return  # A view, or an operation on nothing.
        names = self._names_in(given[1:] if op in _OVERWRITES else given)
        if not written and not new:
            if names:
                self.escape(given, op)
                if not made:
                    self._number(given, out)
            return
        self.touched.update(names)
        scalars = bool(self.escaped) and any(_scalars((args, kwargs)))
        for tensor in written:
            memory = self._memory(tensor)
            self._look_for(memory)
            if op not in _OVERWRITES:
                self._require_new(memory)
            self._written_to(memory)
            self._written_over(memory, tensor, names)
            memory.unwritten = False
            if scalars:  # Perhaps one of them was read of a source.
                memory.ever |= self.escaped
        for tensor in [*written, *new]:
            if names:
                self._compute(self._memory(tensor), names, op)

    def _compute(self, memory: Memory, names: Iterable[str], op: str) -> None:
        for name in names:
            memory.ever.add(name)
            memory.computed.setdefault(name, f"its values go through {op}")

    def _copied(self, target: torch.Tensor, origin: torch.Tensor, op: str) -> None:
        if target.is_meta or origin.is_meta:
            return
        source = self._memories.get(_key(origin))
        memory = self._memory(target)
        if op in _COPIES:
            self._look_for(memory)
        memory.unwritten = False
        if not target.numel():
            return
        if source is not None:
            self._require_new(source)
        self._written_to(memory)
        if source is not None and (source.unwritten or source.unseen):
            memory.unseen = True
        names = set() if source is None else source.names
        self.touched.update(names)
        if source is None or not names:
            self._written_over(memory, target, ())
            return
        if any(each.is_conj() or each.is_neg() for each in (target, origin)):
            self._written_over(memory, target, names)
            self._compute(memory, names, op)
            return
        if target.shape != origin.shape:
            try:
                origin = origin.expand(target.shape)
            except RuntimeError:  # copy_ leaves out axes of one place, too.
                origin = origin.view(target.shape)
        notes, lost = self._followed(source, target, origin)
        self._written_over(memory, target, {note.name for note in notes})
        for note in notes:
            memory.notes.append(note)
            memory.ever.add(note.name)
            read = tuple(Axis(axis.size, 0, axis.origin) for axis in note.axes)
            memory.brought.setdefault(note.name, set()).add((read, note.origin))
        self._compute(memory, lost, op)
        for name, reason in source.computed.items():
            memory.ever.add(name)
            memory.computed.setdefault(name, reason)

    def _followed(
        self, source: Memory, target: torch.Tensor, origin: torch.Tensor
    ) -> tuple[list[Note], set[str]]:
        """Returns what a copy brings of which sources, and names that cannot be followed."""
        axes = _axes(target, origin)
        into, out_of = int(target.storage_offset()), int(origin.storage_offset())
        same = target.dtype == origin.dtype
        if source.source is not None:
            name = source.source
            held = self.sources[name].dtype
            # As bits, or as values.
            if origin.dtype != held and not (same and origin.element_size() == held.itemsize):
                return [], {name}
            if any(not axis.origin for axis in axes):
                return [], {name}
            mark = mark_of(target)
            return [Note(name, axes, into, out_of, target.dtype, not same, mark)], set()
        notes: list[Note] = []
        lost: set[str] = set()
        view = Span(out_of, tuple((axis.size, axis.origin) for axis in axes))
        for note in source.notes:
            if apart(view, note.written):
                continue
            found = None
            held = self.sources[note.name].dtype
            if origin.element_size() == note.dtype.itemsize and (
                same
                and (not note.converted or origin.dtype == note.dtype)
                or not note.converted
                and origin.dtype == note.dtype == held
            ):
                converted = note.converted or not same
                dtype = note.dtype if note.converted else target.dtype
                found = self._through(note, view, axes, target, dtype, converted)
            if found is None:
                lost.add(note.name)
            else:
                notes.append(found)
        return notes, lost

    def _through(
        self,
        note: Note,
        view: Span,
        axes: tuple[Axis, ...],
        target: torch.Tensor,
        dtype: torch.dtype,
        converted: bool,
    ) -> Note | None:
        """Returns the note of what was copied on, of what a note had brought."""
        into = int(target.storage_offset())
        alike = all(axis.target == axis.origin for axis in axes)
        whole = view.filled == view.end - view.offset
        inside = view.offset <= note.target and note.written.end <= view.end
        if alike and whole and inside:
            found = Span(into + note.target - view.offset, note.written.axes)
        else:
            frame = [(axis.size, axis.origin, axis.target) for axis in axes]
            moved = carried(note.written, view.offset, frame)
            if moved is None:
                return self._part_of(note, view, axes, target, dtype, converted)
            found = Span(into + moved.offset, moved.axes)
        new = tuple(
            Axis(axis.size, stride, axis.origin)
            for axis, (_, stride) in zip(note.axes, found.axes, strict=True)
        )
        mark = note.mark
        if converted and not note.converted:
            mark = mark_of(_seen_as(target, found, dtype))
        return Note(note.name, new, found.offset, note.origin, dtype, converted, mark)

    def _part_of(
        self,
        note: Note,
        view: Span,
        axes: tuple[Axis, ...],
        target: torch.Tensor,
        dtype: torch.dtype,
        converted: bool,
    ) -> Note | None:
        """As `_through`, where only a part of what the note had brought was copied on."""
        frame = [(axis.size, axis.target, axis.origin) for axis in note.axes]
        origin = carried(view, note.target, frame)
        if origin is None:
            return None
        new = tuple(
            Axis(axis.size, axis.target, stride)
            for axis, (_, stride) in zip(axes, origin.axes, strict=True)
        )
        into = int(target.storage_offset())
        found = Span(into, tuple((axis.size, axis.target) for axis in axes))
        mark = mark_of(_seen_as(target, found, dtype))
        return Note(note.name, new, into, note.origin + origin.offset, dtype, converted, mark)

    def _written_to(self, memory: Memory) -> None:
        memory.seen = True
        if memory.source is not None:  # A copy of it is none of what trainers have.
            memory.computed.setdefault(memory.source, "the loader writes to it")

    def _require_new(self, memory: Memory) -> None:
        """Is void if this is what a parameter had before the load."""
        if memory.parameters and not memory.seen and not self._locate and not self.decides:
            names = ", ".join(sorted(memory.parameters))
            self.decides = f"the loader reads what {names} had before"

    def _written_over(self, memory: Memory, tensor: torch.Tensor, by: Iterable[str]) -> None:
        """What was copied there is gone; `by`: names of what is there now."""
        if not tensor.numel():
            return
        span = Span(int(tensor.storage_offset()), _span_axes(tensor))
        if memory.parameters and not by:
            memory.constants.append(span)
        if not memory.notes:
            return
        frame = [(size, stride, stride) for size, stride in span.axes]
        kept: list[Note] = []
        for note in memory.notes:
            if note.dtype.itemsize == tensor.element_size() and apart(span, note.written):
                kept.append(note)
            elif carried(note.written, span.offset, frame) is None:
                why = "something else is written where it was copied to"
                memory.computed.setdefault(note.name, why)
            elif set(by) != {note.name}:
                memory.overwritten.add(note.name)
        memory.notes = kept

    # ------------------------------------------------------------ where things lie

    def _memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(storage)
        return memory

    def _look_for(self, memory: Memory) -> None:
        """Asks for the parameters if this memory is not known to be none of them."""
        if self._locate and not memory.parameters and not memory.located:
            memory.located = True
            self.locate()

    def _names_in(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        names: set[str] = set()
        for tensor in tensors:
            memory = self._memories.get(_key(tensor))
            if memory is not None:
                names |= memory.names
        return names


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.inplace_view not in func.tags:
            self._recorder.require_apart(_written(func, args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._recorder.operation(func, args, kwargs or {}, out)
        return out


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DECIDES:
            self._recorder.decide(_tensors(args), f"{name}()")
        if name in _ESCAPES:
            self._recorder.escape(_tensors(args), f"{name}()")
        elif isinstance(func, OpOverload | OpOverloadPacket | HigherOrderOperator):
            # Of others than torch's own not all are dispatched, and some keep what they read.
            name = str(func)
            if not name.startswith(_OWN):
                self._recorder.escape(_tensors((args, kwargs)), name)
        return func(*args, **(kwargs or {}))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in _all_tensors(given) if tensor.layout is torch.strided)


def _all_tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _all_tensors(each)
    elif isinstance(given, dict):
        for each in given.values():
            yield from _all_tensors(each)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor that lies somewhere."""
    return not is_lazy(tensor) and not tensor.is_meta and not _is_wrapped(tensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is one of those that torch asks what an operation is."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def _scalars(given: Any, value: object = None) -> Iterator[bool]:
    """Yields, of all that is no list, whether it is a number; `value`: this one."""
    if isinstance(given, list | tuple):
        for each in given:
            yield from _scalars(each, value)
    elif isinstance(given, dict):
        for each in given.values():
            yield from _scalars(each, value)
    else:
        # By its text: one that is no number equals itself, too.
        number = isinstance(given, float | int | complex)
        yield number and (value is None or given == value or repr(given) == repr(value))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields what an operation writes to of what it was given."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _axes(target: torch.Tensor, origin: torch.Tensor) -> tuple[Axis, ...]:
    sizes = zip(target.shape, target.stride(), origin.stride(), strict=True)
    return tuple(Axis(size, to, by) for size, to, by in sizes if size > 1)


def _span_axes(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple((size, stride) for size, stride in sizes if size > 1)


def _seen_as(tensor: torch.Tensor, span: Span, dtype: torch.dtype) -> torch.Tensor:
    """Returns a span of the memory of a tensor, as this dtype, which has elements of its size."""
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return view_of(tensor, span)


def view_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Returns a span of the memory of a tensor."""
    sizes = [size for size, _ in span.axes]
    return tensor.detach().as_strided(sizes, [stride for _, stride in span.axes], span.offset)
