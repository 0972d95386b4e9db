"""All examples together reach every transition of the table and every code of the ledger.

The examples are plain functions of a desk; this module runs all of them itself, so that the
judgement does not depend on which tests were chosen, or on their order.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tensorlease.broker.ledger import ending, state
from tensorlease.broker.ledger.book import Book
from tensorlease.broker.ledger.state import AnyState, Cause, ReceiverState, Round
from tensorlease.protocol.errors import InternalError
from tensorlease.protocol.records import Code

from .harness import Desk

Example = Callable[[Desk], None]


def modules() -> list[ModuleType]:
    """Returns the modules of examples beside this one."""
    here = Path(__file__)
    names = sorted(path.stem for path in here.parent.glob("test_*.py") if path != here)
    return [importlib.import_module(f"{__package__}.{name}") for name in names]


def examples() -> list[Example]:
    """Returns every test beside this module that takes a desk and nothing else."""
    return [
        function
        for module in modules()
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("test_") and list(inspect.signature(function).parameters) == ["desk"]
    ]


@cache
def reached() -> tuple[frozenset[tuple[AnyState, Cause]], frozenset[Code]]:
    """Returns the transitions and the codes that the examples reach.

    The code that ends a round counts too: where nobody was in the round yet, only the reason in its
    result tells of it.
    """
    seen: set[tuple[AnyState, Cause]] = set()
    codes: set[Code] = set()
    fail = ending.fail

    def noting(book: Book, rnd: Round, code: Code, text: str) -> None:
        codes.add(code)
        fail(book, rnd, code, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "fail", noting)
        for example in examples():
            desk = Desk()
            example(desk)
            seen |= desk.seen
            codes |= desk.codes
    return frozenset(seen), frozenset(codes)


def codes_in_sources() -> set[Code]:
    """Returns every code that the ledger's sources name."""
    found: set[Code] = set()
    for path in sorted(Path(inspect.getfile(state)).parent.glob("*.py")):
        names = re.findall(r"\bCode\.([A-Z_]+)\b", path.read_text(encoding="utf-8"))
        found |= {Code[name] for name in names}
    return found


def unreached() -> list[tuple[AnyState, Cause]]:
    """Returns the transitions of the table that no example reaches."""
    seen, _ = reached()
    return [key for key in state.TRANSITIONS if key not in seen]


def test_every_transition_of_the_table_is_reached_by_an_example() -> None:
    assert len(examples()) > 200
    assert unreached() == []


def test_a_transition_that_no_example_reaches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bogus = (ReceiverState.OUT, Cause.VOTED)
    monkeypatch.setitem(state.TRANSITIONS, bogus, ReceiverState.VOTED)
    assert unreached() == [bogus]


def test_every_code_that_the_ledger_can_answer_is_answered_in_an_example() -> None:
    _, codes = reached()
    assert codes_in_sources() - codes == set()


def test_a_transition_that_the_table_lacks_is_an_error_that_tells_the_story(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(state.TRANSITIONS, (ReceiverState.PREPARING, Cause.BEGAN))
    desk = Desk()
    rank, member, other = desk.trainer(), desk.worker("a"), desk.worker("b")
    rank.publish(1)
    other.rejects(text="out of memory")
    with pytest.raises(InternalError, match=r"PREPARING.*its story: .*out of memory"):
        member.readies()
