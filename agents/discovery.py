"""Where the broker is: the first place that answers, else an error that says where was looked."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from collections.abc import Mapping

from ..protocol.endpoint import ENDPOINT_VARIABLE, JOB_VARIABLE, Endpoint, Transport, candidates
from ..protocol.errors import NoBrokerError

PROBE_TIMEOUT_S = 1.0

DENIED = os.strerror(errno.EACCES).lower()
REFUSED = os.strerror(errno.ECONNREFUSED).lower()
"""What a reason contains that says so."""
NO_SOCKET = "and no socket; the address names the broker's socket itself"
ANOTHER_USER = "another user"
"""What a reason ends with where no broker of this user can be started either."""
DENIED_WAY_OUT = (
    "where permission is denied, run as the broker's user, or have its operator set socket-group to"
    " a group of yours"
)


def find_broker(
    explicit: str = "", job: str = "", environ: Mapping[str, str] | None = None
) -> Endpoint:
    """The endpoint of a broker that listens now.

    ZMQ connects to a missing or forbidden socket without a word, so each place is tried with a
    connection of its own first.

    Args:
        explicit: An address; only that is tried. Else `$TENSORLEASE_ENDPOINT` (set to nothing it
            counts as not set), else the user's runtime directory, then the system's.
        job: The job's name, else `$TENSORLEASE_JOB`.
        environ: The environment; default is the process's.

    Raises:
        NoBrokerError: Nothing listens; names each place in a line of its own, why not there, and
            in the last line the command that starts a broker.
        EndpointError: An address that cannot work.
    """
    environ = os.environ if environ is None else environ
    uid = os.geteuid()
    reasons = []
    places = candidates(environ, uid, explicit, job)
    for place in places:
        reason = why_not(place, uid)
        if not reason:
            return place
        reasons.append(f"{place}: {reason}")
    variable = "" if explicit or not environ.get(ENDPOINT_VARIABLE) else ENDPOINT_VARIABLE
    beside = ", beside which a job does not count" if job else ""
    by = f" (of ${variable}{beside})" if variable else ""
    denied = [reason for reason in reasons if DENIED in reason]
    # Also reads well where the lines are put together.
    where = ",\n  nor at ".join(reasons)
    start = "tensorlease broker"
    if explicit or variable:
        start += f" --endpoint {shlex.quote(str(places[0]))}"
    elif job := job or environ.get(JOB_VARIABLE, ""):
        start += f" --job {shlex.quote(job)}"
    no_place = (NO_SOCKET, ANOTHER_USER)
    usable = any(not text.endswith(no_place) for text in reasons if text not in denied)
    raise NotFoundError(
        f"no broker answers at {where}{by}",
        DENIED_WAY_OUT if denied else "",
        start if usable else "",
        variable,
        hopeless=len(denied) == len(reasons),
    )


def one_line(error: object) -> str:
    """Returns what an error says, in one line."""
    return " ".join(str(error).split())


class NotFoundError(NoBrokerError):
    """Nothing listens at any place.

    Attributes:
        where: Each place and why not there, in a line of its own.
        denied: What to do where permission is denied; empty: it is not.
        start: The command that starts a broker there; empty: none can be.
        variable: What of the environment has named the place; empty: nothing has.
        hopeless: Waiting does not help: this user may not go to any of them.
    """

    def __init__(
        self, where: str, denied: str, start: str, variable: str, *, hopeless: bool
    ) -> None:
        lines = [where, denied]
        if start:
            lines.append("run this program by `tensorlease run -- COMMAND`, or start a broker by")
        super().__init__(";\n".join(line for line in lines if line) + (start and f"\n  {start}"))
        self.where = where
        self.denied = denied
        self.start = start
        self.variable = variable
        self.hopeless = hopeless


def why_not(endpoint: Endpoint, uid: int) -> str:
    """Why no broker can be reached at an endpoint now; empty when one can."""
    if endpoint.transport is Transport.TCP:
        family: int = socket.AF_INET
        address: str | tuple[str, int] = (endpoint.host, endpoint.port)
    else:
        if problem := _foreign_directory(endpoint, uid):
            return problem
        family, address = socket.AF_UNIX, endpoint.path
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(address)
        except OSError as error:
            if error.errno in (errno.EAGAIN, None):
                return ""  # Its queue of new connections is full: somebody listens.
            if error.errno == errno.ECONNREFUSED and endpoint.path:
                return _what_lies_there(endpoint.path)
            return (error.strerror or str(error)).lower()
    return ""


def _what_lies_there(path: str) -> str:
    """Why nobody listens at a path that there is."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return REFUSED
    if stat.S_ISSOCK(mode):
        return f"{REFUSED}, the socket of a broker that has ended"
    kind = "a directory" if stat.S_ISDIR(mode) else "a file"
    return f"this is {kind} {NO_SOCKET}"


def _foreign_directory(endpoint: Endpoint, uid: int) -> str:
    """The place in /tmp has a name that anyone can guess, and could have made first."""
    if not endpoint.path.startswith("/tmp/"):
        return ""
    try:
        owner = os.lstat(endpoint.directory).st_uid
    except OSError:
        return ""  # Connecting says what is wrong.
    if owner in (uid, 0):
        return ""
    return f"{endpoint.directory} belongs to uid {owner}, {ANOTHER_USER}"
