"""docs/protocol.md says what the code does: compared table by table, edge by edge, byte by byte.

Run as a script, it prints the parts of the document that follow from the code: the graphs of the
ledger's states, and the bytes of the examples.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import Meta, Struct

from tensorlease.agents.core import Identity
from tensorlease.agents.trainer_core import Call, TrainerCore
from tensorlease.agents.work import AbortWork, CommitWork, CopyWork, PrepareWork
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.broker.config import Limits
from tensorlease.broker.ledger import state as ledger
from tensorlease.protocol import dtypes, handles, limits, records, regions, tables
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import decode_from_agent, decode_from_broker, encode
from tensorlease.protocol.errors import RefusedError
from tensorlease.protocol.records import (
    Code,
    Distribution,
    Durations,
    Outcome,
    Phase,
    Process,
    ReceiverId,
    RoundResult,
    TakeNote,
    Tally,
    Terms,
)
from tensorlease.protocol.tables import Buffer, OfferBody, TensorEntry, decode_offer, encode_body

T = TypeVar("T")

PATH = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"

MESSAGES: dict[str, type[Struct]] = {
    kind.__name__: kind for union in (m.FromAgent, m.FromBroker) for kind in get_args(union)
}
COMMON: dict[type[Struct], tuple[str, ...]] = {
    m.AgentMessage: ("session",),
    m.BrokerMessage: ("epoch", "to"),
}
"""Bases whose fields the document explains once, for all of their messages."""


def kinds(module: ModuleType, base: type[T]) -> Iterator[type[T]]:
    """The classes of a module that are made of `base`."""
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            yield found


LEDGER_ENUMS: tuple[type[Enum], ...] = (
    ledger.PeerState,
    ledger.RoundState,
    ledger.ReceiverState,
    ledger.LeaseState,
    ledger.Cause,
)
BODIES: tuple[type[Struct], ...] = (
    TensorEntry,
    Buffer,
    OfferBody,
    tables.BatchBody,
    tables.TagsBody,
    tables.TagsOf,
    regions.Region,
    handles.ShmHandle,
    handles.CudaIpcHandle,
)
RECORDS: dict[str, type[Struct]] = {
    kind.__name__: kind for kind in (*kinds(records, records.Fields), *BODIES)
}
ENUMS: dict[str, type[Enum]] = {
    kind.__name__: kind for kind in (*kinds(records, Enum), *LEDGER_ENUMS)
}
GRAPHS: dict[str, type[Enum]] = {
    kind.__name__: kind for kind in LEDGER_ENUMS if kind is not ledger.Cause
}
CONSTANTS = {
    "PROTOCOL_VERSION": limits.PROTOCOL_VERSION,
    "MAX_ENVELOPE_BYTES": limits.MAX_ENVELOPE_BYTES,
    "MAX_BODY_BYTES": limits.MAX_BODY_BYTES,
    "MAX_TEXT": limits.MAX_TEXT,
    "MAX_ENTRIES": tables.MAX_ENTRIES,
    "MAX_BUFFERS": tables.MAX_BUFFERS,
    "MAX_NAME": tables.MAX_NAME,
    "MAX_DIMS": regions.MAX_DIMS,
    "MAX_LENGTH": regions.MAX_LENGTH,
    "window": ledger.Settings().window,
    "max-agents": Limits().max_agents,
    "max-body-bytes": Limits().max_body_bytes,
    "max-offer-bytes": Limits().max_offer_bytes,
    "max-queue-messages": Limits().max_queue_messages,
    "max-queue-bytes": Limits().max_queue_bytes,
}

# ---------------------------------------------------------------- reading the document


def sections(text: str) -> dict[str, str]:
    """The text below each heading, by the heading; that of deeper headings is not part of it."""
    found: dict[str, str] = {}
    for block in re.split(r"^#{1,6} ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = block.partition("\n")
        assert title not in found, f"two headings {title!r}"
        found[title] = rest
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in a section, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def edges(text: str) -> list[tuple[str, str, str]]:
    """(from, to, label) of each arrow of a section's graph, but for those from the start."""
    found = re.findall(r"^    (\S+) --> (\S+): (.+)$", text, flags=re.MULTILINE)
    return [(a, b, label) for a, b, label in found]


