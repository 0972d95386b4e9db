"""Takes each rule of the ledger away in turn: a test must fail.

    .venv/bin/python tests/bite/apply.py              all of them: copy, patch, test (`make bite`)
    .venv/bin/python tests/bite/apply.py --only 8     one of them
    .venv/bin/python tests/bite/apply.py --check      the patches apply, the tests exist, docs/rules.md is right
    .venv/bin/python tests/bite/apply.py --write      writes docs/rules.md anew

`rules.toml` says what each rule is and which tests must fail without it; `rule_NN.patch` removes its
guard. A crash of the patched code is no failure of a test: only a promise that breaks (`Violation`) or
an assertion in a test counts.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import msgspec
from msgspec import Struct

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs" / "rules.md"
STARRED = (1, 2, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 19, 20, 22, 26)
"""The rules without which a promise breaks."""
MAX_CHANGED = 12
"""Lines that a patch may change: it removes a guard, no more."""
WORKERS = 2
TIMEOUT_S = 120
_NOT_COPIED = {".git", ".venv", "build", "dist", ".hypothesis", "__pycache__"}
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_PLACE = re.compile(r"^(\S+?):(\d+): (\w+)$", re.MULTILINE)
"""The line in which pytest says where an exception was raised, and of what type it was."""


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """One rule, and how it is shown that it is needed."""

    number: int
    title: str
    # Which promise breaks without it.
    breaks: str
    # What the tests show when it is taken away.
    shows: str
    # Each of them must fail.
    tests: list[str]

    @property
    def patch(self) -> Path:
        return HERE / f"rule_{self.number:02}.patch"


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    rules: list[Rule]


class Hunk(Struct):
    """One place that a patch changes: `before` becomes `after`, both with their context."""

    path: str
    before: list[str]
    after: list[str]
    # Lines of context at the beginning.
    lead: int = 0
    changed: int = 0


class PatchError(Exception):
    """A patch does not fit the tree."""


def rules() -> list[Rule]:
    """Returns the table, in the order of the file."""
    text = (HERE / "rules.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Table).rules


# ---------------------------------------------------------------- patches


def hunks(text: str) -> list[Hunk]:
    """Returns the hunks of a unified diff, as git writes it."""
    found: list[Hunk] = []
    path = ""
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif _HUNK.match(line):
            found.append(Hunk(path, [], []))
        elif found and line.startswith(("-", "+", " ")) and not line.startswith("--- a/"):
            hunk = found[-1]
            if line[0] != " ":
                hunk.changed += 1
            elif not hunk.changed:
                hunk.lead += 1
            if line[0] != "+":
                hunk.before.append(line[1:])
            if line[0] != "-":
                hunk.after.append(line[1:])
    return found


def place(lines: list[str], hunk: Hunk) -> int:
    """Returns the index of the only place that the hunk fits.

    Raises:
        PatchError: there is none, or more than one.
    """
    size = len(hunk.before)
    starts = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == hunk.before]
    if len(starts) != 1:
        raise PatchError(
            f"{hunk.path}: {len(starts)} places are like {hunk.before[hunk.lead].strip()!r}"
        )
    return starts[0]


def patch(tree: Path, found: list[Hunk]) -> None:
    """Applies the hunks to the files of this tree.

    Raises:
        PatchError: one of them does not fit.
    """
    for hunk in found:
        path = tree / hunk.path
        lines = path.read_text(encoding="utf-8").splitlines()
        start = place(lines, hunk)
        lines[start : start + len(hunk.before)] = hunk.after
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def guards(found: list[Hunk]) -> list[str]:
    """Returns `module::function` for each place that is changed."""
    names: list[str] = []
    for hunk in found:
        source = (ROOT / hunk.path).read_text(encoding="utf-8")
        line = place(source.splitlines(), hunk) + hunk.lead + 1
        inside = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            and node.lineno <= line <= (node.end_lineno or 0)
        ]
        name = ".".join(node.name for node in sorted(inside, key=lambda node: node.lineno))
        entry = f"{hunk.path.removesuffix('.py').replace('/', '.')}::{name}"
        names += [entry] if entry not in names else []
    return names


# ---------------------------------------------------------------- check


def findings() -> Iterator[str]:
    """A line for whatever keeps a rule from being taken away."""
    table = rules()
    numbers = [rule.number for rule in table]
    for number in STARRED:
        if numbers.count(number) != 1:
            yield f"rules.toml: {numbers.count(number)} entries for rule {number}"
    for rule in table:
        yield from _patch_findings(rule)
        if not rule.tests:
            yield f"rule {rule.number}: no test"
        for name in rule.tests:
            if not _exists(name):
                yield f"rule {rule.number}: no test {name}"
    strays = {path.name for path in HERE.glob("*.patch")} - {rule.patch.name for rule in table}
    for name in sorted(strays):
        yield f"{name}: rules.toml has no such rule"


def _patch_findings(rule: Rule) -> Iterator[str]:
    if not rule.patch.exists():
        yield f"rule {rule.number}: no {rule.patch.name}"
        return
    found = hunks(rule.patch.read_text(encoding="utf-8"))
    changed = sum(hunk.changed for hunk in found)
    if not 0 < changed <= MAX_CHANGED:
        yield f"{rule.patch.name}: changes {changed} lines, of 1 to {MAX_CHANGED}"
    foreign = {hunk.path for hunk in found if not hunk.path.startswith(("broker/", "agents/"))}
    if foreign:
        yield f"{rule.patch.name}: changes {', '.join(sorted(foreign))}"
        return
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for path in {hunk.path for hunk in found}:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tree / path)
        try:
            patch(tree, found)
            for path in {hunk.path for hunk in found}:
                ast.parse((tree / path).read_text(encoding="utf-8"), path)
        except (PatchError, SyntaxError) as error:
            yield f"{rule.patch.name} does not apply: {error}"


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    wanted = name.partition("[")[0]
    return wanted in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def document() -> str:
    """Returns docs/rules.md."""
    lines = [
        "# The rules of the ledger, and what breaks without them",
        "",
        "`make bite` takes each of these rules away in turn: it removes the guard from a copy of the tree by a small",
        "patch, and each test that is named here must then fail, in a promise (`Violation`) or in an assertion of its",
        "own; a crash of the patched code does not count. `make check` fails when a patch does not apply any more, or",
        "when this file differs from `tests/bite/rules.toml`, of which `tests/bite/apply.py --write` makes it.",
        "Numbers that are missing belong to rules without which no promise was seen to break.",
        "",
        "| rule | where its guard is | patch | tests that fail without it | what they show |",
        "|---|---|---|---|---|",
    ]
    for rule in rules():
        where = "<br>".join(f"`{name}`" for name in guards(hunks(rule.patch.read_text("utf-8"))))
        tests = "<br>".join(f"`{name}`" for name in rule.tests)
        link = f"[{rule.patch.name}](../tests/bite/{rule.patch.name})"
        title = f"**{rule.number}.** {rule.title} *Without it:* {rule.breaks}"
        lines.append(f"| {title} | {where} | {link} | {tests} | {rule.shows} |")
    return "\n".join(lines) + "\n"


def check() -> int:
    found = list(findings())
    if not found and (not DOCS.exists() or DOCS.read_text(encoding="utf-8") != document()):
        found.append("docs/rules.md is out of date: run tests/bite/apply.py --write")
    for line in found:
        print(line)
    return 1 if found else 0


# ---------------------------------------------------------------- bite


@functools.cache
def sources() -> list[str]:
    """Returns the files that git tracks or would; where there is no git, all but what is made here."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    except (OSError, subprocess.SubprocessError):
        return [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if not _NOT_COPIED.intersection(path.relative_to(ROOT).parts)
            and (path.is_symlink() or path.is_file())
        ]


