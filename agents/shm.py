"""The memory kind `shm`: segments of shared memory as files of a tmpfs.

The trainer reserves space before it maps, so that a full file system is an error and not a SIGBUS
at some later write. Neither side keeps a descriptor: 256 of them are enough for any model. That is
why both map by the C library: an `mmap.mmap` of Python 3.11 holds a duplicate for its whole life.

Workers map without the right to write. A private writable mapping would be the other way to keep
their stray writes from the trainer, but a page written once would be stale in every later round,
and the whole mapping would count against a strict overcommit limit.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..protocol.handles import ShmHandle
from ..protocol.segments import (
    DEFAULT_DIRECTORY,
    DIRECTORY_VARIABLE,
    ProcessStat,
    SegmentName,
    abandoned,
    parse_stat,
)
from .errors import MappingError, SegmentGoneError, SharedMemoryError
from .process import this_process

if TYPE_CHECKING:
    import torch

_RESERVE_STEP: Final = 64 * 2**20
"""Bytes reserved by one call: a signal undoes and repeats one step, not all of a large segment."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_Block = ctypes.Array[ctypes.c_ubyte]


def shm_directory() -> Path:
    """Returns where segments live: `$TENSORLEASE_SHM_DIR`, else /dev/shm."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)


class ShmSegment:
    """A segment that this process made."""

    def __init__(self, directory: Path, name: SegmentName, nbytes: int) -> None:
        """Makes, reserves and maps the segment.

        Raises:
            SharedMemoryError: It could not be had; its file is gone again.
        """
        self._path = directory / str(name)
        self._handle = ShmHandle(str(name), nbytes)
        self._block = _create(self._path, nbytes)
        # Runs once: in `free`, when the segment is dropped, or when the interpreter ends.
        self._unlink = weakref.finalize(self, _unlink_own, self._path, os.getpid())

    @property
    def handle(self) -> ShmHandle:
        """Its name and size."""
        return self._handle

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._handle.nbytes

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return ctypes.addressof(self._block)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns `nbytes` of the segment from byte `offset` as a storage, which keeps it mapped."""
        import torch

        view = torch.frombuffer(self._block, dtype=torch.uint8, offset=offset, count=nbytes)
        return view.untyped_storage()

    @property
    def device(self) -> torch.device:
        """The processor's."""
        import torch

        return torch.device("cpu")

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` lies in it."""
        return self.address <= address < self.address + self.nbytes

    def written(self) -> None:
        """The processor has, when it says so."""

    def missing(self) -> bool:
        """Whether its file was removed by someone else."""
        return self._unlink.alive and not self._path.exists()

    def free(self) -> None:
        """Removes the file; the memory itself goes when the last tensor and worker let go of it."""
        self._unlink()


class ShmMapping:
    """A segment of another process (or of this one), mapped without the right to write."""

    def __init__(self, directory: Path, handle: ShmHandle) -> None:
        """Maps the segment.

        Raises:
            SegmentGoneError: There is no such file.
            MappingError: It is not the file that the handle tells of, or cannot be mapped.
        """
        self._handle = handle
        self._block: _Block | None = _open(directory, handle)
        self._address = ctypes.addressof(self._block)
        self._alive: weakref.ref[_Block] = weakref.ref(self._block)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._handle.nbytes

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self._address

    @property
    def device(self) -> torch.device:
        """The processor's."""
        import torch

        return torch.device("cpu")

    @property
    def event(self) -> None:
        """A trainer's processor has written before it says so."""
        return None

    @property
    def foreign(self) -> bool:
        """Also what this process made is mapped anew."""
        return True

    def flat(self) -> torch.Tensor:
        """Returns the segment as uint8 of shape (nbytes,); writing to it ends the process."""
        import torch

        if self._block is None:
            raise MappingError(f"segment {self._handle.name} was unmapped")
        return torch.frombuffer(self._block, dtype=torch.uint8)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Returns `nbytes` of the segment from byte `offset`; writing to it ends the process."""
        import torch

        if self._block is None:
            raise MappingError(f"segment {self._handle.name} was unmapped")
        view = torch.frombuffer(self._block, dtype=torch.uint8, offset=offset, count=nbytes)
        return view.untyped_storage()

    def unmap(self) -> None:
        """Unmaps it; raises `MappingError` while a tensor looks into it, and keeps it mapped."""
        self._block = None
        if self._alive() is not None:
            gc.collect()  # a view may hang in a reference cycle, say of a caught exception
        self._block = self._alive()
        if self._block is not None:
            raise MappingError(
                f"segment {self._handle.name} cannot be unmapped: a tensor still looks into it;"
                " drop every view of a batch before it is acknowledged, or clone it"
            )


class ShmMemory:
    """Shared memory as a trainer's memory kind."""

    def __init__(self, instance: str, directory: Path | None = None) -> None:
        """Removes what dead trainers of this user left, so that a restart finds room.

        Args:
            instance: The trainer's instance id (16 hexadecimal digits): part of every name.
            directory: Where the segments live; `shm_directory()` by default.
        """
        self._directory = shm_directory() if directory is None else directory
        self._instance = instance[:8]
        sweep(self._directory)

    @property
    def device(self) -> str:
        """Its tensors are on the CPU."""
        return "cpu"

    def allocate(self, nbytes: int, number: int) -> ShmSegment:
        """Returns a new segment; raises `SharedMemoryError` if there is no room."""
        process = this_process()  # after a fork the child, whose segment it then is
        name = SegmentName(
            uid=os.getuid(),
            pid=process.pid,
            start=process.start,
            namespace=process.namespace,
            instance=self._instance,
            number=number,
        )
        return ShmSegment(self._directory, name, nbytes)


def open_segment(handle: ShmHandle) -> ShmMapping:
    """Maps the segment of `handle`; see `ShmMapping`."""
    return ShmMapping(shm_directory(), handle)


def sweep(directory: Path | None = None) -> list[str]:
    """Removes the segments whose owner, a process of this user, is provably gone.

    A living process's segment, one of another user or of another PID namespace, and a foreign file
    are never touched; where anything cannot be told, the file stays. Returns the names removed.
    """
    directory = shm_directory() if directory is None else directory
    uid = os.getuid()
    removed: list[str] = []
    try:
        names = os.listdir(directory)
    except OSError:
        return removed
    for name in abandoned(names, uid=uid, namespace=this_process().namespace, look=_look):
        path = directory / name
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == uid:
                path.unlink()
                removed.append(name)
        except OSError:
            continue  # removed by another sweep, or not ours to remove
    return removed


def _create(path: Path, nbytes: int) -> _Block:
    """Makes the file, reserves all of it, and maps it for reading and writing."""
    try:
        disk = os.statvfs(path.parent)
        free = disk.f_bavail * disk.f_frsize
        # f_blocks is 0 for a file system without a limit, which reports nothing free either.
        if disk.f_blocks and free < nbytes:
            raise SharedMemoryError(path.parent, nbytes, free)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise SharedMemoryError(path.parent, nbytes, None, str(error)) from error
    try:
        for start in range(0, nbytes, _RESERVE_STEP):
            os.posix_fallocate(descriptor, start, min(_RESERVE_STEP, nbytes - start))
        return _map(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno == errno.ENOSPC
        raise SharedMemoryError(path.parent, nbytes, free if full else None, str(error)) from error
    finally:
        os.close(descriptor)


def _open(directory: Path, handle: ShmHandle) -> _Block:
    """Opens, checks and maps a segment for reading."""
    # O_NONBLOCK: opening a FIFO of that name must not wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    owner = handle.owner  # checks the name, also of a handle that never was on a wire
    try:
        descriptor = os.open(directory / handle.name, flags)
    except FileNotFoundError as error:
        raise SegmentGoneError(handle.name, directory) from error
    except OSError as error:
        raise MappingError(f"segment {handle.name} cannot be opened: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise MappingError(f"{handle.name} in {directory} is no regular file")
        if status.st_uid != owner.uid:
            raise MappingError(
                f"segment {handle.name} belongs to user {status.st_uid}, its name says {owner.uid}"
            )
        if status.st_size != handle.nbytes:
            raise MappingError(
                f"segment {handle.name} has {status.st_size} bytes, its handle says {handle.nbytes}"
            )
        return _map(descriptor, handle.nbytes, mmap.PROT_READ)
    except OSError as error:
        raise MappingError(f"segment {handle.name} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int, protection: int) -> _Block:
    """Maps a file; it is unmapped when the array and every storage made of it are gone."""
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: tensors may outlive the finalizers, and the process's end unmaps all.
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    return block


def _unlink_own(path: Path, creator: int) -> None:
    """Removes a segment's file, but never in a forked child, whose parent still serves it."""
    if os.getpid() == creator:
        path.unlink(missing_ok=True)


def _look(pid: int) -> ProcessStat | None:
    """Returns the state of a process; None if there is none; raises `OSError` if it hides."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        # A hidden /proc entry is no proof: the kernel is asked for the process itself.
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        raise
