"""Checks what no linter sees: the length of modules, the links, and the names that imports take.

Run from anywhere: `python tests/check_tree.py`. Prints each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 600
FOLDERS = ("broker", "protocol", "agents", "src", "tests")
LAYERS = ("broker", "protocol", "agents")
PURE = ("protocol", "broker.ledger", "agents.trainer_core", "agents.worker_core")
"""Modules and packages without I/O and clocks: the contract in pyproject.toml must name each."""

_PROBE = f"""
import sys
import tensorlease, tensorlease.protocol, tensorlease.broker, tensorlease.agents
print(*(name for name in {LAYERS!r} if name in sys.modules))
"""


def long_modules(root: Path) -> Iterator[str]:
    """A line for each Python module below `root` of more than `MAX_LINES` lines."""
    seen: set[Path] = set()
    for folder in FOLDERS:
        # rglob does not enter links: a layer is counted once, where it really lies.
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                yield f"{path.relative_to(root)}: {lines} lines, and {MAX_LINES} are the limit"
    if not seen:
        yield f"{root}: no module found in {', '.join(FOLDERS)}"


def links(root: Path) -> Iterator[str]:
    """A line for each layer whose link below src/tensorlease does not lead to its folder."""
    for layer in LAYERS:
        link = root / "src" / "tensorlease" / layer
        if not link.is_symlink() or link.resolve() != (root / layer).resolve():
            yield f"src/tensorlease/{layer}: no link to {layer}/"


def unchecked_pure_modules(root: Path) -> Iterator[str]:
    """A line for each pure module that exists, and that no contract of import-linter names."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    checked = {
        module
        for contract in settings["tool"]["importlinter"]["contracts"]
        if "pure" in contract["name"]
        for module in contract["source_modules"]
    }
    for module in PURE:
        path = root / module.replace(".", "/")
        exists = (path / "__init__.py").exists() or path.with_suffix(".py").exists()
        if exists and f"tensorlease.{module}" not in checked:
            yield f"pyproject.toml: the contract on pure modules lacks tensorlease.{module}"


def bare_packages(root: Path) -> Iterator[str]:
    """A line for each layer that importing tensorlease puts into sys.modules under its bare name.

    With `root` first on the path, where `import broker` would find our folder: other people's
    packages have these names too.
    """
    probe = f"import sys; sys.path.insert(0, {str(root)!r})\n{_PROBE}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        yield f"importing tensorlease failed:\n{done.stderr}"
    for name in done.stdout.split():
        yield f"importing tensorlease also imports a package {name!r}: import relatively"


def main(root: Path) -> int:
    findings = [
        *long_modules(root),
        *links(root),
        *unchecked_pure_modules(root),
        *bare_packages(root),
    ]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
