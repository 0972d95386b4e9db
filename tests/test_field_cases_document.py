"""docs/field-cases.md names tests that exist, for each case."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")
CASES = [
    "C02",
    "C03",
    "C05",
    "C06",
    "C08",
    "C09",
    "C10",
    "C11",
    "C12",
    "C13",
    "C14",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
    "C22",
    "C23",
    "C24",
    "C25",
    "C26",
    "C27",
    "C28",
    "C29",
    "C30",
    "C31",
    "C32",
    "C34",
    "C35",
    "C36",
    "C37",
    "C39",
    "C40",
    "C41",
    "C42",
    "C43",
    "C44",
    "C45",
    "C46",
    "C47",
    "C49",
    "C50",
    "C51",
    "C52",
    "C53",
    "C54",
    "C56",
    "C57",
    "C58",
    "C60",
    "C61",
    "C62",
    "C64",
    "C65",
    "C67",
    "C68",
    "C69",
    "C70",
    "C71",
    "C72",
    "C73",
    "C74",
    "C76",
    "C78",
    "C79",
    "C80",
    "C81",
    "C82",
    "C83",
    "C85",
    "C87",
    "C88",
    "C89",
]


def rows() -> dict[str, list[tuple[str, str]]]:
    """Each case, and the file and name of each test of its row."""
    found = {}
    for line in TEXT.splitlines():
        if case := re.match(r"\| (C\d\d): ", line):
            found[case[1]] = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line)
    return found


def defined_in(path: Path) -> set[str]:
    """The names of the functions at the top of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_every_case_has_a_row_with_a_test() -> None:
    assert sorted(rows()) == CASES
    assert all(rows().values())


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{file}::{name}"
        for tests in rows().values()
        for file, name in tests
        if not (ROOT / file).is_file() or name not in defined_in(ROOT / file)
    ]

    assert missing == []


def on_a_gpu(file: str, name: str) -> bool:
    """Whether a test, or its whole module, has a marker `gpu` or `gpu2`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marks = [node for node in tree.body if isinstance(node, ast.Assign)]
    of_module = [ast.unparse(node) for node in marks if "pytestmark" in ast.unparse(node)]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    of_test = [ast.unparse(d) for f in functions if f.name == name for d in f.decorator_list]
    return any(re.search(r"mark\.gpu2?\b", text) for text in of_module + of_test)


def test_the_cases_that_are_shown_on_a_gpu_are_those_that_the_document_says() -> None:
    said = re.search(
        r"^Tests that run on CUDA hardware .* show (.*?)\. All others", TEXT, re.MULTILINE
    )
    assert said is not None
    shown = [case for case, tests in rows().items() if any(on_a_gpu(*each) for each in tests)]
    assert re.findall(r"C\d\d", said[1]) == shown


def test_every_case_links_a_public_report() -> None:
    lines = [line for line in TEXT.splitlines() if re.match(r"\| C\d\d: ", line)]

    assert all("](https://github.com/" in line for line in lines)
