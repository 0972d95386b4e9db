"""Settings: their precedence, and that none that is wrong passes in silence."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tensorlease.broker.config import BrokerConfig, LogFormat, OnStuck
from tensorlease.broker.settings import SETTINGS, SettingsError, load, render_toml
from tensorlease.protocol.errors import ConfigError


def write(directory: Path, text: str) -> Path:
    file = directory / "broker.toml"
    file.write_text(text)
    return file


def problem_of(text: str, directory: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load(write(directory, text), {})
    return str(caught.value)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'on-stuck = "kill"\n[durations]\nopen = 1\nprepare = 1\nstage = 1\n')
    environ = {"TENSORLEASE_DURATIONS__OPEN": "2", "TENSORLEASE_DURATIONS__PREPARE": "2.5"}
    config = load(file, environ, {"durations.open": "3", "durations.drain": None})
    assert config.durations.open == 3.0
    assert config.durations.prepare == 2.5
    assert config.durations.stage == 1.0
    assert config.durations.drain == 10.0
    assert config.on_stuck is OnStuck.KILL


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), {}) == BrokerConfig() == load(None, {})


def test_a_file_that_was_named_and_is_missing_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file or directory"):
        load(tmp_path / "absent.toml", {})


@pytest.mark.parametrize("content", [b"open = [", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broker.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broker\.toml is not TOML"):
        load(file, {})


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    reader, writer = os.pipe()
    try:
        for path in (
            tmp_path / "fifo",
            tmp_path / "link",
            tmp_path,
            Path("/dev/zero"),
            Path("/dev/null"),
            Path(f"/dev/fd/{reader}"),
        ):
            with pytest.raises(ConfigError, match=rf"{path} is not a regular file; write"):
                load(path, {})
    finally:
        os.close(reader)
        os.close(writer)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(tmp_path, "on-stuck = 'kill'"))
    assert load(tmp_path / "link", {}).on_stuck is OnStuck.KILL


def test_variables_that_agents_read_are_not_settings() -> None:
    environ = {"TENSORLEASE_ENDPOINT": "x", "TENSORLEASE_AGENT_X": "1", "PATH": "/bin"}
    assert load(None, environ) == BrokerConfig()


def test_the_shared_memory_directory_is_one_setting_of_both_sides() -> None:
    assert load(None, {"TENSORLEASE_SHM_DIR": "/mnt/shm"}).shm_dir == "/mnt/shm"


def test_lists_come_from_the_environment_with_commas_and_from_repeated_flags() -> None:
    environ = {"TENSORLEASE_ALLOWED_UIDS": "1000, 1001", "TENSORLEASE_ENDPOINTS": "/a/b.sock"}
    config = load(None, environ, {"endpoints": ("/c/d.sock", "tcp://127.0.0.1:5555")})
    assert config.allowed_uids == (1000, 1001)
    assert config.endpoints == ("/c/d.sock", "tcp://127.0.0.1:5555")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[durations]\nstge = 30\n", ["durations.stge = 30", "did you mean durations.stage?"]),
        ("open = 30\n", ["open = 30", "did you mean durations.open?"]),
        ("[durations]\nmax-agents = 3\n", ["did you mean limits.max-agents?"]),
        ("ack-timout = 30\n", ["ack-timout = 30", "known are endpoints, "]),
        ("durations = 3\n", ["durations = 3", "write [durations]"]),
        ("[on-stuck]\nx = 1\n", ["on-stuck", 'one of "wait", "kill"']),
        ("[durations]\nstage = '30s'\n", ["durations.stage = '30s'", "greater than 0", "86400"]),
        ("[durations]\nstage = '30'\n", ["durations.stage = '30'", "got `str`"]),
        ("[durations]\nstage = -1\n", ["durations.stage = -1", "greater than 0"]),
        ("[durations]\nstage = 0\n", ["durations.stage = 0", "greater than 0"]),
        ("[durations]\nstage = nan\n", ["durations.stage = nan", "greater than 0"]),
        ("[durations]\nstage = inf\n", ["durations.stage = inf", "at most 86400"]),
        ("[durations]\nstage = true\n", ["durations.stage = True", "greater than 0"]),
        ("[limits]\nmax-agents = 0\n", ["limits.max-agents = 0", "from 1 to 65536"]),
        ("[limits]\nmax-agents = 1.5\n", ["limits.max-agents = 1.5", "whole number"]),
        ("allowed-uids = [-1]\n", ["allowed-uids = [-1]", "from 0 to"]),
        ("on-stuck = 'kil'\n", ["on-stuck = 'kil'", 'one of "wait", "kill"']),
        ("socket-mode = '0666'\n", ["socket-mode = '0666'", '"0600", "0660"']),
        ("shm-dir = 'shm'\n", ["shm-dir = 'shm'", "absolute path"]),
        ("endpoints = ['/a/b', 'ipc:///a//b']\n", ["'ipc:///a//b'", "the same place as '/a/b'"]),
        ("endpoints = ['udp://x']\n", ["endpoints", "transport 'udp'"]),
        ("[durations]\nbeat = 3\n", ["durations.silent = 5.0", "twice durations.beat"]),
        ("[limits]\nmax-queue-bytes = 4096\n", ["limits.max-queue-bytes = 4096", "one body"]),
        ("socket-group = 'g'\nsocket-mode = '0600'\n", ["socket-group = 'g'", "no effect"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_file_value_and_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    message = problem_of(text, tmp_path)
    assert message.startswith(f"{tmp_path}/broker.toml: ")
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("value", ["3s", "", "nan", "-1", "0", "1e400"])
def test_a_wrong_variable_is_named_as_the_environment_has_it(value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, {"TENSORLEASE_DURATIONS__OPEN": value})
    assert f"environment: TENSORLEASE_DURATIONS__OPEN = {value!r}" in str(caught.value)
    assert "greater than 0" in str(caught.value)


def test_an_unknown_variable_is_refused_and_the_nearest_known_one_named() -> None:
    with pytest.raises(SettingsError, match=r"did you mean TENSORLEASE_ON_STUCK\?"):
        load(None, {"TENSORLEASE_ONSTUCK": "kill"})


def test_a_wrong_flag_is_named_as_the_command_line_has_it() -> None:
    with pytest.raises(SettingsError, match=r"command line: --log-level = 'loud'"):
        load(None, {}, {"log.level": "loud"})
    with pytest.raises(SettingsError, match=r"did you mean log.level\?"):
        load(None, {}, {"log.levl": "info"})


def test_a_wrong_value_is_told_even_where_another_source_overrides_it(tmp_path: Path) -> None:
    file = write(tmp_path, "[durations]\nopen = '1'\n")
    with pytest.raises(SettingsError, match="got `str`"):
        load(file, {"TENSORLEASE_DURATIONS__OPEN": "2"})


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "x = 1\n[durations]\nopen = 0\n")
    with pytest.raises(SettingsError) as caught:
        load(file, {"TENSORLEASE_UVLOOP": "maybe"})
    assert {problem.key for problem in caught.value.problems} == {
        "TENSORLEASE_UVLOOP",
        "x",
        "durations.open",
    }


def test_the_effective_settings_printed_read_back_to_the_same(tmp_path: Path) -> None:
    config = load(
        None,
        {"TENSORLEASE_ALLOWED_UIDS": "5,6", "TENSORLEASE_JOB": 'a "quoted" \\ job\n'},
        {"endpoints": ["/a/é.sock"], "log.format": "json", "durations.beat": "0.00001"},
    )
    assert config.log.format is LogFormat.JSON
    assert load(write(tmp_path, render_toml(config)), {}) == config


def test_every_setting_has_words_for_what_it_allows_and_a_value_in_the_printed_file() -> None:
    printed = render_toml(BrokerConfig())
    for setting in SETTINGS.values():
        assert setting.allowed
        assert f"{setting.key.rpartition('.')[2]} = " in printed
    assert len(SETTINGS) == sum(" = " in line for line in printed.splitlines())


def test_every_setting_can_be_given_by_variable_and_by_flag() -> None:
    defaults = msgspec.to_builtins(BrokerConfig())
    for key, setting in SETTINGS.items():
        section, dot, leaf = key.partition(".")
        value = defaults[section][leaf] if dot else defaults[key]
        text = ",".join(map(str, value)) if setting.is_list else str(value)
        assert load(None, {setting.variable: text}) == BrokerConfig()
        assert load(None, {}, {key: text}) == BrokerConfig()
