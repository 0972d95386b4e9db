"""Messages made from their own types: any allowed one, and those that a single field spoils."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Fields

S = TypeVar("S", bound=msgspec.Struct)

FROM_AGENT: tuple[type[Fields], ...] = m.FromAgent.__args__
FROM_BROKER: tuple[type[Fields], ...] = m.FromBroker.__args__
MESSAGES = (*FROM_AGENT, *FROM_BROKER)


def any_of(kind: type[S]) -> st.SearchStrategy[S]:
    """Returns a strategy for every allowed value of this struct; lists are short."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    fields = {field.name: _any(field.type) for field in info.fields}
    return st.builds(kind, **fields)


@cache
def any_message() -> st.SearchStrategy[Fields]:
    """Returns a strategy for every allowed message."""
    return st.one_of([any_of(kind) for kind in MESSAGES])


def _any(info: inspect.Type) -> st.SearchStrategy[object]:
    match info:
        case inspect.StructType():
            return any_of(info.cls)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(info.ge, info.le)
        case inspect.FloatType():
            low = info.gt if info.ge is None else info.ge
            return st.floats(low, info.le, exclude_min=info.ge is None)
        case inspect.StrType():
            return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 40, 40))
        case inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=info.max_length)
        case inspect.EnumType():
            return st.sampled_from(info.cls)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of([_any(each) for each in info.types])
        case inspect.ListType():
            return st.lists(_any(info.item_type), min_size=info.min_length or 0, max_size=3)
        case inspect.TupleType():
            return st.tuples(*[_any(each) for each in info.item_types])
        case _:
            raise NotImplementedError(info)


def least(kind: type[S]) -> S:
    """Returns the message of this kind with the smallest allowed value in each field."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return kind(**{field.name: _least(field.type) for field in info.fields})


def _least(info: inspect.Type) -> object:
    match info:
        case inspect.StructType():
            return least(info.cls)
        case inspect.BoolType():
            return False
        case inspect.IntType():
            return info.ge
        case inspect.FloatType():
            return 1.0
        case inspect.StrType():
            return "x" * (info.min_length or 0)
        case inspect.BytesType():
            return b"x" * (info.min_length or 0)
        case inspect.EnumType():
            return next(iter(info.cls))
        case inspect.UnionType():
            return None
        case inspect.ListType():
            return [_least(info.item_type)] * (info.min_length or 0)
        case inspect.TupleType():
            return tuple(_least(each) for each in info.item_types)
        case _:
            raise NotImplementedError(info)


def spoiled() -> Iterator[tuple[type[Fields], str, object]]:
    """Yields (message, field, value not allowed there) for every bound of every field."""
    for kind in MESSAGES:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            for value in _not_allowed(field.type):
                yield kind, field.name, value


def _not_allowed(info: inspect.Type) -> Iterator[object]:
    match info:
        case inspect.BoolType() | inspect.EnumType() | inspect.StructType():
            yield "neither"
        case inspect.IntType():
            assert info.ge is not None and info.le is not None, "a number without a range"
            yield info.ge - 1
            yield info.le + 1
            yield "1"
            yield 1.5
        case inspect.FloatType():
            yield -1.0
            yield float("nan")
            yield float("inf")
        case inspect.StrType():
            assert info.max_length is not None, "a text without a bound"
            yield "x" * (info.max_length + 1)
            if info.min_length:
                yield "x" * (info.min_length - 1)
            yield 7
            yield b"bytes"
        case inspect.ListType():
            yield "not a list"
            if info.min_length:
                yield []
            if info.max_length is not None:
                yield [_least(info.item_type)] * (info.max_length + 1)
            for value in _not_allowed(info.item_type):
                yield [value]
        case inspect.TupleType():
            yield ()
        case inspect.UnionType():
            for each in info.types:
                if not isinstance(each, inspect.NoneType):
                    yield from _not_allowed(each)
        case _:
            raise NotImplementedError(info)


def frame_with(kind: type[Fields], field: str, value: object) -> bytes:
    """Returns the frame of the least message of this kind with `value` in place of one field."""
    return msgspec.msgpack.encode(replace(least(kind), **{field: value}))
