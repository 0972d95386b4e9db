"""Reads the project's documents: their fenced blocks, their links, the commands that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


class Fence(NamedTuple):
    """A fenced block."""

    language: str
    text: str


class Command(NamedTuple):
    """A command of a console block, and the output that is shown below it."""

    line: str
    output: str


def fences(document: Path) -> list[Fence]:
    """Every fenced block, in order."""
    return [Fence(*found) for found in _FENCE.findall(document.read_text(encoding="utf-8"))]


def blocks(document: Path, language: str) -> list[str]:
    """The texts of the blocks of one language, in order."""
    return [fence.text for fence in fences(document) if fence.language == language]


def programs(document: Path) -> dict[str, str]:
    """The Python blocks by the file name in their first line: `# name.py` or `# name.py: how`."""
    named: dict[str, str] = {}
    for text in blocks(document, "python"):
        found = re.match(r"# (\w+\.py)\b", text)
        assert found is not None, f"{document.name}: a program without a name:\n{text[:200]}"
        assert found[1] not in named, f"{document.name}: {found[1]} is there twice"
        named[found[1]] = text
    return named


def commands(document: Path) -> list[Command]:
    """Every `$ command` of the console blocks."""
    found: list[Command] = []
    for text in blocks(document, "console"):
        assert text.startswith("$ "), f"{document.name}: begins without a command:\n{text[:200]}"
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            found.append(Command(line.partition("  #")[0].strip(), output))
    return found


def spans(document: Path) -> list[str]:
    """The code spans outside of blocks."""
    return _CODE.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))


def broken_links(document: Path) -> list[str]:
    """Links to files or headings of this project that are not there."""
    broken = []
    for target in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, heading = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (heading and heading not in headings(file)):
            broken.append(target)
    return broken


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tables(document: Path) -> list[list[list[str]]]:
    """Every table: rows of cells, the one with the column names first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in document.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            found.append([])
        inside = True
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found
