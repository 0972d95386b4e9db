"""The example programs, run as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIMIT_S = 100.0


def run_example(name: str, shm: Path, *words: str) -> str:
    """Runs one; returns what it prints. It ends well, without a traceback, and leaves no segment."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        env=os.environ | {"TENSORLEASE_SHM_DIR": str(shm)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert list(shm.iterdir()) == []
    return done.stdout
