"""What a host lacks for a broker is told before one starts, by the broker and the check alike."""

from __future__ import annotations

import grp
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorlease import cli
from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.preflight import PreflightError, check_start

from .raw_agents import Threaded

OTHER_UID = 54_321


def gid_of_nobody() -> int:
    """A number of no group, which may be given all the same."""
    taken = {group.gr_gid for group in grp.getgrall()}
    return next(gid for gid in range(54_000, 65_000) if gid not in taken)


def symlink(place: Path) -> None:
    place.symlink_to(place.parent)


def open_directory(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def file_for_socket(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "b.sock").touch()


def file_for_live(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "b.sock.live").touch()


def nothing(place: Path) -> None:
    pass


LACKS: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("socket-group = 'no-such-group'", nothing, ["socket-group = 'no-such-group': no such group"]),
    ("socket-group = '99999999999'", nothing, ["the largest number is 4294967294"]),
    ("shm-dir = '/no/such/place'", nothing, ["shm-dir = '/no/such/place': No such file or dir"]),
    ("shm-dir = '/dev/null'", nothing, ["shm-dir = '/dev/null': is not a directory"]),
    ("uvloop = 'on'", nothing, ["pip install uvloop"]),
    ("http = '9400'", nothing, ["needs prometheus-client"]),
    ("", symlink, ["/place is a symbolic link"]),
    ("", open_directory, ["/place is writable by all"]),
    ("", file_for_socket, ["there is a file at"]),
    ("", file_for_live, ["/place/b.sock.live is not a directory"]),
    (
        "socket-group = 'no-such-group'\nshm-dir = '/no/such/place'\nuvloop = 'on'",
        open_directory,
        ["uvloop", "no-such-group", "/place is writable by all", "/no/such/place"],
    ),
]


@pytest.mark.parametrize(("text", "prepare", "words"), LACKS)
def test_what_the_broker_would_be_refused_the_check_refuses_too_each_in_a_line(
    text: str,
    prepare: Callable[[Path], None],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "tensorlease.broker.meter", raising=False)
    if "uvloop" in text:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    place = tmp_path / "place"
    prepare(place)
    monkeypatch.setenv("TENSORLEASE_ENDPOINT", f"ipc://{place}/b.sock")
    file = tmp_path / "broker.toml"
    file.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    said = set()
    for command in (
        ["broker", "--config", str(file)],
        ["broker", "--check-config", "--config", str(file)],
        ["config-check", str(file)],
        ["config-check", "--print", str(file)],
    ):
        assert cli.main(command) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        said.add(printed.err)
    (lines,) = (text.splitlines() for text in said)
    assert [word for word, line in zip(words, lines, strict=True) if word not in line] == []
    assert all(line.startswith("error: ") for line in lines)
    assert sorted(tmp_path.rglob("*")) == before


def test_several_settings_that_are_wrong_in_themselves_are_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("x = 1\non-stuck = 'no'\n[durations]\nopen = 0\n")
    assert cli.main(["config-check", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"error: {file}: ") for line in lines)


def test_too_low_a_limit_on_descriptors_is_found_and_nothing_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with pytest.raises(PreflightError, match=r"needs 2176 file descriptors.* at most 448"):
        check_start(BrokerConfig(endpoints=(f"{tmp_path}/d/b.sock",)), {})


def test_settings_that_are_in_use_can_be_checked(url: str, threaded: Threaded) -> None:
    check_start(threaded.broker.config, {})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        check_start(BrokerConfig(endpoints=(url, address)), {})


def test_an_address_of_the_environment_that_cannot_work_is_found() -> None:
    with pytest.raises(PreflightError, match=r"must be absolute.*TENSORLEASE_ENDPOINT"):
        check_start(BrokerConfig(), {"TENSORLEASE_ENDPOINT": "b.sock"})


def test_a_group_by_its_number_needs_no_name(tmp_path: Path) -> None:
    endpoint = f"{tmp_path}/new/b.sock"
    check_start(BrokerConfig(endpoints=(endpoint,), socket_group=str(gid_of_nobody())), {})


def test_a_missing_parent_of_the_sockets_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=rf"No such file or directory \({tmp_path}/absent\)"):
        check_start(BrokerConfig(endpoints=(f"{tmp_path}/absent/d/b.sock",)), {})


AS_OTHER_USER = f"""
import os, sys
from tensorlease.broker.config import BrokerConfig
from tensorlease.broker.preflight import check_start
os.setgroups([])
os.setresgid(*[{OTHER_UID}] * 3)
os.setresuid(*[{OTHER_UID}] * 3)
for line in sys.stdin.read().splitlines():
    endpoint, shm_dir = line.split()
    try:
        check_start(BrokerConfig(endpoints=(endpoint,), shm_dir=shm_dir), {{}})
        print("nothing")
    except Exception as error:
        print(error)
"""


def as_other_user(*places: tuple[str, str]) -> list[str]:
    """What is wrong with each endpoint and directory for segments, for a user without rights."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", AS_OTHER_USER],
        input="\n".join(" ".join(place) for place in places),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.root
def test_what_the_user_cannot_write_is_found_but_not_where_only_others_need_to(url: str) -> None:
    root = Path(url.removeprefix("ipc://")).parent
    root.chmod(0o755)
    own, left, hidden = root / "own", root / "left", root / "hidden"
    for directory, owner in ((own, OTHER_UID), (left, OTHER_UID), (hidden, 0)):
        directory.mkdir(0o700)
        os.chown(directory, owner, owner)
    # As a broker of root that was killed leaves it.
    (left / "b.sock.lock").touch(0o600)
    assert as_other_user(
        (f"{root}/b.sock", "/dev/shm"),
        (f"{root}/new/b.sock", "/dev/shm"),
        (f"{left}/b.sock", "/dev/shm"),
        (f"{own}/b.sock", "/dev/shm"),
        (f"{own}/b.sock", str(root)),
        (f"{own}/b.sock", f"{hidden}/segments"),
    ) == [
        f"endpoint 'ipc://{path}/b.sock': {what} cannot be written by uid {OTHER_UID}, as which"
        " the broker runs"
        for path, what in ((root, root), (root / "new", root), (left, left / "b.sock.lock"))
    ] + 3 * ["nothing"]
