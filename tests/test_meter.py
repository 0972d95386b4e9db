"""How far something is: a bar, or lines."""

from __future__ import annotations

import io

from rich.console import Console

from tensorlease.commands.meter import Meter


def test_on_a_terminal_there_is_a_bar_and_elsewhere_a_line_now_and_then() -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with Meter("version 3 of [policy]", 4 * 2**20, console, line_s=0.0) as meter:
            meter.advance(2**20)
            meter.advance(3 * 2**20)
        assert isinstance(console.file, io.StringIO)
        printed = console.file.getvalue()
        if terminal:
            assert "version 3 of [policy]" in printed and "4.0/4.0 MiB" in printed
        else:
            assert printed == (
                "version 3 of [policy]: 1.0 MiB of 4.0 MiB\n"
                "version 3 of [policy]: 4.0 MiB of 4.0 MiB\n"
            )
