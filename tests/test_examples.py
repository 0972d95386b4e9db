"""The examples run as they stand, as programs of their own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .procs import broker_process, spawning

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def program(path: str) -> str:
    """Runs a program in this process; returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.program
def test_two_programs_hand_five_versions_over_a_broker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="tl-") as directory, spawning() as spawn:
        url = f"ipc://{directory}/broker.sock"
        monkeypatch.setenv("TENSORLEASE_ENDPOINT", url)
        broker_process(spawn, url, {})
        folder = EXAMPLES / "two_processes"
        worker = spawn(program, str(folder / "worker.py"))
        trainer = spawn(program, str(folder / "trainer.py"))
        trained, served = trainer.result(), worker.result()
    assert re.findall(r"^version (\d)  committed  3.8 MiB", trained, re.MULTILINE) == list("12345")
    assert served.splitlines() == [f"version {n}: the mean is {n}.0" for n in range(1, 6)]
    assert list(tmp_path.iterdir()) == []


HANGS = """
import os, sys, time
sys.path.insert(0, {examples!r})
import processes

def hang(told):
    told.say(os.getpid())
    time.sleep(600)  # As in a collective for which others never come.

if __name__ == "__main__":
    with processes.children() as start:
        print(start("hangs", hang).hear(), flush=True)
        time.sleep(600)
"""


@pytest.mark.program
def test_a_process_that_waits_for_others_ends_though_its_program_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(HANGS.format(examples=str(EXAMPLES)), encoding="ascii")
    program = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        pidfd = os.pidfd_open(int(program.stdout.readline()))
    finally:
        program.kill()
        program.communicate()
    try:
        assert select.select([pidfd], [], [], 20.0)[0]
    finally:
        os.close(pidfd)