def copy_tree(to: Path) -> None:
    """Copies the sources, links as links."""
    for name in sources():
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


class Failure(Struct, frozen=True):
    """How a test failed: `where` (path and line), the type of the exception, its message."""

    where: str
    kind: str
    text: str

    @property
    def bites(self) -> bool:
        """Whether a promise or an assertion of a test failed, and not the patched code."""
        return self.where.startswith("tests/") and self.kind in ("Violation", "AssertionError")


def run(tree: Path, tests: list[str]) -> dict[str, Failure | None]:
    """Runs these tests on the code of this tree; returns how each failed, or None for a pass.

    Raises:
        RuntimeError: they did not run.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    environment |= {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    python = [sys.executable, "-P"]
    probe = "import tensorlease, tensorlease.broker as b; print(tensorlease.__file__, b.__file__)"
    done = subprocess.run(
        [*python, "-c", probe],
        cwd=tree,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode or any(not Path(f).is_relative_to(tree) for f in done.stdout.split()):
        raise RuntimeError(f"another tensorlease answers: {done.stdout}{done.stderr}")
    report = tree / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--junitxml={report}"]
    done = subprocess.run(
        [*python, "-m", "pytest", *options, *tests],
        cwd=tree,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    found: dict[str, Failure | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        failed = next((part for tag in ("failure", "error") for part in case.iter(tag)), None)
        found[name] = None if failed is None else _failure(failed)
    missing = set(tests) - set(found)
    if missing:
        raise RuntimeError(f"pytest did not run {', '.join(sorted(missing))}")
    return found


def _failure(element: ElementTree.Element) -> Failure:
    places = _PLACE.findall(element.text or "")
    path, line, kind = places[-1] if places else ("?", "0", "?")
    text = (element.get("message") or "").replace("explore.parts.", "").splitlines()[0]
    return Failure(f"{path}:{line}", kind, text)


def bite(rule: Rule) -> tuple[bool, list[str]]:
    """Takes the rule away; returns whether each of its tests fails as it must, and says how."""
    lines: list[str] = []
    good = True
    try:
        with tempfile.TemporaryDirectory(prefix=f"bite-{rule.number}-") as name:
            tree = Path(name).resolve()
            copy_tree(tree)
            patch(tree, hunks(rule.patch.read_text(encoding="utf-8")))
            found = run(tree, rule.tests)
    except (PatchError, RuntimeError, subprocess.TimeoutExpired) as error:
        return False, [f"NOT SHOWN: {error}"]
    for name in rule.tests:
        failure = found[name]
        if failure is None:
            lines.append(f"UNNOTICED by {name}")
        elif not failure.bites:
            lines.append(f"CRASHED in {name}: {failure.where}: {failure.kind}: {failure.text}")
        else:
            lines.append(f"{name.rpartition('::')[2]}\n        {failure.text[:160]}")
        good = good and failure is not None and failure.bites
    return good, lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes each rule of the ledger away in turn.")
    parser.add_argument("--check", action="store_true", help="only look whether all fits")
    parser.add_argument("--write", action="store_true", help="write docs/rules.md anew")
    parser.add_argument("--only", type=int, metavar="N", help="take only rule N away")
    options = parser.parse_args()
    if options.write:
        DOCS.write_text(document(), encoding="utf-8")
    if options.check or options.write:
        return check()
    if problems := list(findings()):
        print(*problems, sep="\n")
        return 1
    chosen = [rule for rule in rules() if options.only in (None, rule.number)]
    if not chosen:
        print(f"no rule {options.only}; there are {', '.join(map(str, STARRED))}")
        return 1
    began = time.monotonic()
    tests = sorted({name for rule in chosen for name in rule.tests})
    with tempfile.TemporaryDirectory(prefix="bite-0-") as name:
        tree = Path(name).resolve()
        copy_tree(tree)
        failed = [f"{test}: {how.text}" for test, how in run(tree, tests).items() if how]
    if failed:
        print("these fail with all rules in place:", *failed, sep="\n  ")
        return 1
    print(f"{len(tests)} tests pass with all rules in place; now without", flush=True)
    unnoticed = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for rule, (good, lines) in zip(chosen, pool.map(bite, chosen), strict=True):
            unnoticed += not good
            print(f"rule {rule.number:2}  {rule.patch.name}  {'bites' if good else 'FAILED'}")
            print(*(f"    {line}" for line in lines), sep="\n", flush=True)
    print(
        f"{len(chosen) - unnoticed} of {len(chosen)} rules bite ({time.monotonic() - began:.0f} s)"
    )
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