@pytest.fixture(scope="module")
def document() -> str:
    return PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def doc(document: str) -> dict[str, str]:
    return sections(document)


# ---------------------------------------------------------------- reading the code


def number(value: object) -> str:
    """A bound as people write it."""
    if not isinstance(value, int):
        return f"{value:g}"
    if value < 2**31 - 1:
        return str(value)
    power = (value + 1).bit_length() - 1
    return f"2^{power}-1" if value == 2**power - 1 else f"2^{value.bit_length() - 1}"


def sized(value: int) -> str:
    """A limit as people write it."""
    mib = value // 2**20
    return f"{mib} MiB" if 0 < mib < 2**20 and value == mib * 2**20 else number(value)


def described(kind: Any) -> str:
    """What a type looks like on the wire; structs and enums say it by their name."""
    arguments = get_args(kind)
    if hasattr(kind, "__metadata__"):
        (meta,) = kind.__metadata__
        assert isinstance(meta, Meta)
        return bounded(described(arguments[0]), meta)
    if type(None) in arguments:
        return " or ".join(described(a) for a in arguments if a is not type(None)) + "?"
    if get_origin(kind) is list or arguments[1:] == (...,):
        return f"[{described(arguments[0])}]"
    if get_origin(kind) is tuple:
        return f"({', '.join(described(a) for a in arguments)})"
    if arguments:
        return " or ".join(described(a) for a in arguments)
    return {int: "integer", float: "float", str: "text", bytes: "bytes", bool: "boolean"}.get(
        kind, getattr(kind, "__name__", "?")
    )


def bounded(what: str, meta: Meta) -> str:
    low, high = meta.min_length, meta.max_length
    if what.startswith("["):
        return f"{what}, {low} to {high}" if low else f"{what}, at most {high}"
    if what in ("text", "bytes"):
        unit = " characters" if what == "text" else ""
        if meta.pattern is not None:
            pattern = meta.pattern.replace(r"\Z", "$").replace("|", r"\|")
            return f"text of the form `{pattern}`"
        if low == high:
            return f"{what} of {low}{unit}"
        return f"{what} of {low or 0} to {high}{unit}"
    assert meta.le is not None
    if meta.gt is not None:
        return f"{what} above {number(meta.gt)}, at most {number(meta.le)}"
    assert meta.ge is not None
    return f"{what} {number(meta.ge)} to {number(meta.le)}"


def code_types(named: Mapping[str, Any]) -> dict[str, str]:
    """The description of each type that has a name in the code."""
    return {name: described(kind) for name, kind in named.items()}


def expanded(text: str, types: Mapping[str, str]) -> str:
    """A type as the document writes it, with the names of its types table put in."""
    return re.sub(r"\w+", lambda found: types.get(found[0], found[0]), text)


def default_of(field: msgspec.structs.FieldInfo) -> str | None:
    """A field's default as the document writes it; None: it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return "[]"
    value = field.default
    if value is msgspec.NODEFAULT:
        return None
    if value is None:
        return "nil"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)


def expected_rows(kind: type[Struct]) -> list[tuple[str, str, str]]:
    """(position, field, type) of each field that a struct's own table has to have."""
    hidden = next((names for base, names in COMMON.items() if issubclass(kind, base)), ())
    hints = get_type_hints(kind, include_extras=True)
    first = 1 if kind.__struct_config__.tag else 0
    found = []
    for position, field in enumerate(msgspec.structs.fields(kind), first):
        if field.name not in hidden:
            default = default_of(field)
            text = described(hints[field.name]) + (f" = {default}" if default else "")
            found.append((str(position), f"`{field.name}`", text))
    return found


