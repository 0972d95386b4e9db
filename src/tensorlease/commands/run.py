"""The command `tensorlease run`: a broker of its own for the life of another command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from tensorlease.protocol.endpoint import ENDPOINT_VARIABLE

from .private_broker import PrivateBroker, end_with, reap, say, verb

EXAMPLE = "tensorlease run -- python train.py"

NOT_STARTED = 126
NOT_FOUND = 127
"""The shell's codes for a command that cannot be run, and for one that is not there."""

TO_THE_GROUP = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
"""What a terminal sends to all processes of a command; these are passed on to all of them.

The others are passed on to the command alone, which knows what its own children are to hear: a data
loader that is told to terminate beside its trainer is an error there.
"""
FORWARDED = TO_THE_GROUP | {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
WATCHED = FORWARDED | {signal.SIGCHLD}

_FROM_THE_KERNEL = 0x80
"""`si_code` of a signal that no process sent (SI_KERNEL of sigaction(2)): Ctrl+C at a terminal."""
_LOOK_S = 0.05


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
    epilog=f"Example: {EXAMPLE}",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of the broker's settings.",
)
@click.option(
    "--log-level", default="warning", show_default=True, help="The least that the broker logs."
)
@click.option("--log-format", default="auto", show_default=True, help="How its lines look.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0.0, max=3600.0),
    default=2.0,
    show_default=True,
    help="Seconds that agents which outlive the command have to leave.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
def run(
    config: Path | None, log_level: str, log_format: str, grace_s: float, command: tuple[str, ...]
) -> int:
    """Run a command with a broker of its own, which ends with it.

    TENSORLEASE_ENDPOINT tells the command, and what it starts, where that broker is. Signals are
    passed on. Exits with the command's own code, with 128 + N if signal N ended it, with 127 or 126
    if it cannot be started.
    """
    if not command:
        raise click.UsageError(f"no command to run; say, for example: {EXAMPLE}")
    words = [f"--log-level={log_level}", f"--log-format={log_format}"]
    words += [] if config is None else [f"--config={config}"]
    # From here on signals wait until they are asked for: none is lost, none comes in between.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Else nobody's exit code can be known.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        return _run(list(command), words, grace_s, lambda: _unblock(former))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _run(command: list[str], words: list[str], grace_s: float, unblock: Callable[[], None]) -> int:
    with PrivateBroker(words, unblock) as broker:
        while not broker.ready(_LOOK_S):
            if (code := broker.failed) is not None:
                return code
            if pending := FORWARDED & signal.sigpending():
                return 128 + signal.sigwait(pending)
        environ = os.environ | {ENDPOINT_VARIABLE: broker.endpoint}
        code = Attended(command, environ, unblock).attend(broker)
        _linger(broker, command[0], grace_s)
        return code


class Attended:
    """The command: started, told of signals, waited for.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        unblock: Gives a new process the signals that are blocked here.
    """

    def __init__(
        self, command: list[str], environ: Mapping[str, str], unblock: Callable[[], None]
    ) -> None:
        self._name = command[0]
        # At a terminal it shares our process group: Ctrl+C, Ctrl+Z and typing work as without us,
        # the kernel tells it of Ctrl+C itself. Else it gets a group of its own, so that a signal
        # to our group reaches it once, by us.
        self._shares_terminal = _in_foreground()
        self._pid = 0
        self.code: int | None = None
        parent = os.getpid()

        def begin() -> None:
            end_with(parent, signal.SIGTERM)
            unblock()

        try:
            process = subprocess.Popen(
                command,
                env=environ,
                preexec_fn=begin,  # noqa: PLW1509 - this process has one thread
                process_group=None if self._shares_terminal else 0,
            )
        except OSError as error:
            self.code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
            say(f"cannot run {self._name}: {error.strerror or error}")
            return
        self._pid = process.pid
        process.returncode = 0  # It is waited for below, by its pid, and not by this object.

    def attend(self, broker: PrivateBroker) -> int:
        """Passes signals on until it has ended; returns its exit code."""
        while self.code is None:
            came = signal.sigwaitinfo(WATCHED)
            if came.si_signo == signal.SIGCHLD:
                for pid, status in reap():
                    if pid == self._pid:
                        code = os.waitstatus_to_exitcode(status)
                        self.code = code if code >= 0 else 128 - code
                    elif broker.is_it(pid, status) and self.code is None:
                        say(
                            f"the broker (pid {pid}) {verb(status)}; {self._name} goes on without:"
                            f" tensorlease broker --endpoint {broker.endpoint}"
                        )
            elif not (self._shares_terminal and came.si_code == _FROM_THE_KERNEL):
                self._tell(signal.Signals(came.si_signo))
        return self.code

    def _tell(self, number: signal.Signals) -> None:
        """Not waited for yet, so that its pid is nobody else's."""
        if number in TO_THE_GROUP and not self._shares_terminal:
            os.killpg(self._pid, number)
        else:
            os.kill(self._pid, number)


def _linger(broker: PrivateBroker, name: str, grace_s: float) -> None:
    """Lets agents leave that outlive the command; a signal ends the waiting."""
    deadline = time.monotonic() + grace_s
    while (agents := broker.agents()) and time.monotonic() < deadline:
        came = signal.sigtimedwait(WATCHED, _LOOK_S)
        if came is not None and came.si_signo != signal.SIGCHLD:
            return
        broker.look()
    if agents:
        who = "one agent still uses" if agents == 1 else f"{agents} agents still use"
        say(f"{name} has ended, {who} its broker, which ends now")


def _in_foreground() -> bool:
    """Whether this process's group is the one that its terminal talks to."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _unblock(former: set[signal.Signals | int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
