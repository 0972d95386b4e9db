"""Segments of shared memory: reserved, owned, private, swept, and never anyone else's."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tensorlease.agents import shm
from tensorlease.agents.errors import MappingError, SegmentGoneError, SharedMemoryError
from tensorlease.agents.shm import ShmMapping, ShmMemory
from tensorlease.broker.sweep import sweep as broker_sweep
from tensorlease.protocol.handles import ShmHandle
from tensorlease.protocol.segments import parse_name

INSTANCE = "0123456789abcdef"
MIB = 2**20


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many MiB."""
    mounted: list[Path] = []

    def mount(mebibytes: int) -> Path:
        path = tmp_path / f"tmpfs-{mebibytes}"
        path.mkdir()
        options = f"size={mebibytes}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", path], check=True)


def _fill(storage: torch.UntypedStorage, value: int) -> None:
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(value)


def _maps(path: Path) -> list[str]:
    """The lines of this file: other tests of this process have segments of the same name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(path) in line]


def test_a_segment_is_named_for_its_owner_and_closed_to_others(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(1000, 5)
    (path,) = tmp_path.iterdir()
    owner = parse_name(path.name)
    assert owner is not None
    assert (owner.uid, owner.pid, owner.instance) == (os.getuid(), os.getpid(), INSTANCE[:8])
    assert owner.number == 5
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == segment.nbytes == 1000
    assert path.stat().st_blocks * 512 >= 1000  # really reserved
    segment.free()


def test_a_worker_reads_what_the_trainer_writes_and_may_not_write(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(8192, 1)
    mapping = ShmMapping(tmp_path, segment.handle)
    storage = segment.storage(4096, 16)
    _fill(storage, 7)
    assert storage.nbytes() == 16
    view = mapping.flat()
    assert view[4096:4112].eq(7).all()
    assert view[:4096].eq(0).all()
    assert sorted(line.split()[1] for line in _maps(tmp_path / segment.handle.name)) == [
        "r--s",
        "rw-s",
    ]
    del view
    mapping.unmap()
    segment.free()


def test_a_freed_segment_stays_readable_for_who_has_it_and_gone_for_others(
    tmp_path: Path,
) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    handle = segment.handle
    _fill(segment.storage(0, 64), 3)
    mapping = ShmMapping(tmp_path, handle)
    segment.free()
    segment.free()
    del segment
    assert mapping.flat().eq(3).all()
    with pytest.raises(SegmentGoneError, match=f"segment gone: {handle.name}"):
        ShmMapping(tmp_path, handle)
    mapping.unmap()
    assert not _maps(tmp_path / handle.name)


def test_memory_stays_mapped_while_a_storage_looks_into_it(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    path = tmp_path / segment.handle.name
    storage = segment.storage(32, 32)
    _fill(storage, 9)
    segment.free()
    del segment
    assert _maps(path)
    assert torch.empty(0, dtype=torch.uint8).set_(storage).eq(9).all()
    del storage
    assert not _maps(path)


def test_a_mapping_is_not_given_back_under_a_view(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    mapping = ShmMapping(tmp_path, segment.handle)
    view = mapping.flat()[3:4]
    with pytest.raises(MappingError, match="a tensor still looks into it"):
        mapping.unmap()
    assert view.item() == 0
    del view
    mapping.unmap()
    mapping.unmap()
    with pytest.raises(MappingError, match="was unmapped"):
        mapping.flat()
    segment.free()


def test_descriptors_stay_flat_however_many_segments_are_made_and_mapped(tmp_path: Path) -> None:
    gc.collect()  # What earlier tests have left, a connection say, would be closed meanwhile.
    before = len(os.listdir("/proc/self/fd"))
    memory = ShmMemory(INSTANCE, tmp_path)
    segments = [memory.allocate(4096, number) for number in range(300)]
    mappings = [ShmMapping(tmp_path, segment.handle) for segment in segments]
    assert len(os.listdir("/proc/self/fd")) == before
    for mapping in mappings:
        mapping.unmap()
    for segment in segments:
        segment.free()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_someone_removed_is_missing(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    assert not segment.missing()
    (tmp_path / segment.handle.name).unlink()
    assert segment.missing()
    segment.free()
    assert not segment.missing()


def test_an_existing_file_of_that_name_is_not_touched(tmp_path: Path) -> None:
    memory = ShmMemory(INSTANCE, tmp_path)
    first = memory.allocate(64, 1)
    with pytest.raises(SharedMemoryError, match="File exists"):
        memory.allocate(64, 1)
    assert (tmp_path / first.handle.name).stat().st_size == 64
    first.free()


# What a worker refuses to open.


def _other(handle: ShmHandle, nbytes: int) -> ShmHandle:
    return ShmHandle(handle.name, nbytes)


def test_a_segment_of_another_size_is_refused(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    for nbytes in (63, 65, 1 << 40):
        with pytest.raises(MappingError, match=f"has 64 bytes, its handle says {nbytes}"):
            ShmMapping(tmp_path, _other(segment.handle, nbytes))
    segment.free()


def test_a_link_and_a_pipe_of_that_name_are_refused(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    path = tmp_path / segment.handle.name
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    with pytest.raises(MappingError, match="cannot be opened"):
        ShmMapping(tmp_path, segment.handle)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(MappingError, match="no regular file"):
        ShmMapping(tmp_path, segment.handle)


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    segment = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    os.chown(tmp_path / segment.handle.name, 1, 1)
    with pytest.raises(MappingError, match="belongs to user 1, its name says 0"):
        ShmMapping(tmp_path, segment.handle)
    segment.free()


# Room.


@pytest.mark.root
def test_a_segment_without_room_is_an_error_with_both_sizes_and_a_smaller_one_works(
    small: Callable[[int], Path],
) -> None:
    directory = small(16)
    memory = ShmMemory(INSTANCE, directory)
    with pytest.raises(SharedMemoryError) as failed:
        memory.allocate(64 * MIB, 1)
    assert f"needs 64.0 MiB, 16.0 MiB free at {directory}" in str(failed.value)
    assert (failed.value.needed, failed.value.free) == (64 * MIB, 16 * MIB)
    assert list(directory.iterdir()) == []
    segment = memory.allocate(4 * MIB, 1)
    _fill(segment.storage(0, 4 * MIB), 1)
    segment.free()


@pytest.mark.root
def test_room_that_vanishes_while_it_is_reserved_leaves_no_file(
    small: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small(16)
    memory = ShmMemory(INSTANCE, directory)
    monkeypatch.setattr(shm, "_RESERVE_STEP", 4 * MIB)
    roomy = os.statvfs("/proc")  # reports no limit at all
    monkeypatch.setattr(os, "statvfs", lambda _: roomy)
    with pytest.raises(SharedMemoryError, match=r"needs 64.0 MiB"):
        memory.allocate(64 * MIB, 1)
    assert list(directory.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=f"could be made at {tmp_path}/none"):
        ShmMemory(INSTANCE, tmp_path / "none").allocate(64, 1)


# Sweeping and processes.

_HOLD = """
import signal, sys
from pathlib import Path
from tensorlease.agents.shm import ShmMemory
memory = ShmMemory(sys.argv[2], Path(sys.argv[1]))
segments = [memory.allocate(int(sys.argv[3]), number) for number in range(3)]
print("ready", flush=True)
signal.pause()
"""


def _holder(directory: Path, nbytes: int) -> subprocess.Popen[str]:
    """Starts a process that holds three segments; returns once it does."""
    command = [sys.executable, "-c", _HOLD, str(directory), INSTANCE, str(nbytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.process
@pytest.mark.parametrize("sweep", [shm.sweep, broker_sweep], ids=["agent", "broker"])
def test_only_the_segments_of_dead_owners_are_swept(
    tmp_path: Path, sweep: Callable[[Path], list[str]]
) -> None:
    (tmp_path / "foreign").write_text("x")
    (tmp_path / "psm_1234").write_text("x")
    living = _holder(tmp_path, 4096)
    kept = {path.name for path in tmp_path.iterdir()}
    dead = _holder(tmp_path, 4096)
    os.kill(dead.pid, signal.SIGKILL)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert len(sweep(tmp_path)) == 3
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert sweep(tmp_path) == []
    _end(dead)
    _end(living)
    assert len(sweep(tmp_path)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"foreign", "psm_1234"}


@pytest.mark.process
def test_a_segment_whose_pid_went_to_another_process_is_swept_and_never_that_ones(
    tmp_path: Path,
) -> None:
    mine = ShmMemory(INSTANCE, tmp_path).allocate(64, 1)
    owner = mine.handle.owner
    old = str(owner).replace(f"-{owner.pid}-{owner.start}-", f"-{owner.pid}-{owner.start - 1}-")
    (tmp_path / old).write_text("x")
    assert shm.sweep(tmp_path) == [old]
    assert (tmp_path / mine.handle.name).exists()
    mine.free()


@pytest.mark.root
def test_another_users_file_and_a_link_are_never_swept(tmp_path: Path) -> None:
    name = f"tensorlease-0-{2**22 + 1}-5-{os.stat('/proc/self/ns/pid').st_ino}-0123abcd-"
    (tmp_path / (name + "1")).write_text("x")
    os.chown(tmp_path / (name + "1"), 1, 1)
    (tmp_path / (name + "2")).symlink_to(tmp_path / (name + "1"))
    (tmp_path / (name + "3")).write_text("x")
    assert shm.sweep(tmp_path) == [name + "3"]
    assert broker_sweep(tmp_path) == []


@pytest.mark.root
@pytest.mark.process
def test_a_trainer_that_is_killed_and_restarted_ten_times_always_finds_room(
    small: Callable[[int], Path],
) -> None:
    directory = small(4)  # room for four segments, and each trainer has three
    for _ in range(10):
        _end(_holder(directory, MIB))
    assert len(list(directory.iterdir())) == 3
    assert len(broker_sweep(directory)) == 3


_FORK = """
import os, sys
from pathlib import Path
from tensorlease.agents.shm import ShmMemory
directory = Path(sys.argv[1])
segment = ShmMemory(sys.argv[2], directory).allocate(4096, 1)
children = []
for kind in ("exit", "free", "drop", "raise"):
    child = os.fork()
    if child == 0:
        if kind == "free":
            segment.free()
        if kind == "drop":
            del segment
        if kind == "raise":
            sys.stderr = open(os.devnull, "w")
            raise RuntimeError
        sys.exit()
    children.append(child)
for child in children:
    os.waitpid(child, 0)
print(len(list(directory.iterdir())))
"""


@pytest.mark.process
def test_a_forked_child_never_removes_its_parents_segment_and_the_parents_exit_does(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", _FORK, str(tmp_path), INSTANCE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "1\n"
    assert list(tmp_path.iterdir()) == []
