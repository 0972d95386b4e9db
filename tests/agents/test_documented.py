"""What a user touches says what it is: each public name, parameter, field and error of its own."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

import tensorlease
from tensorlease import agents
from tensorlease.agents.arguments import RoundOptions
from tensorlease.agents.connection import Owner
from tensorlease.agents.fence import UnchangedSpan
from tensorlease.agents.guard import Guard
from tensorlease.agents.results import Milestone, ReceiverOutcome
from tensorlease.agents.source import RegisteredBuffers
from tensorlease.protocol.errors import TensorleaseError
from tensorlease.protocol.records import Code, Holder, ReplicaResult, ReplicaState

GIVEN = [UnchangedSpan, Guard, Milestone, RegisteredBuffers]
"""What calls of the public names return."""
DATA = [RoundOptions, ReceiverOutcome, ReplicaResult, ReplicaState, Holder]
"""What they consist of, or are asked for."""
ELSEWHERE = {Code}
"""Whose members a document explains, each one (tests/test_docs_protocol.py)."""
OF_THE_AGENT = {
    "Agent.close",
    "Milestone.fail",
    "Milestone.reach",
    "RegisteredBuffers.renew",
    "RingRound.repeat",
    "RoundHandle.fail",
    "RoundHandle.note_released",
    "RoundHandle.note_stuck",
    "RoundHandle.skip",
}
"""What the agent itself calls, and the base of what its subclasses explain."""
REFERS = re.compile(r"\b(?:[Aa]s|[Ss]ee) `(?:\w+\.)?(\w+)`")
"""A docstring that leaves what it does not say to that of another."""


def exported(module: ModuleType) -> Iterator[type]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            yield value


KINDS = list(dict.fromkeys([*exported(agents), *exported(tensorlease), *GIVEN, *DATA]))


def members(kind: type) -> Iterator[tuple[str, Callable[..., object] | property]]:
    """The public methods and properties of ours, with those of its bases."""
    for base in kind.__mro__:
        if not base.__module__.startswith("tensorlease."):
            continue
        for name, member in vars(base).items():
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            public = not name.startswith("_") and name not in vars(Owner)
            if public and (inspect.isfunction(member) or isinstance(member, property)):
                yield f"{base.__name__}.{name}", member


METHODS = {
    name: member for kind in KINDS for name, member in members(kind) if name not in OF_THE_AGENT
}


def words_of(what: str, member: Callable[..., object] | property) -> str:
    """Its docstring, with that of its class and those that it refers to."""
    own = inspect.getdoc(member) or ""
    others = [m for name, m in METHODS.items() if name.rpartition(".")[2] in REFERS.findall(own)]
    return "\n".join([own, *(inspect.getdoc(other) or "" for other in others)])


def fields_of(kind: type) -> Iterator[tuple[str, str]]:
    """The fields of a class of data, or the members of an enumeration, each with its own words."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    for place, node in enumerate(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        after = body.body[place + 1] if place + 1 < len(body.body) else None
        text = after.value if isinstance(after, ast.Expr) else None
        if not name.startswith("_"):
            yield name, str(text.value) if isinstance(text, ast.Constant) else ""


def named(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_public_class_says_what_it_is_and_what_its_constructor_takes(kind: type) -> None:
    text = vars(kind).get("__doc__") or ""
    assert len(text.split()) > 3, "it says nothing of its own"
    made_by_us = kind in (agents.TrainerAgent, agents.WorkerAgent)
    if made_by_us:
        lacking = [name for name in inspect.signature(kind).parameters if not named(name, text)]
        assert lacking == []


@pytest.mark.parametrize("what", METHODS)
def test_every_public_method_says_what_it_does_and_with_what(what: str) -> None:
    member = METHODS[what]
    assert (inspect.getdoc(member) or "").strip(), "it says nothing"
    if isinstance(member, property):
        return
    parameters = [name for name in inspect.signature(member).parameters if name != "self"]
    lacking = [name for name in parameters if not named(name, words_of(what, member))]
    assert lacking == []


@pytest.mark.parametrize("what", METHODS)
def test_every_error_that_a_public_method_raises_by_itself_is_named_there(what: str) -> None:
    member = METHODS[what]
    function = member.fget if isinstance(member, property) else member
    assert function is not None
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    ours = {name for name in raised if name in ERRORS}
    assert [name for name in sorted(ours) if not named(name, words_of(what, member))] == []


def every_error(kind: type[TensorleaseError]) -> Iterator[type[TensorleaseError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


ERRORS = {kind.__name__ for kind in every_error(TensorleaseError)}


DATA_KINDS = [
    kind
    for kind in KINDS
    if (issubclass(kind, enum.Enum) and kind not in ELSEWHERE)
    or kind in DATA
    or kind in (agents.RingOptions, agents.RingStatus, agents.RoundInfo, agents.RowBlocks)
]


@pytest.mark.parametrize("kind", DATA_KINDS, ids=lambda kind: kind.__name__)
def test_every_field_and_member_says_what_it_means(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    fields = dict(fields_of(kind))
    assert fields
    assert [name for name, words in fields.items() if not words and not named(name, text)] == []
