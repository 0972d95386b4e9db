"""Addresses of a broker: how they are written, and where they are looked for when none is given.

Pure: the environment and the uid are passed in, nothing is opened. Broker and agents use the same
functions, hence they arrive at the same paths.
"""

from __future__ import annotations

import enum
import hashlib
import ipaddress
import posixpath
import re
from collections.abc import Mapping

from msgspec import Struct

from .errors import ConfigError

MAX_IPC_PATH_BYTES = 107
"""Bytes of a socket's path: `sun_path` of unix(7) has 108 with the closing NUL."""

SYSTEM_DIRECTORY = "/run/tensorlease"
"""Where the system unit's broker listens."""

ENDPOINT_VARIABLE = "TENSORLEASE_ENDPOINT"
JOB_VARIABLE = "TENSORLEASE_JOB"


class EndpointError(ConfigError):
    """An address that no broker can listen on.

    Attributes:
        address: The address as it was given.
        problem: What is wrong with it.
    """

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"endpoint {address!r}: {problem}")
        self.address = address
        self.problem = problem


class Transport(enum.Enum):
    """How bytes travel to an endpoint."""

    IPC = "ipc"
    TCP = "tcp"


class Endpoint(Struct, frozen=True):
    """A checked address of a broker.

    `path` is absolute and normalised for ipc and empty for tcp; `host` and `port` are set for tcp
    only, `host` as a numeric address.
    """

    transport: Transport
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """The address as ZMQ takes it."""
        if self.transport is Transport.IPC:
            return f"ipc://{self.path}"
        return f"tcp://{self.host}:{self.port}"

    @property
    def directory(self) -> str:
        """The directory that holds the socket; empty for tcp."""
        return posixpath.dirname(self.path)

    @property
    def lock_path(self) -> str:
        """The file whose lock keeps a second broker away; empty for tcp."""
        return f"{self.path}.lock" if self.path else ""

    @property
    def live_directory(self) -> str:
        """Where agents keep the locks that prove that they live; empty for tcp.

        It carries the socket's name: two brokers in one directory must not take each other's
        agents for their own when they start again.
        """
        return f"{self.path}.live" if self.path else ""

    def __str__(self) -> str:
        return self.url


def parse_endpoint(address: str) -> Endpoint:
    """Read `ipc:///path`, a plain absolute path, or `tcp://127.0.0.1:port`.

    Raises:
        EndpointError: Anything else; the message says what is wrong and what is allowed.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        return _parse_ipc(address, address)
    if scheme == "ipc":
        return _parse_ipc(address, rest)
    if scheme == "tcp":
        return _parse_tcp(address, rest)
    raise EndpointError(
        address,
        f"transport {scheme!r} is not supported; use ipc:///absolute/path or tcp://127.0.0.1:PORT",
    )


def _parse_ipc(address: str, path: str) -> Endpoint:
    if path.startswith("@"):
        raise EndpointError(
            address, "abstract sockets have no permissions, any user could connect; use a path"
        )
    if not path.startswith("/"):
        raise EndpointError(
            address,
            "the path must be absolute (broker and agents have different working directories)",
        )
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise EndpointError(address, "the path holds control characters")
    if path.endswith(("/", "/.", "/..")):
        raise EndpointError(address, "the path names a directory; name a socket inside it")
    normal = "/" + posixpath.normpath(path).lstrip("/")
    # surrogateescape: what a path that is not UTF-8 looks like in Python
    length = len(normal.encode("utf-8", "surrogateescape"))
    if length > MAX_IPC_PATH_BYTES:
        raise EndpointError(
            address,
            f"the path {normal} has {length} bytes, a socket's path at most {MAX_IPC_PATH_BYTES};"
            " use a shorter directory",
        )
    return Endpoint(Transport.IPC, path=normal)


def _parse_tcp(address: str, rest: str) -> Endpoint:
    host, separator, port_text = rest.rpartition(":")
    if not separator or not host:
        raise EndpointError(address, "expected tcp://127.0.0.1:PORT")
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or not 1 <= int(port_text) <= 65_535:
        raise EndpointError(address, f"port {port_text!r} is not a number from 1 to 65535")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        number = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        raise EndpointError(
            address, f"host {host!r} is not a numeric loopback address; use 127.0.0.1"
        ) from None
    if not number.is_loopback:
        raise EndpointError(
            address,
            "tcp beyond the loopback needs CURVE keys, which are not supported yet;"
            " use ipc:// or tcp://127.0.0.1:PORT",
        )
    if number.version != 4:
        raise EndpointError(address, "only IPv4 loopback is supported; use 127.0.0.1")
    return Endpoint(Transport.TCP, host=str(number), port=int(port_text))


def from_environment(address: str) -> Endpoint:
    """As `parse_endpoint`, for the value of `$TENSORLEASE_ENDPOINT`, which an error then names."""
    try:
        return parse_endpoint(address)
    except EndpointError as error:
        raise EndpointError(address, f"{error.problem} (it is from ${ENDPOINT_VARIABLE})") from None


def socket_name(job: str = "") -> str:
    """The socket's file name for a job; the same on both sides, and short for any name."""
    if not job:
        return "broker.sock"
    # The words are for people, the digest keeps alike words apart.
    words = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:16].strip("-")
    digest = hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:10]
    return f"{words or 'job'}-{digest}.sock"


def runtime_directories(environ: Mapping[str, str], uid: int) -> list[str]:
    """The user's own directories for sockets, the best first; they need not exist.

    The last lies in /tmp, where anyone may have made it: who uses it checks its owner.
    """
    places = []
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        places.append(posixpath.join(posixpath.normpath(runtime), "tensorlease"))
    places.append(f"/run/user/{uid}/tensorlease")
    places.append(f"/tmp/tensorlease-{uid}")
    return list(dict.fromkeys(places))


def candidates(
    environ: Mapping[str, str], uid: int, explicit: str = "", job: str = ""
) -> list[Endpoint]:
    """Where a broker may be, in the order in which agents look.

    Args:
        environ: The process's environment.
        uid: The user of the process.
        explicit: The address given by the caller; with one, nothing else is looked at.
        job: The job's name, else `$TENSORLEASE_JOB`; brokers of different jobs have different
            sockets.

    Raises:
        EndpointError: An address given, or derived from the environment, that cannot work.
    """
    if explicit:
        return [parse_endpoint(explicit)]
    if given := environ.get(ENDPOINT_VARIABLE, ""):
        return [from_environment(given)]
    name = socket_name(job or environ.get(JOB_VARIABLE, ""))
    places = [*runtime_directories(environ, uid), SYSTEM_DIRECTORY]
    return [parse_endpoint(posixpath.join(place, name)) for place in places]
