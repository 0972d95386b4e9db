"""The daemon's log: lines on stderr, for people on a terminal, as JSON otherwise.

What repeats is counted and not written, so that a peer that sends rubbish a thousand times a second
fills neither the disk nor the CPU.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from msgspec import Struct

from .config import LogFormat, LogLevel

FIELDS = ("channel", "group", "call", "version", "batch", "peer", "pid", "device")
"""What a record may carry (`extra=`) beside its message; always under these names."""

BURST = 3
"""Lines of one kind that are written in a window before counting begins."""
FIRST_WINDOW_S = 10.0
LAST_WINDOW_S = 300.0
"""A window doubles up to this while its kind of line goes on repeating."""
MAX_KINDS = 256
"""Kinds of lines that are counted at a time; the one longest unseen is forgotten."""

# Severities of sd-daemon(3).
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# Whatever a peer puts into a text, a line stays a line and a terminal stays as it is.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the FIELDS present, error."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode("utf-8", "replace")


class TextFormatter(logging.Formatter):
    """`12:34:56.789 warning  message  peer=… pid=…`, and a traceback on the lines below it."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = record.getMessage().translate(_CONTROLS)
        parts = [f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<8}{message}"]
        parts += [f"{k}={str(v).translate(_CONTROLS)}" for k, v in _fields(record).items()]
        text = "  ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JournalFormatter(logging.Formatter):
    """Another formatter's lines, each with the `<N>` by which journald knows its severity."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        priority = next((n for level, n in _PRIORITIES if record.levelno >= level), 7)
        lines = self._inner.format(record).split("\n")  # JSON has other line ends in its texts.
        return "\n".join(f"<{priority}>{line}" for line in lines)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    present = ((name, getattr(record, name, None)) for name in FIELDS)
    return {name: value for name, value in present if value is not None}


class _Repeats(Struct):
    """How often one kind of line came in the current window."""

    ends: float
    window_s: float
    written: int = 0
    last: logging.LogRecord | None = None
    """The last line that was not written."""
    unwritten: int = 0
    alike: bool = True
    """All lines that were not written said the same."""


class RepeatHandler(logging.StreamHandler[TextIO]):
    """Writes at most BURST lines of a kind per window, then the last of the others and their count.

    A kind is (logger, level, message before its arguments are filled in).

    Args:
        stream: Where to write.
        clock: Monotonic seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int, str], _Repeats] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        """Write or count a record."""
        now = self._clock()
        kind = (record.name, record.levelno, str(record.msg))
        repeats = self._kinds.get(kind)
        if repeats is None:
            repeats = _Repeats(now + FIRST_WINDOW_S, FIRST_WINDOW_S)
            self._kinds[kind] = repeats
            if len(self._kinds) > MAX_KINDS:
                _, forgotten = self._kinds.popitem(last=False)
                self._write_repeats(forgotten)
        elif now >= repeats.ends:
            self._next_window(repeats, now)
        self._kinds.move_to_end(kind)
        if repeats.written < BURST:
            repeats.written += 1
            super().emit(record)
        else:
            repeats.unwritten += 1
            repeats.alike &= repeats.last is None or repeats.last.args == record.args
            repeats.last = record

    def flush_repeats(self, everything: bool = False) -> None:
        """Write the counts of windows that have ended, or at the end of the run of all."""
        self.acquire()
        try:
            now = self._clock()
            for kind, repeats in list(self._kinds.items()):
                if everything or now >= repeats.ends:
                    if not repeats.unwritten:
                        del self._kinds[kind]
                        continue
                    self._next_window(repeats, now)
        finally:
            self.release()

    def _next_window(self, repeats: _Repeats, now: float) -> None:
        self._write_repeats(repeats)
        repeats.ends = now + repeats.window_s
        repeats.written = 0

    def _write_repeats(self, repeats: _Repeats) -> None:
        repeating = repeats.unwritten > 0
        repeats.window_s = min(2 * repeats.window_s, LAST_WINDOW_S) if repeating else FIRST_WINDOW_S
        if repeats.last is None:
            return
        summary = logging.makeLogRecord(repeats.last.__dict__)
        count = repeats.unwritten
        how = (
            f"repeated {count} times" if repeats.alike else f"the last of {count} more of its kind"
        )
        summary.msg = f"{repeats.last.getMessage()} ({how})"
        summary.args = None
        repeats.last, repeats.unwritten, repeats.alike = None, 0, True
        super().emit(summary)


def setup_logging(
    level: LogLevel,
    format: LogFormat,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> RepeatHandler:
    """Log everything below `tensorlease` to stderr; called again, it replaces what it set up.

    Returns:
        The handler; call `flush_repeats` now and then, and with `everything` at the end.
    """
    # Python has no stderr where it was closed before the start.
    output: TextIO = stream or sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    text = format is LogFormat.TEXT or (format is LogFormat.AUTO and output.isatty())
    formatter: logging.Formatter = TextFormatter() if text else JsonFormatter()
    if _is_journal(os.environ if environ is None else environ, output):
        formatter = JournalFormatter(formatter)
    handler = RepeatHandler(output)
    handler.setFormatter(formatter)
    root = logging.getLogger("tensorlease")
    for old in [old for old in root.handlers if isinstance(old, RepeatHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.value.upper())
    root.propagate = False
    return handler


def _is_journal(environ: Mapping[str, str], stream: TextIO) -> bool:
    """Whether the stream is the one that systemd connected to the journal.

    `JOURNAL_STREAM` is inherited also by processes whose stderr goes elsewhere, hence it names the
    device and inode (systemd.exec(5)).
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