def written_rows(text: str, types: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = []
    for position, name, kind, meaning in rows(text):
        assert meaning, f"{name} has no meaning"
        kind, equals, default = kind.partition(" = ")
        found.append((position, name, expanded(kind, types) + equals + default))
    return found


# ---------------------------------------------------------------- examples


EXAMPLE_EPOCH = "00000000000000b1"
EXAMPLE_WORKER = "00000000000000a1"
EXAMPLE_TRAINER = "00000000000000c1"


def example_messages() -> dict[str, m.FromAgent | m.FromBroker]:
    """The messages whose bytes the document shows."""
    return {
        "worker-hello": m.WorkerHello(
            session=1,
            protocol=(1, 1),
            instance=EXAMPLE_WORKER,
            channel="policy",
            replica="r0",
            member=0,
            size=1,
            host="8c0f5b3e-2f52-4ad6-9b31-5ad0a1f3f7c2",
            device="cpu:0",
            processes=[Process(4242, 1234567, 4026531836)],
            locked=True,
            software="raw 1",
            version=0,
            torn=False,
            committed=None,
            round=None,
            out=[],
            mappings=[],
            take=TakeNote([], [], False, []),
        ),
        "welcome": m.Welcome(
            EXAMPLE_EPOCH,
            EXAMPLE_WORKER,
            1,
            1,
            f"group#{EXAMPLE_TRAINER[:8]}",
            6,
            6,
            Durations(),
            64,
            64 * 2**20,
        ),
        "staged": m.Staged(
            1, f"group#{EXAMPLE_TRAINER[:8]}", 7, 0, 0, True, [], Tally(99, 1, ["extra"])
        ),
    }


def example_body() -> bytes:
    """The body whose bytes the document shows."""
    name = f"tensorlease-1000-4100-1234000-4026531836-{EXAMPLE_TRAINER[:8]}-0"
    entries = [
        TensorEntry("w", "float32", (4, 2), regions.Region((2, 0), (2, 2)), 0),
        TensorEntry("b", "bfloat16", (3,), None, 16),
    ]
    return encode_body(OfferBody([Buffer(0, 64, handles.ShmHandle(name, 64), entries)]))


def make_example(tag: str) -> tuple[bytes, object]:
    """The frame of an example, and what it decodes to without any schema."""
    frame = example_body() if tag == "offer body" else encode(example_messages()[tag])
    return frame, msgspec.msgpack.decode(frame)


def pretty(value: object) -> str:
    """The decoded array, a field a line."""
    assert isinstance(value, list)
    return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n]"


# ---------------------------------------------------------------- tests of the tables


def test_every_message_is_documented_with_its_tag_and_no_other_is(doc: dict[str, str]) -> None:
    written = {
        (found[2], found[1])
        for title in doc
        if (found := re.fullmatch(r"`([a-z-]+)` \((\w+)\)", title))
    }
    assert written == {(name, str(kind.__struct_config__.tag)) for name, kind in MESSAGES.items()}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_messages_fields_types_and_order_are_documented(
    doc: dict[str, str], types: dict[str, str], name: str
) -> None:
    kind = MESSAGES[name]
    text = doc[f"`{kind.__struct_config__.tag}` ({name})"]
    assert written_rows(text, types) == expected_rows(kind)
    assert f"**{'body' if kind in m.WITH_BODY else 'no body'}**" in text


@pytest.mark.parametrize("name", RECORDS)
def test_a_records_fields_types_and_order_are_documented(
    doc: dict[str, str], types: dict[str, str], name: str
) -> None:
    assert written_rows(doc[name], types) == expected_rows(RECORDS[name])


@pytest.mark.parametrize("name", ENUMS)
def test_an_enums_values_are_documented(doc: dict[str, str], name: str) -> None:
    table = rows(doc[name])
    assert [value for value, _ in table] == [f"`{member.value}`" for member in ENUMS[name]]
    assert all(meaning for _, meaning in table)


def test_common_fields_are_documented(doc: dict[str, str]) -> None:
    written = [(who, position, field) for who, position, field, *_ in rows(doc["Common fields"])]
    assert written == [
        ("agents", "1", "`session`"),
        ("broker", "1", "`epoch`"),
        ("broker", "2", "`to`"),
    ]
    assert m.AgentMessage.__struct_fields__ == ("session",)
    assert m.BrokerMessage.__struct_fields__ == ("epoch", "to")


@pytest.fixture(scope="module")
def types(doc: dict[str, str]) -> dict[str, str]:
    return {row[0]: row[1] for row in rows(doc["Types"])}


def test_the_types_have_the_ranges_of_the_code(types: dict[str, str]) -> None:
    for name, text in types.items():
        for module in (limits, records, tables, regions, handles):
            if hasattr(module, name):
                assert text == described(getattr(module, name)), name
                break


