"""What importing the agents costs beyond torch's own import, each time in a new process.

    python benchmarks/import_time.py [runs]

Prints medians and ranges, of the clock's time and of the processor's, which other work on the
machine does not lengthen: of the package alone (`import tensorlease.agents`), and of both agents
(`TrainerAgent`, `WorkerAgent`) where torch is imported already. Goal: at most 100 ms of the latter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

GOAL_MS = 100.0

PROGRAM = """
import json, sys, threading, time
def now():
    return time.perf_counter(), time.process_time()
times = [now()]
import tensorlease.agents
times.append(now())
import torch
times.append(now())
before = set(sys.modules)
tensorlease.agents.TrainerAgent, tensorlease.agents.WorkerAgent
times.append(now())
new = len(set(sys.modules) - before)
print(json.dumps([times, new, threading.active_count()]))
"""
PARTS = ("tensorlease.agents", "torch", "both agents, after torch")


def main(runs: int) -> int:
    """Prints the table; returns 1 if the goal is missed."""
    runs_of: list[tuple[list[list[float]], int, int]] = []
    with tempfile.TemporaryDirectory() as cache:
        environ = os.environ | {"PYTHONPYCACHEPREFIX": cache}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(runs + 1):
            program = [sys.executable, "-P", "-c", PROGRAM]
            done = subprocess.run(program, capture_output=True, text=True, check=True, env=environ)
            runs_of.append(json.loads(done.stdout))
    # The first writes the byte code, and fills the cache of the file system.
    runs_of = runs_of[1:]
    print(f"{'':26}{'clock':>10}{'':20}{'processor':>10}")
    for index, name in enumerate(PARTS):
        columns = []
        for kind in (0, 1):
            ms = [(times[index + 1][kind] - times[index][kind]) * 1e3 for times, _, _ in runs_of]
            spread = f"({min(ms):.1f} to {max(ms):.1f})"
            columns.append(f"{statistics.median(ms):7.1f} ms {spread:20}")
        print(f"{name:26}{''.join(columns)}".rstrip())
    print(f"{runs_of[0][1]} modules beyond torch's; {runs_of[0][2]} thread")
    extra = statistics.median(
        (times[1][1] - times[0][1] + times[3][1] - times[2][1]) * 1e3 for times, _, _ in runs_of
    )
    print(f"beyond torch's own: {extra:.1f} ms of processor time (goal <= {GOAL_MS:g})")
    return int(extra > GOAL_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
