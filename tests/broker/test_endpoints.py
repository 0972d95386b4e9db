"""Where the broker listens: what it makes, what it refuses, and that it leaves others' things alone."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tensorlease.broker.config import BrokerConfig, SocketMode
from tensorlease.broker.endpoints import Access, SocketPlace, access_of, choose_endpoints
from tensorlease.broker.locks import BrokerRunningError, PreviousRun
from tensorlease.protocol.endpoint import EndpointError, parse_endpoint
from tensorlease.protocol.errors import ConfigError

OTHER_UID = 54_321
OTHER_GID = 54_322


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    former = os.umask(0o022)
    yield os.umask
    os.umask(former)


def place_of(path: Path | str, gid: int | None = None) -> SocketPlace:
    return SocketPlace(parse_endpoint(str(path)), Access(os.geteuid(), gid))


def plain_bind(url: str) -> None:
    """Binds as libzmq does, but for the socket itself, which nobody reads."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(url.removeprefix("ipc://"))


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_owner_only_whatever_the_umask(
    tmp_path: Path,
    mask: int,
    umask: Callable[[int], int],
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    umask(mask)
    path = tmp_path / "new" / "broker.sock"
    place = place_of(path)
    assert place.prepare() is PreviousRun.NONE
    router = context.socket(zmq.ROUTER)
    place.bind(router.bind)
    assert umask(mask) == mask
    assert mode_of(path.parent) == 0o700
    assert mode_of(path) == 0o600
    assert mode_of(f"{path}.live") == 0o700
    assert mode_of(f"{path}.lock") == 0o600
    assert place.still_ours()
    router.close(linger=0)
    place.close()
    assert list(path.parent.iterdir()) == []


@pytest.mark.root
def test_a_group_gets_its_rights_only_after_the_bind(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    umask(0)
    path = tmp_path / "new" / "broker.sock"
    place = place_of(path, OTHER_GID)
    place.prepare()
    seen: list[int] = []

    def bind(url: str) -> None:
        plain_bind(url)
        seen.append(mode_of(path))

    place.bind(bind)
    assert seen == [0o600]
    assert (mode_of(path), path.lstat().st_gid) == (0o660, OTHER_GID)
    assert (mode_of(path.parent), path.parent.stat().st_gid) == (0o2750, OTHER_GID)
    live = Path(f"{path}.live")
    assert (mode_of(live), live.stat().st_gid) == (0o3770, OTHER_GID)
    place.close()


def test_a_stale_socket_is_replaced(directory: Path) -> None:
    path = directory / "broker.sock"
    plain_bind(str(path))
    place = place_of(path)
    assert place.prepare() is PreviousRun.NONE
    assert not path.exists()
    place.bind(plain_bind)
    assert place.still_ours()
    place.close()


@pytest.mark.parametrize("kind", ["a file", "a directory", "a symbolic link"])
def test_what_is_no_socket_is_refused_and_left_as_it_is(directory: Path, kind: str) -> None:
    path = directory / "broker.sock"
    target = directory / "target"
    target.write_text("content")
    if kind == "a file":
        path.write_text("content")
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to(target)
    before = path.lstat()
    with pytest.raises(EndpointError, match=f"there is {kind} at {path}"):
        place_of(path).prepare()
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
        before.st_size,
    )
    assert target.read_text() == "content"
    assert not Path(f"{path}.lock").exists()


def test_another_programs_living_socket_is_refused_and_goes_on(directory: Path) -> None:
    path = directory / "broker.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(EndpointError, match="another program listens there"):
            place_of(path).prepare()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_second_broker_is_refused_and_the_first_keeps_its_socket(directory: Path) -> None:
    first = place_of(directory / "broker.sock")
    first.prepare()
    first.bind(plain_bind)
    with pytest.raises(BrokerRunningError, match=f"pid {os.getpid()}") as caught:
        place_of(directory / "broker.sock").prepare()
    assert caught.value.pid == os.getpid()
    assert first.still_ours()
    first.close()


def test_a_broker_notices_that_its_socket_or_lock_was_taken_away(directory: Path) -> None:
    path = directory / "broker.sock"
    place = place_of(path)
    place.prepare()
    place.bind(plain_bind)
    path.rename(directory / "moved")
    assert not place.still_ours()
    (directory / "moved").rename(path)
    assert place.still_ours()
    Path(f"{path}.lock").unlink()
    assert not place.still_ours()
    place.close()


def test_closing_leaves_a_socket_that_is_not_ours(directory: Path) -> None:
    path = directory / "broker.sock"
    place = place_of(path)
    place.prepare()
    place.bind(plain_bind)
    path.unlink()
    path.write_text("somebody else's")
    place.close()
    assert path.read_text() == "somebody else's"


def test_live_locks_outlast_the_broker(directory: Path) -> None:
    place = place_of(directory / "broker.sock")
    place.prepare()
    lock = directory / "broker.sock.live" / "0123456789abcdef"
    lock.touch()
    place.close()
    assert lock.exists()
    again = place_of(directory / "broker.sock")
    again.prepare()
    assert lock.exists()
    again.close()


@pytest.mark.parametrize(
    ("mode", "words"), [(0o777, "writable by all"), (0o770, "its group"), (0o1777, "by all")]
)
def test_a_directory_that_others_can_write_is_refused(
    directory: Path, mode: int, words: str
) -> None:
    directory.chmod(mode)
    with pytest.raises(EndpointError, match=words):
        place_of(directory / "broker.sock").prepare()
    assert list(directory.iterdir()) == []


def test_a_directory_inside_one_that_anyone_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(EndpointError, match="open is writable by all"):
        place_of(tmp_path / "open" / "mine" / "broker.sock").prepare()


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(EndpointError, match="symbolic link"):
        place_of(tmp_path / "link" / "broker.sock").prepare()
    assert list(directory.iterdir()) == []


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EndpointError, match="is not a directory"):
        place_of(tmp_path / "file" / "broker.sock").prepare()


