"""Who a peer is by the kernel's word, and who may speak."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.credentials import (
    UNKNOWN_ID,
    AccessPolicy,
    PeerCredentials,
    parse_peer_address,
    peer_of,
    policy_of,
)
from tensorlease.broker.endpoints import Access

PEER = """
import os, sys, zmq
url, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
if uid:
    os.setgroups([int(group) for group in groups]); os.setgid(gid); os.setuid(uid)
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger = 5000
dealer.connect(url)
dealer.send(b"hello")
dealer.recv()
"""


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvtimeo = 20_000
    yield router
    context.destroy(linger=0)


def peer_that_says_hello(
    router: zmq.Socket[bytes], url: str, uid: int, gid: int, *groups: int, policy: AccessPolicy
) -> tuple[PeerCredentials | None, str, int]:
    """Who the peer is, its refusal, and its pid."""
    arguments = [url, *map(str, (uid, gid, *groups))]
    with subprocess.Popen([sys.executable, "-c", PEER, *arguments]) as process:
        address, hello = router.recv_multipart(copy=False)
        peer = peer_of(hello)
        refusal = policy.refusal(peer)
        router.send_multipart([address.bytes, b"bye"])
        assert process.wait(timeout=20) == 0
    return peer, refusal, process.pid


def test_the_address_of_a_local_peer_is_read() -> None:
    assert parse_peer_address("localhost:1000:1001:42") == PeerCredentials(1000, 1001, 42)
    assert parse_peer_address("localhost:0:0:0") == PeerCredentials(0, 0, 0)


@pytest.mark.parametrize("address", ["127.0.0.1", "", "localhost", "localhost:1:2:-3", "x:1:2:3"])
def test_the_address_of_any_other_peer_says_nothing_of_its_user(address: str) -> None:
    assert parse_peer_address(address) is None


@pytest.mark.process
def test_a_local_peer_is_known_by_uid_gid_and_pid(
    tmp_path: Path, router: zmq.Socket[bytes]
) -> None:
    url = f"ipc://{tmp_path}/s"
    router.bind(url)
    policy = AccessPolicy(frozenset({os.getuid()}))
    peer, refusal, pid = peer_that_says_hello(router, url, 0, 0, policy=policy)
    assert peer == PeerCredentials(os.getuid(), os.getgid(), pid)
    assert refusal == ""


@pytest.mark.process
def test_a_peer_on_loopback_tcp_is_known_by_uid_alone(router: zmq.Socket[bytes]) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    policy = AccessPolicy(frozenset({os.getuid()}), gid=os.getgid())
    peer, refusal, _ = peer_that_says_hello(router, f"tcp://127.0.0.1:{port}", 0, 0, policy=policy)
    assert peer == PeerCredentials(os.getuid(), UNKNOWN_ID, 0)
    assert refusal == ""


@pytest.mark.root
@pytest.mark.process
def test_another_user_on_loopback_tcp_is_refused(router: zmq.Socket[bytes]) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    policy = AccessPolicy(frozenset({0}))
    peer, refusal, _ = peer_that_says_hello(
        router, f"tcp://127.0.0.1:{port}", 54321, 54322, policy=policy
    )
    assert peer == PeerCredentials(54321, UNKNOWN_ID, 0)
    assert refusal.startswith("uid 54321 may not use this broker, which serves uid 0;")


@pytest.mark.root
@pytest.mark.process
@pytest.mark.parametrize(
    ("groups", "gid", "allowed"),
    [((), 54322, False), ((), 777, True), ((555, 777), 54322, True), ((555,), 54322, False)],
)
def test_a_member_of_the_group_may_speak_and_no_other_user(
    router: zmq.Socket[bytes], groups: tuple[int, ...], gid: int, allowed: bool
) -> None:
    policy = AccessPolicy(frozenset({0}), gid=777)
    # Not in tmp_path, which other users cannot enter.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        router.bind(f"ipc://{directory}/s")
        os.chmod(f"{directory}/s", 0o666)
        peer, refusal, pid = peer_that_says_hello(
            router, f"ipc://{directory}/s", 54321, gid, *groups, policy=policy
        )
    assert peer == PeerCredentials(54321, gid, pid)
    assert (refusal == "") is allowed
    assert allowed or "members of group 777" in refusal


def test_who_cannot_be_identified_is_refused() -> None:
    assert "does not tell" in AccessPolicy(frozenset({0})).refusal(None)


def test_root_is_no_exception() -> None:
    policy = AccessPolicy(frozenset({1000}))
    assert policy.refusal(PeerCredentials(0, 0, 1)).startswith("uid 0 may not use")


def test_groups_of_an_invisible_process_are_not_believed() -> None:
    policy = AccessPolicy(frozenset({1000}), gid=777)
    assert policy.refusal(PeerCredentials(1001, 777, 0)) == ""
    assert policy.refusal(PeerCredentials(1001, 1, 0)) != ""
    assert policy.refusal(PeerCredentials(1001, 1, 2**22 + 1)) != ""


def test_the_policy_is_the_owner_the_settings_users_and_the_group() -> None:
    policy = policy_of(BrokerConfig(allowed_uids=(5, 6)), Access(4, 777))
    assert policy == AccessPolicy(frozenset({4, 5, 6}), 777)
