"""The commands `broker`, `status` and `story`, and how the broker's loop is chosen."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tensorlease import cli
from tensorlease.broker import command
from tensorlease.broker.config import UvloopChoice
from tensorlease.broker.loops import choose_loop
from tensorlease.broker.settings import SETTINGS, load
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Terms

from .raw_agents import Raw, Threaded, trainer_hello, worker_hello


def test_flags_win_over_the_file_and_the_result_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORLEASE_ENDPOINT", raising=False)
    file = tmp_path / "broker.toml"
    file.write_text('[log]\nlevel = "error"\nformat = "json"\n')
    words = ["--config", str(file), "--log-level", "debug", "--endpoint", "/a", "--endpoint", "/b"]
    assert cli.main(["broker", *words, "--print-config"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    config = load(printed, {})
    assert (config.log.level.value, config.log.format.value) == ("debug", "json")
    assert config.endpoints == ("/a", "/b")


def test_a_wrong_setting_is_one_line_and_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["broker", "--durations-open", "never", "--check-config"]) == 2
    assert "--durations-open" in capsys.readouterr().err


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["broker", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(setting.variable in shown for setting in SETTINGS.values())


def test_the_loop_is_uvloops_where_it_is_installed_and_not_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_loop(UvloopChoice.AUTO) is uvloop.new_event_loop
    assert choose_loop(UvloopChoice.OFF) is asyncio.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert choose_loop(UvloopChoice.AUTO) is asyncio.new_event_loop
    with pytest.raises(ConfigError, match="pip install uvloop"):
        choose_loop(UvloopChoice.ON)


def test_a_seam_for_fault_tests_is_made_of_three_words_only() -> None:
    assert command.kill_seam("") is None
    with pytest.raises(ConfigError, match="sent:Prepare:1"):
        command.kill_seam("sent:Prepare")


def test_status_and_story_say_what_the_broker_holds(
    url: str, threaded: Threaded, raw: Callable[[], Raw], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, worker = raw(), raw()
    worker.join(worker_hello("r0"))
    trainer.join(trainer_hello())
    trainer.send(m.Open(1, 1, Terms(5)))
    trainer.send(m.Batch(1, 1, 0, [0], False, 3 * 2**20), b"table")
    worker.receive(m.Deliver)
    assert cli.main(["status", "--endpoint", url]) == 0
    shown = capsys.readouterr().out
    for text in ("channel policy", "trainer rank 0", "worker r0/0", "version 5 call 1", "3.0 MiB"):
        assert text in shown
    assert cli.main(["status", "--json", "--endpoint", url]) == 0
    assert capsys.readouterr().out.startswith('{"epoch":')
    assert cli.main(["story", "policy", "5", "--endpoint", url]) == 0
    assert "batch 0.0 (3145728 bytes) leased" in capsys.readouterr().out
    assert cli.main(["story", "policy", "6", "--endpoint", url]) == 1
    assert "no round for version 6" in capsys.readouterr().err


def test_without_a_broker_status_says_where_it_looked(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", "--endpoint", url]) == 1
    assert url in capsys.readouterr().err