@pytest.mark.root
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    os.chown(directory, OTHER_UID, -1)
    with pytest.raises(EndpointError, match=f"belongs to uid {OTHER_UID}"):
        place_of(directory / "broker.sock").prepare()


@pytest.mark.root
def test_a_directory_closed_to_the_group_is_refused_with_the_command_that_opens_it(
    directory: Path,
) -> None:
    with pytest.raises(EndpointError, match=f"chgrp {OTHER_GID} {directory}"):
        place_of(directory / "broker.sock", OTHER_GID).prepare()
    os.chown(directory, -1, OTHER_GID)
    directory.chmod(0o2750)
    place = place_of(directory / "broker.sock", OTHER_GID)
    assert place.prepare() is PreviousRun.NONE
    place.close()


def test_a_live_directory_that_is_something_else_is_refused(directory: Path) -> None:
    (directory / "broker.sock.live").touch()
    with pytest.raises(EndpointError, match=r"broker\.sock\.live is not a directory"):
        place_of(directory / "broker.sock").prepare()
    assert not (directory / "broker.sock.lock").exists()


def test_a_missing_parent_is_one_line_with_the_systems_reason_and_the_path(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "d" / "broker.sock"
    with pytest.raises(EndpointError) as caught:
        place_of(path).prepare()
    assert str(caught.value) == (
        f"endpoint 'ipc://{path}': cannot listen: No such file or directory ({path.parent})"
    )


def test_a_bind_that_fails_says_the_systems_reason(
    directory: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        place = place_of(address)
        assert place.prepare() is PreviousRun.NONE
        router = context.socket(zmq.ROUTER)
        with pytest.raises(EndpointError, match=f"{address}.*Address already in use"):
            place.bind(router.bind)
    place.bind(router.bind)
    assert place.still_ours()
    router.close(linger=0)
    place.close()


PROGRAM = """
import sys, os
from tensorlease.broker.endpoints import Access, SocketPlace
from tensorlease.protocol.endpoint import parse_endpoint
try:
    SocketPlace(parse_endpoint(sys.argv[1]), Access(os.geteuid())).prepare()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.root
@pytest.mark.process
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("mount -o remount,ro m", "Read-only file system"),
        ("for i in $(seq 40); do touch m/$i 2>/dev/null; done", "No space left on device"),
    ],
)
def test_a_directory_that_is_read_only_or_full_is_one_line_with_the_reason(
    tmp_path: Path, prepare: str, reason: str
) -> None:
    script = (
        f'mkdir -p m && mount -t tmpfs -o size=64k,nr_inodes=20,mode=700 none m && {prepare}; "$@"'
    )
    path = tmp_path / "m" / "broker.sock"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", PROGRAM, path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    line = done.stdout.strip()
    assert line.startswith(f"EndpointError endpoint 'ipc://{path}': cannot listen: {reason}"), done
    assert "\n" not in line


def test_the_settings_win_over_the_variable_and_the_variable_over_the_users_place() -> None:
    environ = {"TENSORLEASE_ENDPOINT": "/env/b.sock"}
    config = BrokerConfig(endpoints=("/a/b.sock", "tcp://127.0.0.1:5555"))
    assert [e.url for e in choose_endpoints(config, environ, 0)] == [
        "ipc:///a/b.sock",
        "tcp://127.0.0.1:5555",
    ]
    assert [e.path for e in choose_endpoints(BrokerConfig(), environ, 0)] == ["/env/b.sock"]


def test_a_place_that_is_given_twice_is_refused_also_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    for first, second in (
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        (f"{tmp_path}/a/b.sock", f"ipc://{tmp_path}/b/b.sock"),
    ):
        with pytest.raises(EndpointError, match="again: name each place once"):
            choose_endpoints(BrokerConfig(endpoints=(first, second)), {}, os.geteuid())


def test_the_runtime_directory_is_used_only_if_it_is_the_users_own(tmp_path: Path) -> None:
    uid = os.geteuid()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (mine,) = choose_endpoints(BrokerConfig(), environ, uid)
    assert mine.path == f"{tmp_path}/tensorlease/broker.sock"
    (not_mine,) = choose_endpoints(BrokerConfig(), environ, OTHER_UID)
    assert not_mine.path == f"/tmp/tensorlease-{OTHER_UID}/broker.sock"
    (job,) = choose_endpoints(BrokerConfig(job="a"), environ, uid)
    assert job.directory == mine.directory
    assert job.path != mine.path


def test_who_may_connect_follows_mode_and_group() -> None:
    uid = os.geteuid()
    assert access_of(BrokerConfig()) == Access(uid)
    assert access_of(BrokerConfig(socket_mode=SocketMode.GROUP)) == Access(uid, os.getegid())
    assert access_of(BrokerConfig(socket_group="root")) == Access(uid, 0)
    assert access_of(BrokerConfig(socket_group="77")) == Access(uid, 77)
    with pytest.raises(ConfigError, match="socket-group = 'no such': no such group"):
        access_of(BrokerConfig(socket_group="no such"))
