"""Where the broker listens, made safe before anything is bound.

Whoever can write a socket's directory can put another socket in its place, and whoever can write
the socket can connect. Hence the directory is made and checked first, the socket is bound with the
owner's rights only, and its group and mode are widened after that: there is no moment in which a
stranger could connect.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import zmq
from msgspec import Struct

from ..protocol.endpoint import (
    ENDPOINT_VARIABLE,
    Endpoint,
    EndpointError,
    from_environment,
    parse_endpoint,
    runtime_directories,
    socket_name,
)
from ..protocol.errors import ConfigError
from .config import BrokerConfig, SocketMode
from .locks import BrokerLock, PreviousRun, is_at

MAX_GID = 2**32 - 2
"""The next one means "no group" to the kernel."""


class Access(Struct, frozen=True):
    """Who may connect: the owner, and the members of a group if there is one."""

    uid: int
    gid: int | None = None

    @property
    def socket_mode(self) -> int:
        """Permissions of the socket."""
        return 0o600 if self.gid is None else 0o660

    @property
    def directory_mode(self) -> int:
        """Permissions of a socket's directory that the broker makes."""
        return 0o700 if self.gid is None else 0o2750

    @property
    def live_mode(self) -> int:
        """Permissions of the live directory: members add files, and remove only their own."""
        return 0o700 if self.gid is None else 0o3770


def access_of(config: BrokerConfig) -> Access:
    """Who may connect, by the settings.

    Raises:
        ConfigError: The group does not exist.
    """
    uid = os.geteuid()
    if config.socket_group:
        return Access(uid, _group_id(config.socket_group))
    if config.socket_mode is SocketMode.GROUP:
        return Access(uid, os.getegid())
    return Access(uid)


def _group_id(group: str) -> int:
    if group.isascii() and group.isdigit():
        if int(group) > MAX_GID:
            raise ConfigError(f"socket-group = {group!r}: the largest number is {MAX_GID}")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"socket-group = {group!r}: no such group on this host") from None


def choose_endpoints(config: BrokerConfig, environ: Mapping[str, str], uid: int) -> list[Endpoint]:
    """Where to listen: the settings, else `$TENSORLEASE_ENDPOINT`, else a place of the user's.

    The last is the first of the user's runtime directories that exists and belongs to the user
    (after `su` and `sudo`, `$XDG_RUNTIME_DIR` often names another user's), else one in /tmp.

    Raises:
        EndpointError: An address that cannot work, or one that is given twice.
    """
    if config.endpoints:
        chosen: dict[str, Endpoint] = {}
        for address in config.endpoints:
            endpoint = parse_endpoint(address)
            # Also under two names: a directory may be a link.
            place = os.path.realpath(endpoint.path) if endpoint.path else endpoint.url
            if place in chosen:
                raise EndpointError(address, f"is {chosen[place]} again: name each place once")
            chosen[place] = endpoint
        return list(chosen.values())
    if given := environ.get(ENDPOINT_VARIABLE):
        return [from_environment(given)]
    *private, last = runtime_directories(environ, uid)
    place = next((place for place in private if _owned_by(os.path.dirname(place), uid)), last)
    return [parse_endpoint(f"{place}/{socket_name(config.job)}")]


def _owned_by(directory: str, uid: int) -> bool:
    try:
        status = os.stat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid


class SocketPlace:
    """The place of one endpoint: the directory, the lock, the live directory and the socket.

    Call `prepare`, then `bind`, and at the end, after the ZMQ socket was closed, `close`. `check`
    can be called instead, or before.
    A tcp endpoint has none of these, so that all but `bind` does nothing for it.
    """

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self.endpoint = endpoint
        self.access = access
        # Held from prepare to close.
        self._lock = BrokerLock(endpoint.lock_path) if endpoint.path else None
        # The bound socket's file, open so that no other file can get its inode number.
        self._bound: int | None = None

    def check(self) -> None:
        """Refuse what `prepare` would, as far as it shows while nothing is made, taken or asked.

        Who serves the place now is nothing to refuse.

        Raises:
            EndpointError: The place cannot be used, or is not safe.
        """
        if self._lock is None:
            return
        directory = self.endpoint.directory
        try:
            if os.path.lexists(directory):
                self._check_directory(directory)
                self._check_writable(directory)
                if os.path.lexists(self._lock.path):
                    self._check_writable(self._lock.path)
                self._is_socket_there()
                self._check_live_directory()
            else:
                self._check_writable(os.path.dirname(directory))
            self._check_parents(directory)
        except OSError as error:
            raise self._cannot(error) from error

    def prepare(self) -> PreviousRun:
        """Make and check the directories and take the lock; nothing that exists is replaced.

        Returns:
            How the broker before this one ended.

        Raises:
            EndpointError: The place cannot be used, or is not safe.
            BrokerRunningError: Another broker serves it.
        """
        if self._lock is None:
            return PreviousRun.NONE
        try:
            self._prepare_directory()
            previous = self._lock.acquire()
        except OSError as error:
            raise self._cannot(error) from error
        try:
            self._clear_stale_socket()
            self._prepare_live_directory()
        except OSError as error:
            self._lock.release(clean=previous is not PreviousRun.UNCLEAN)
            raise self._cannot(error) from error
        except ConfigError:
            self._lock.release(clean=previous is not PreviousRun.UNCLEAN)
            raise
        return previous

    def bind(self, bind: Callable[[str], object]) -> None:
        """Bind a ZMQ socket here, given its `bind`; then grant the group its rights.

        The umask of the process is changed for the moment of the bind.

        Raises:
            EndpointError: With the system's reason.
        """
        # 0o177: the owner reads and writes, nobody else does anything.
        former = os.umask(0o177)
        try:
            bind(self.endpoint.url)
            if not self.endpoint.path:
                return
            if self.access.gid is not None:
                os.chown(self.endpoint.path, -1, self.access.gid, follow_symlinks=False)
            os.chmod(self.endpoint.path, self.access.socket_mode)
            self._bound = os.open(self.endpoint.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, zmq.ZMQError) as error:
            raise self._cannot(error) from error
        finally:
            os.umask(former)

    def still_ours(self) -> bool:
        """Whether new agents still reach this broker: the socket and the lock are in place."""
        if self._lock is None:
            return True
        return self._lock.still_held() and self._socket_in_place()

    def close(self) -> None:
        """Remove the socket if it is still ours, then the lock. Call it after a clean end only."""
        if self._lock is None:
            return
        if self._socket_in_place():
            os.unlink(self.endpoint.path)
        if self._bound is not None:
            os.close(self._bound)
            self._bound = None
        with contextlib.suppress(OSError):  # Agents that wait for the next broker have locks there.
            os.rmdir(self.endpoint.live_directory)
        self._lock.release(clean=True)

    def _socket_in_place(self) -> bool:
        return self._bound is not None and is_at(self._bound, self.endpoint.path)

    def _cannot(self, error: OSError | zmq.ZMQError) -> EndpointError:
        path = getattr(error, "filename", None)
        where = f" ({path})" if path and path != self.endpoint.path else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        return EndpointError(self.endpoint.url, f"cannot listen: {reason}{where}")

    def _prepare_directory(self) -> None:
        directory = self.endpoint.directory
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            self._check_directory(directory)
        else:
            _grant(directory, self.access.gid, self.access.directory_mode)
        self._check_parents(directory)

    def _check_parents(self, directory: str) -> None:
        for parent in PurePosixPath(directory).parents:
            mode = os.stat(parent).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise EndpointError(
                    self.endpoint.url,
                    f"{parent} is writable by all, so anyone can replace what is in it",
                )

    def _check_directory(self, directory: str) -> None:
        def unsafe(problem: str) -> EndpointError:
            return EndpointError(self.endpoint.url, f"{directory} {problem}")

        status = os.lstat(directory)
        if stat.S_ISLNK(status.st_mode):
            raise unsafe("is a symbolic link; name the directory itself")
        if not stat.S_ISDIR(status.st_mode):
            raise unsafe("is not a directory")
        if status.st_uid not in (self.access.uid, 0):
            raise unsafe(f"belongs to uid {status.st_uid}, the broker runs as {self.access.uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            whose = "all" if status.st_mode & stat.S_IWOTH else "its group"
            raise unsafe(
                f"is writable by {whose}, who could replace the socket;"
                " use a directory of its own (mode 0700, or 0750 for a group)"
            )
        gid = self.access.gid
        if gid is None or status.st_mode & stat.S_IXOTH:
            return
        if status.st_gid != gid or not status.st_mode & stat.S_IXGRP:
            raise unsafe(
                f"is closed to socket-group {gid}: chgrp {gid} {directory} && chmod 2750 {directory}"
            )

    def _check_writable(self, path: str) -> None:
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        wanted = os.W_OK | (os.X_OK if os.path.isdir(path) else os.R_OK)
        if not os.access(path, wanted, effective_ids=True):
            uid = self.access.uid
            raise EndpointError(
                self.endpoint.url,
                f"{path} cannot be written by uid {uid}, as which the broker runs",
            )

    def _is_socket_there(self) -> bool:
        """Whether there is a socket at the path; raises `EndpointError` if it is anything else."""
        path = self.endpoint.path
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISSOCK(mode):
            kind = (
                "a directory"
                if stat.S_ISDIR(mode)
                else "a symbolic link"
                if stat.S_ISLNK(mode)
                else "a file"
            )
            raise EndpointError(
                self.endpoint.url, f"there is {kind} at {path}, which is left as it is; remove it"
            )
        return True

    def _clear_stale_socket(self) -> None:
        """Remove what a dead broker left; anything else at the path stays as it is."""
        if not self._is_socket_there():
            return
        path = self.endpoint.path
        # The lock is ours, so no broker of this kind listens; another program still may.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            result = probe.connect_ex(path)
        if result == errno.ECONNREFUSED:
            os.unlink(path)
        elif result != errno.ENOENT:
            raise EndpointError(self.endpoint.url, "another program listens there")

    def _check_live_directory(self) -> None:
        directory = self.endpoint.live_directory
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != self.access.uid:
                raise EndpointError(
                    self.endpoint.url,
                    f"{directory} is not a directory of uid {self.access.uid}; remove it",
                )

    def _prepare_live_directory(self) -> None:
        directory = self.endpoint.live_directory
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            self._check_live_directory()
        _grant(directory, self.access.gid, self.access.live_mode)


def _grant(directory: str, gid: int | None, mode: int) -> None:
    if gid is not None:
        os.chown(directory, -1, gid)
    os.chmod(directory, mode)  # After chown, which may clear the set-group-id bit.
