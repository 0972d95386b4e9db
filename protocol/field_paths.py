"""Turns the positions in a decoding error into the names of fields.

Structs travel as arrays, so a decoder says `$[1][0][2]` where a reader needs
`buffers[0].handle`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    CollectionType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

_path: Final = re.compile(r" - at `\$((?:\[\d+\])+)`$")
_any: Final = msgspec.msgpack.Decoder()


def name_fields(kind: type[Struct], frame: bytes | memoryview, text: str) -> str:
    """Returns msgspec's error `text` about `frame` with the field's name in front.

    Args:
        kind: The struct that the frame should hold.
        frame: The frame, as it came; read again without types, only to tell members of a union
            apart.
        text: The decoder's message.
    """
    match = _path.search(text)
    if match is None:
        return text
    indexes = [int(index) for index in re.findall(r"\d+", match[1])]
    reason = text[: match.start()]
    try:
        raw: object = _any.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text
    here: Type | None = type_info(kind)
    name = ""
    for index in indexes:
        here, step = _step(here, raw, index)
        name += step
        raw = raw[index] if isinstance(raw, list) and index < len(raw) else None
    return f"{name.removeprefix('.')}: {reason}"


def _step(here: Type | None, raw: object, index: int) -> tuple[Type | None, str]:
    """Returns the type at `index` of what `here` describes, and how to write the way there."""
    if isinstance(here, UnionType):
        here = _member(here, raw)
    if isinstance(here, StructType):
        if here.tag is not None:
            if index == 0:
                return None, ".kind"
            index -= 1
        if index < len(here.fields):
            return here.fields[index].type, f".{here.fields[index].name}"
    elif isinstance(here, (CollectionType, VarTupleType)):
        return here.item_type, f"[{index}]"
    return None, f"[{index}]"


def _member(union: UnionType, raw: object) -> Type | None:
    """Returns the member of `union` that `raw` claims to be."""
    tag = raw[0] if isinstance(raw, list) and raw else None
    structs = [member for member in union.types if isinstance(member, StructType)]
    if len(structs) == 1:
        return structs[0]
    return next((member for member in structs if member.tag == tag), None)
