"""The unit, its user and its directories, as systemd's own tools read them (no PID 1 is needed)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tensorlease.broker.settings import load as load_settings
from tensorlease.protocol.endpoint import candidates, parse_endpoint

SYSTEMD = Path(__file__).resolve().parent.parent / "systemd"


def tool(name: str) -> str:
    """The path of one of systemd's tools; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def settings(name: str) -> list[str]:
    """Every value that the unit gives to `name`, in order."""
    lines = (SYSTEMD / "tensorlease.service").read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def variables() -> dict[str, str]:
    """The environment that the unit gives to the broker."""
    words = " ".join(settings("Environment")).split()
    return dict(word.split("=", 1) for word in words)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with an executable that exists here."""
    text = (SYSTEMD / "tensorlease.service").read_text()
    assert "ExecStart=/opt/tensorlease/bin/tensorlease broker\n" in text
    path = tmp_path / "tensorlease.service"
    path.write_text(text.replace("/opt/tensorlease/bin/tensorlease", sys.executable))
    return path


def test_systemd_finds_no_fault_in_the_unit(unit: Path) -> None:
    done = run(tool("systemd-analyze"), "verify", "--man=no", unit)
    # verify follows the unit's dependencies: what it finds in those of the machine is not ours.
    ours = [line for line in done.stderr.splitlines() if "tensorlease" in line]
    assert (done.returncode, ours) == (0, [])


def test_systemd_finds_a_fault_where_there_is_one(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    done = run(tool("systemd-analyze"), "verify", "--man=no", unit)
    assert "WatchdogSecs" in done.stderr


def test_the_unit_stays_hardened(unit: Path) -> None:
    done = run(tool("systemd-analyze"), "security", "--offline=yes", "--threshold=30", unit)
    assert done.returncode == 0, done.stdout


def test_the_unit_hides_nothing_that_the_broker_must_see() -> None:
    """Agents' processes by host pid, their credentials, their segments; see the unit's comments."""
    hiding = ("DynamicUser", "PrivatePIDs", "ProtectProc", "ProcSubset", "PrivateUsers")
    found = {name: settings(name) for name in (*hiding, "RestrictSUIDSGID")}
    assert not any(found.values()), found


def test_the_endpoint_lies_in_the_directory_that_outlasts_the_broker() -> None:
    assert settings("RuntimeDirectory") == ["tensorlease"]
    assert settings("RuntimeDirectoryPreserve") == ["yes"]
    endpoint = parse_endpoint(variables()["TENSORLEASE_ENDPOINT"])
    assert endpoint.directory == "/run/tensorlease"
    assert f"d {endpoint.live_directory} 3770" in (SYSTEMD / "tensorlease.tmpfiles").read_text()


def test_agents_look_where_the_unit_listens() -> None:
    endpoint = parse_endpoint(variables()["TENSORLEASE_ENDPOINT"])
    assert endpoint in candidates({}, uid=1000)


def test_every_setting_of_the_unit_is_one_that_the_broker_knows() -> None:
    config = load_settings(None, variables())
    assert config.socket_group == settings("Group")[0]


@pytest.mark.root
def test_the_user_and_the_directories_are_made_with_the_modes_that_agents_need(
    tmp_path: Path,
) -> None:
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    made = run(sysusers, f"--root={tmp_path}", SYSTEMD / "tensorlease.sysusers")
    assert made.returncode == 0, made.stderr
    made = run(tmpfiles, "--create", f"--root={tmp_path}", SYSTEMD / "tensorlease.tmpfiles")
    assert made.returncode == 0, made.stderr

    accounts = (tmp_path / "etc" / "passwd").read_text().splitlines()
    name, _, uid, gid, *_ = next(line for line in accounts if "tensorlease" in line).split(":")
    assert name == settings("User")[0] == settings("Group")[0]
    for path, mode in (("run/tensorlease", 0o750), ("run/tensorlease/broker.sock.live", 0o3770)):
        status = os.stat(tmp_path / path)
        assert (path, stat.S_IMODE(status.st_mode)) == (path, mode)
        assert (path, status.st_uid, status.st_gid) == (path, int(uid), int(gid))