def test_dtypes_and_their_sizes_are_documented(doc: dict[str, str]) -> None:
    written = {
        name.strip("` "): int(size)
        for size, names in rows(doc["Dtypes"])
        for name in names.split(",")
    }
    assert written == dict(dtypes.ITEM_SIZES)


def test_limits_are_documented_with_their_values(doc: dict[str, str]) -> None:
    written = [(name.strip("`"), value) for name, value, _ in rows(doc["Sizes"])]
    assert written == [(name, sized(value)) for name, value in CONSTANTS.items()]


def test_words_in_code_type_are_words_of_the_code(document: str, types: dict[str, str]) -> None:
    prose = re.sub(r"```.*?```", "", document, flags=re.DOTALL)
    known = {*MESSAGES, *RECORDS, *ENUMS, *types}
    for word in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`", prose):
        assert word in known, word
    values = {str(member.value) for kind in ENUMS.values() for member in kind}
    values |= {str(kind.__struct_config__.tag) for kind in MESSAGES.values()}
    values |= {str(handles.ShmHandle.__struct_config__.tag), "cuda-ipc", *CONSTANTS}
    values |= {"allowed-uids", "socket-group", "on-stuck"}
    for word in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", prose):
        assert word in values, word


# ---------------------------------------------------------------- tests of the graphs


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_has_the_edges_of_the_ledgers_table_and_no_other(
    doc: dict[str, str], name: str
) -> None:
    expected = {
        (str(old.value), str(new.value), cause.value)
        for (old, cause), new in ledger.TRANSITIONS.items()
        if isinstance(old, GRAPHS[name])
    }
    written = edges(doc[name])
    assert len(set(written)) == len(written)
    assert set(written) == expected


def identity() -> Identity:
    return Identity(EXAMPLE_WORKER, "policy", "host", "cpu:0", [Process(1, 1)], False, "test")


def welcome(session: int) -> m.Welcome:
    return m.Welcome(EXAMPLE_EPOCH, EXAMPLE_WORKER, session, 1, "g#1", 0, 0, Durations(), 4, 4096)


def walk_of_a_worker(dice: random.Random) -> Iterator[tuple[str, str]]:
    """The changes of phase of one worker to which anything happens in any order."""
    core = WorkerCore(identity(), "r0", 0, 1)
    me = (EXAMPLE_EPOCH, EXAMPLE_WORKER)
    core.hello()
    core.receive(welcome(1))
    listed = [ReceiverId(EXAMPLE_WORKER, "r0", 0, [Process(1, 1)])]
    total = dice.choice((0, 1, 1))

    def report() -> None:
        work, ok = core.running, dice.random() < 0.8
        if work is None:
            core.next_work()
        elif isinstance(work, PrepareWork):
            core.prepared(ok, covered=dice.random() < 0.3)
        elif isinstance(work, CopyWork):
            core.copied(ok, covered=dice.random() < 0.7)
        elif isinstance(work, CommitWork):
            core.committed(ok)
        elif isinstance(work, AbortWork):
            core.aborted()

    for _ in range(14):
        before = core.phase.value
        call = dice.choice((1, 1, 1, 2))
        match dice.randrange(9):
            case 0:
                core.receive(m.Prepare(*me, "g#1", call, Terms(call), listed))
            case 1 if total:
                core.receive(
                    m.Deliver(*me, "g#1", call, 0, 0, EXAMPLE_TRAINER, [0], True, 8, total=1)
                )
            case 2:
                core.receive(m.Total(*me, "g#1", call, total))
            case 3:
                core.receive(m.Commit(*me, "g#1", call))
            case 4 if dice.random() < 0.4:
                core.receive(m.Abort(*me, "g#1", call, Code.VOID, ""))
            case 5 if dice.random() < 0.2:
                core.withdraw("tired")
            case _:
                report()
        core.take_effects()
        if core.phase.value != before:
            yield before, core.phase.value


def test_the_graph_of_a_workers_phases_has_the_edges_that_its_core_takes(
    doc: dict[str, str],
) -> None:
    dice = random.Random(5)
    taken = set(itertools.chain.from_iterable(walk_of_a_worker(dice) for _ in range(6000)))
    written = {(a, b) for a, b, _ in edges(doc["The worker's phases"])}
    assert written == taken
    assert {state for edge in taken for state in edge} == {phase.value for phase in Phase}
    assert [name for name, _ in rows(doc["The worker's phases"])] == [
        f"`{phase.value}`" for phase in Phase
    ]


def state_of(call: Call | None) -> str:
    """The state of a trainer's call, as the document names it."""
    if call is None:
        return "forgotten"
    if call.refused:
        return "refused"
    if call.result is not None:
        return "ended" if call.released else "held"
    return "open" if call.total is None else "closed"


def walk_of_a_trainer(dice: random.Random) -> Iterator[tuple[str, str]]:
    """The changes of state of a trainer's calls."""
    core = TrainerCore(identity(), 0, 1, "", Distribution.COLOCATED)
    me = (EXAMPLE_EPOCH, EXAMPLE_WORKER)
    core.hello()
    core.receive(welcome(1))
    for _ in range(14):
        before = {number: state_of(call) for number, call in core.state.calls.items()}
        call = max(core.state.calls, default=1)
        try:
            match dice.randrange(7):
                case 0:
                    core.open(Terms(call + 1))
                case 1:
                    core.batch(call, [0], registered=True, nbytes=8, last=dice.random() < 0.5)
                case 2:
                    core.close(call)
                case 3:
                    core.receive(m.Release(*me, call, 0))
                case 4 if dice.random() < 0.3:
                    result = RoundResult("g#1", call, 1, Outcome.FAILED, "", [], [])
                    core.receive(m.Finished(*me, result))
                case 5 if dice.random() < 0.3:
                    core.receive(m.OpenRefused(*me, call, Code.NO_ROUND, "", 0, 0))
                case _:
                    core.void(call)
                    core.receive(m.Voided(*me, call, False))
        except RefusedError:
            continue
        for number, old in before.items():
            new = state_of(core.state.calls.get(number))
            if old != new:
                yield old, new


def test_the_graph_of_a_trainers_calls_has_the_edges_that_its_core_takes(
    doc: dict[str, str],
) -> None:
    dice = random.Random(5)
    taken = set(itertools.chain.from_iterable(walk_of_a_trainer(dice) for _ in range(4000)))
    written = {(a, b) for a, b, _ in edges(doc["The trainer's calls"])}
    assert written == taken
    states = {state for edge in taken for state in edge}
    assert {name.strip("`") for name, _ in rows(doc["The trainer's calls"])} == states


