"""What a process says of itself."""

from __future__ import annotations

import os
from pathlib import Path

from tensorlease.agents.process import this_host, this_process
from tensorlease.protocol.procfs import start_time_ticks


def test_this_process_is_named_as_the_kernel_names_it() -> None:
    process = this_process()
    assert process.pid == os.getpid()
    assert process.start == start_time_ticks(Path(f"/proc/{os.getpid()}/stat").read_text())
    assert process.namespace == os.stat("/proc/self/ns/pid").st_ino
    assert this_process() is process


def test_the_host_is_the_boot_of_its_kernel() -> None:
    assert this_host() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert this_host() is this_host()
