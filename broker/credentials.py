"""Who is at the other end: what the kernel says of a peer, and who may speak.

On ipc, libzmq asks the kernel when the peer connects (SO_PEERCRED) and hands it out with every
message. On loopback tcp, every user of the host can connect, so that the owner of the other end is
looked up in the kernel's table of connections. Nothing here believes what a peer says of itself.
"""

from __future__ import annotations

import os
import re
import socket
import struct

import zmq
from msgspec import Struct

from ..protocol.procfs import supplementary_groups
from .config import BrokerConfig
from .endpoints import Access

UNKNOWN_ID = 2**32 - 1
"""No gid at all: what a loopback tcp peer has."""

_LOCAL_ADDRESS = re.compile(r"localhost:([0-9]+):([0-9]+):([0-9]+)")


class PeerCredentials(Struct, frozen=True):
    """What the kernel says of a peer; pid 0 where its process is not visible from here."""

    uid: int
    gid: int
    pid: int


def parse_peer_address(address: str) -> PeerCredentials | None:
    """Read libzmq's `localhost:UID:GID:PID`; None for anything else, as of tcp peers."""
    match = _LOCAL_ADDRESS.fullmatch(address)
    if match is None:
        return None
    uid, gid, pid = (int(group) for group in match.groups())
    return PeerCredentials(uid, gid, pid)


def peer_of(frame: zmq.Frame) -> PeerCredentials | None:
    """Who sent a frame, or None where the kernel does not tell."""
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    if peer := parse_peer_address(str(address)):
        return peer
    try:
        descriptor = int(frame.get("__fd"))
    except (zmq.ZMQError, ValueError):
        return None
    uid = loopback_peer_uid(descriptor)
    return None if uid is None else PeerCredentials(uid, UNKNOWN_ID, 0)


def loopback_peer_uid(descriptor: int) -> int | None:
    """The uid that owns the other end of an IPv4 loopback connection, by `/proc/net/tcp`."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with connection:
        try:
            ours = connection.getsockname()
            theirs = connection.getpeername()
        except OSError:
            return None
        if connection.family != socket.AF_INET:
            return None
    wanted = (_table_address(*theirs), _table_address(*ours))
    try:
        with open("/proc/net/tcp", encoding="ascii") as table:
            for line in table:
                fields = line.split()
                if len(fields) > 7 and (fields[1], fields[2]) == wanted:
                    return int(fields[7])
    except OSError:
        return None
    return None


def _table_address(host: str, port: int) -> str:
    """An address as `/proc/net/tcp` prints it: the four bytes as one number of this machine."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


class AccessPolicy(Struct, frozen=True):
    """Who may speak to the broker: some users, and the members of a group if there is one.

    Root is no exception: a broker of a user serves that user.
    """

    uids: frozenset[int]
    gid: int | None = None

    def refusal(self, peer: PeerCredentials | None) -> str:
        """Why a peer may not speak, for its eyes; empty when it may."""
        if peer is None:
            return "the kernel does not tell which user this connection belongs to"
        if peer.uid in self.uids or (self.gid is not None and self._is_member(peer)):
            return ""
        users = ", ".join(str(uid) for uid in sorted(self.uids))
        group = "" if self.gid is None else f" and members of group {self.gid}"
        return (
            f"uid {peer.uid} may not use this broker, which serves uid {users}{group};"
            " its allowed-uids and socket-group can name more"
        )

    def _is_member(self, peer: PeerCredentials) -> bool:
        if peer.gid == self.gid:
            return True
        if peer.pid == 0:
            return False  # Its other groups cannot be seen from here.
        try:
            with open(f"/proc/{peer.pid}/status", encoding="utf-8", errors="replace") as file:
                return self.gid in supplementary_groups(file.read())
        except OSError:
            return False


def policy_of(config: BrokerConfig, access: Access) -> AccessPolicy:
    """The policy that the settings ask for."""
    return AccessPolicy(frozenset({access.uid, *config.allowed_uids}), access.gid)