# ---------------------------------------------------------------- tests of the examples


@pytest.mark.parametrize("tag", ["worker-hello", "welcome", "staged", "offer body"])
def test_an_examples_bytes_decode_to_what_is_written_below_them(
    doc: dict[str, str], tag: str
) -> None:
    text = doc[f"Example: {tag}"]
    written = re.search(r"```hex\n(.*?)```", text, flags=re.DOTALL)
    decoded = re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert written is not None
    assert decoded is not None
    frame = bytes.fromhex(written[1])
    assert msgspec.msgpack.decode(frame) == json.loads(decoded[1])
    if tag == "offer body":
        assert encode_body(decode_offer(frame)) == frame
    elif tag == "welcome":
        assert encode(decode_from_broker(frame)) == frame
    else:
        assert encode(decode_from_agent(frame)) == frame
    assert frame == make_example(tag)[0]


def test_links_within_the_document_lead_to_its_headings(document: str, doc: dict[str, str]) -> None:
    anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in doc}
    links = re.findall(r"\]\(#([^)]+)\)", document)
    assert links
    assert set(links) <= anchors


def main() -> None:
    for kind in GRAPHS.values():
        sys.stdout.write(f"{kind.__name__}\n")
        for (old, cause), new in ledger.TRANSITIONS.items():
            if isinstance(old, kind):
                sys.stdout.write(f"    {old.value} --> {new.value}: {cause.value}\n")
    for tag in (*example_messages(), "offer body"):
        frame, decoded = make_example(tag)
        sys.stdout.write(f"{tag}\n{frame.hex()}\n{pretty(decoded)}\n")


if __name__ == "__main__":
    main()
