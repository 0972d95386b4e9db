"""What systemd hears."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tensorlease.broker.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[socket.socket, str]:
    name = str(tmp_path / "n") if request.param == "path" else f"@tensorlease-{tmp_path}"[:100]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    request.addfinalizer(server.close)
    server.bind("\0" + name[1:] if name.startswith("@") else name)
    server.settimeout(5)
    return server, name


def test_each_state_is_sent_as_systemd_reads_it(listening: tuple[socket.socket, str]) -> None:
    server, name = listening
    notifier = Notifier({"NOTIFY_SOCKET": name})
    assert notifier.ready("serving")
    assert server.recv(1000) == b"READY=1\nSTATUS=serving"
    assert notifier.status("2 rounds\nopen")
    assert server.recv(1000) == b"STATUS=2 rounds open"
    assert notifier.watchdog()
    assert server.recv(1000) == b"WATCHDOG=1"
    assert notifier.reloading()
    assert server.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert notifier.stopping()
    assert server.recv(1000) == b"STOPPING=1"
    notifier.close()
    assert not notifier.watchdog()


def test_without_systemd_nothing_is_sent_and_nothing_fails() -> None:
    notifier = Notifier({})
    assert not notifier.ready("serving")
    assert not notifier.stopping()
    assert notifier.watchdog_interval_s is None
    notifier.close()


def test_a_socket_that_is_gone_disturbs_nobody(tmp_path: Path) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    assert not notifier.ready()
    notifier.close()


def test_the_watchdog_interval_is_read_in_seconds_and_only_for_this_process() -> None:
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval_s == 30.0
    own = {"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}
    assert Notifier(own).watchdog_interval_s == 0.5
    assert Notifier(own | {"WATCHDOG_PID": "1"}).watchdog_interval_s is None
    assert Notifier({"WATCHDOG_USEC": "0"}).watchdog_interval_s is None
    assert Notifier({"WATCHDOG_USEC": "soon"}).watchdog_interval_s is None
