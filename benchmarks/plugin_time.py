"""What the plugin costs each process of a vLLM that does not use it, each time in a new process.

    VLLM/bin/python benchmarks/plugin_time.py [runs]

vLLM calls `tensorlease.engines.vllm_plugin:register` in its server, its engine cores and its
workers, once it has its arguments. Prints medians and ranges of the clock's time after that: of
importing the plugin, of registering, how much of that is importing vLLM's own factories, and of
registering again. Goal: less than 5 ms for the first two.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

GOAL_MS = 5.0

PROGRAM = """
import json, sys, time
import vllm.engine.arg_utils
if sys.argv[1] == "factories":
    began = time.perf_counter()
    import vllm.distributed.weight_transfer.factory
    print(json.dumps([time.perf_counter() - began]))
    sys.exit()
before = set(sys.modules)
times = [time.perf_counter()]
from tensorlease.engines.vllm_plugin import register
times.append(time.perf_counter())
for _ in range(2):
    register()
    times.append(time.perf_counter())
new = [name for name in set(sys.modules) - before if name.startswith("tensorlease")]
assert "tensorlease.agents" not in sys.modules
print(json.dumps([b - a for a, b in zip(times, times[1:])] + [len(new)]))
"""
PARTS = ("importing the plugin", "registering", "registering again")


def _run(how: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(name: str, seconds: list[float]) -> str:
    ms = [each * 1e3 for each in seconds]
    return f"{name:34}{statistics.median(ms):7.2f} ms ({min(ms):.2f} to {max(ms):.2f})"


def main(runs: int) -> int:
    """Prints the table; returns 1 if the goal is missed."""
    for how in ("plugin", "factories"):  # Writes the byte code, fills the file system's cache.
        _run(how)
    plugin = [_run("plugin") for _ in range(runs)]
    factories = [_run("factories")[0] for _ in range(runs)]
    for index, name in enumerate(PARTS):
        print(_line(name, [times[index] for times in plugin]))
    print(_line("of it importing vLLM's factories", factories))
    both = statistics.median((times[0] + times[1]) * 1e3 for times in plugin)
    print(
        f"{plugin[0][3]:g} modules of tensorlease; the first two {both:.2f} ms (goal < {GOAL_MS:g})"
    )
    return int(both >= GOAL_MS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
