"""The daemon's log."""

from __future__ import annotations

import io
import logging
import os
import pty
import tempfile
from collections.abc import Iterator
from typing import TextIO

import msgspec
import pytest
import zmq

from tensorlease.agents.process import this_process
from tensorlease.broker.config import LogFormat, LogLevel
from tensorlease.broker.logs import (
    BURST,
    MAX_KINDS,
    JournalFormatter,
    JsonFormatter,
    RepeatHandler,
    TextFormatter,
    setup_logging,
)
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Process

from .raw_agents import Raw, Threaded, config_for, worker_hello

log = logging.getLogger("tensorlease.broker.test")


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger("tensorlease")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)


def counted(stream: TextIO) -> tuple[RepeatHandler, Clock]:
    clock = Clock()
    handler = RepeatHandler(stream, clock)
    root = logging.getLogger("tensorlease")
    root.handlers[:], root.propagate = [handler], False
    root.setLevel(logging.DEBUG)
    return handler, clock


def test_json_lines_carry_the_fixed_fields_and_the_error() -> None:
    stream = io.StringIO()
    setup_logging(LogLevel.INFO, LogFormat.AUTO, stream, {})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("bad %s", "thing", extra={"peer": "w0", "pid": 7, "other": 1})
    log.debug("not this")
    line = msgspec.json.decode(stream.getvalue())
    assert line["level"] == "error"
    assert line["logger"] == "tensorlease.broker.test"
    assert (line["message"], line["peer"], line["pid"]) == ("bad thing", "w0", 7)
    assert line["error"].endswith("ValueError: why")
    assert "other" not in line
    assert line["time"].endswith("+00:00")


def test_text_stays_on_its_line_whatever_a_peer_wrote() -> None:
    stream = io.StringIO()
    setup_logging(LogLevel.INFO, LogFormat.TEXT, stream, {})
    log.warning("name %s", "a\nb\x1b[31m\u2028", extra={"peer": "x\ny"})
    (line,) = stream.getvalue().splitlines()
    assert r"name a\x0ab\x1b[31m\x2028  peer=x\x0ay" in line
    assert "warning" in line


def test_a_terminal_gets_text_and_anything_else_json() -> None:
    primary, secondary = pty.openpty()
    with os.fdopen(secondary, "w") as terminal:
        setup_logging(LogLevel.INFO, LogFormat.AUTO, terminal, {})
        log.info("hello")
        assert b"info    hello" in os.read(primary, 1000)
    os.close(primary)


def test_the_journal_gets_the_severity_of_each_line_and_only_if_it_listens() -> None:
    with tempfile.TemporaryFile("w+") as stream:
        status = os.fstat(stream.fileno())
        journal = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        setup_logging(LogLevel.DEBUG, LogFormat.TEXT, stream, journal)
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.log(level, "level %d", level)
        setup_logging(LogLevel.DEBUG, LogFormat.TEXT, stream, {"JOURNAL_STREAM": "1:1"})
        log.info("elsewhere")
        stream.seek(0)
        starts = [line[:3] for line in stream.read().splitlines()]
    assert starts[:4] == ["<7>", "<6>", "<4>", "<3>"]
    assert not starts[4].startswith("<")


def test_setting_up_twice_does_not_write_twice() -> None:
    stream = io.StringIO()
    setup_logging(LogLevel.INFO, LogFormat.JSON, stream, {})
    setup_logging(LogLevel.INFO, LogFormat.JSON, stream, {})
    log.info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_what_says_the_same_again_is_told_from_others_of_its_kind() -> None:
    stream = io.StringIO()
    handler, clock = counted(stream)
    for name in ("a", "b", "c", "d", "e"):
        log.warning("worker %s joined", name)
    for _ in range(6):
        log.warning("out of %s", "descriptors")
    clock.now = 20.0
    handler.flush_repeats()
    log.warning("out of %s", "descriptors")
    lines = stream.getvalue().splitlines()
    assert "worker e joined (the last of 2 more of its kind)" in lines
    assert lines[-2:] == ["out of descriptors (repeated 3 times)", "out of descriptors"]


def test_a_thousand_bad_messages_a_second_for_ten_seconds_are_a_few_lines() -> None:
    stream = io.StringIO()
    handler, clock = counted(stream)
    for n in range(10_000):
        clock.now = n / 1000
        log.warning("bad message %d", n)
    handler.flush_repeats(everything=True)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "bad message 0",
        "bad message 1",
        "bad message 2",
        "bad message 9999 (the last of 9997 more of its kind)",
    ]


def test_a_minute_of_the_same_complaint_is_less_than_twenty_lines_and_counts_all() -> None:
    stream = io.StringIO()
    handler, clock = counted(stream)
    for n in range(6000):
        clock.now = n / 100
        log.warning("no broker")
        handler.flush_repeats()
    handler.flush_repeats(everything=True)
    lines = stream.getvalue().splitlines()
    assert len(lines) < 20
    repeated = [int(line.split()[-2]) for line in lines if "repeated" in line]
    assert len(lines) - len(repeated) + sum(repeated) == 6000


def test_a_count_is_told_when_its_window_ends_though_nothing_more_comes() -> None:
    stream = io.StringIO()
    handler, clock = counted(stream)
    for _ in range(10):
        log.warning("flood")
    clock.now = 9.0
    handler.flush_repeats()
    assert "repeated" not in stream.getvalue()
    clock.now = 10.0
    handler.flush_repeats()
    assert stream.getvalue().endswith("flood (repeated 7 times)\n")


def test_one_flood_does_not_silence_another_complaint() -> None:
    stream = io.StringIO()
    counted(stream)
    for n in range(100):
        log.warning("flood %d", n)
    log.warning("something else")
    log.error("flood %d", 1)
    assert stream.getvalue().splitlines()[3:] == ["something else", "flood 1"]


def test_counting_remembers_a_bounded_number_of_kinds_and_loses_no_count() -> None:
    stream = io.StringIO()
    handler, _ = counted(stream)
    for _ in range(5):
        log.warning("first")
    for n in range(2 * MAX_KINDS):
        log.warning(f"kind {n}")
    assert len(handler._kinds) == MAX_KINDS
    assert "first (repeated 2 times)" in stream.getvalue().splitlines()


def test_an_agent_that_is_refused_again_and_again_fills_no_log(
    url: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    stream = io.StringIO()
    handler, _ = counted(stream)
    running = Threaded(config_for(url))
    try:
        agent = Raw(context, url)
        me = this_process()
        lie = Process(me.pid, me.start + 1, me.namespace)
        stranger = msgspec.structs.replace(worker_hello(), processes=[lie])
        for _ in range(500):
            agent.send(stranger)
        for _ in range(500):
            assert agent.receive(m.Refused).code is Code.UNPROVEN_PROCESS
    finally:
        running.stop()
    handler.flush_repeats(everything=True)
    lines = [line for line in stream.getvalue().splitlines() if "refused" in line]
    assert len(lines) == BURST + 1
    assert lines[-1].endswith(f"(repeated {500 - BURST} times)")


def test_a_record_stays_one_line_of_the_journal_whatever_is_in_its_text() -> None:
    record = logging.makeLogRecord(
        {"msg": "bad \u2028forged\x85 \u2029 line", "levelno": logging.WARNING}
    )
    for inner in (JsonFormatter(), TextFormatter()):
        assert "\n" not in JournalFormatter(inner).format(record)
