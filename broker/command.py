"""The command `tensorlease broker`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from ..protocol.errors import ConfigError
from .config import BrokerConfig
from .dispatch import Seam
from .logs import setup_logging
from .loops import choose_loop
from .preflight import check_start
from .server import Broker
from .settings import SETTINGS, Setting, load, render_toml

TEST_KILL_VARIABLE = "TENSORLEASE_TEST_KILL"
"""Fault tests only: `sent:Prepare:1` has the broker kill itself after the first Prepare it sent;
`received:` counts messages that it has handled."""
COLLECT_AFTER = (10_000, 20, 50)
"""Objects made and kept before the collector looks at the newest, and how often at the older."""
_SENDING_S = 0.05
"""What was sent leaves in another thread: time for it to go."""


def _option(setting: Setting) -> click.Option:
    text = f"{setting.allowed[0].upper()}{setting.allowed[1:]}. [{setting.variable}]"
    if setting.key == "endpoints":
        names = ["--endpoint", "--endpoints", "setting_endpoints"]
        text = f"Where to listen; repeat it for several. [{setting.variable}]"
        return click.Option(names, multiple=True, metavar="ADDRESS", help=text)
    name = "setting_" + setting.key.replace(".", "__").replace("-", "_")
    return click.Option([setting.flag, name], metavar="VALUE", help=text)


@click.command()
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file of settings; the environment and options win over it.",
)
@click.option("--check-config", is_flag=True, help="Say whether the settings can work, and end.")
@click.option("--print-config", is_flag=True, help="Print the effective settings, and end.")
def broker(file: Path | None, check_config: bool, print_config: bool, **settings: object) -> None:
    """Run the broker of this host.

    It listens where --endpoint says, else at $TENSORLEASE_ENDPOINT, else in the user's runtime
    directory, and ends at SIGTERM or SIGINT when the rounds under way have ended; a second one ends
    it at once. SIGHUP reads the settings again.
    """
    by_name = {f"setting_{k.replace('.', '__').replace('-', '_')}": k for k in SETTINGS}
    flags = {by_name[name]: value for name, value in settings.items()}

    def read() -> BrokerConfig:
        return load(file, os.environ, flags)

    config = read()
    if check_config or not print_config:
        check_start(config, os.environ)
    if print_config:
        click.echo(render_toml(config), nl=False)
    if check_config and not print_config:
        click.echo("the settings can work")
    if not (print_config or check_config):
        run(config, read, os.environ)


broker.params.extend(_option(setting) for setting in SETTINGS.values())


def run(
    config: BrokerConfig, reload: Callable[[], BrokerConfig], environ: Mapping[str, str]
) -> None:
    """Run a broker until it ends; raises what `Broker.serve` raises."""
    handler = setup_logging(config.log.level, config.log.format)
    loop_factory = choose_loop(config.uvloop)
    seam = kill_seam(environ.get(TEST_KILL_VARIABLE, ""))

    # What is there now stays: the collector need not look at it again, and what a broker makes has
    # no cycles, so that it can come more rarely.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)

    async def serve() -> None:
        server = Broker(config, environ=environ, reload=reload, log_handler=handler, seam=seam)
        await server.serve()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve())


def kill_seam(text: str) -> Seam | None:
    """The seam that `TEST_KILL_VARIABLE` asks for; None where it asks for nothing.

    Raises:
        ConfigError: It is not of the form `sent|received:MessageName:count`.
    """
    if not text:
        return None
    parts = text.split(":")
    if len(parts) != 3 or parts[0] not in ("sent", "received") or not parts[2].isdigit():
        raise ConfigError(f"{TEST_KILL_VARIABLE}={text!r}: write it like sent:Prepare:1")
    wanted, left = (parts[0], parts[1]), int(parts[2])

    def seam(what: str, name: str) -> None:
        nonlocal left
        if (what, name) == wanted:
            left -= 1
            if left == 0:
                sys.stderr.flush()
                time.sleep(_SENDING_S)
                os.kill(os.getpid(), signal.SIGKILL)

    return seam
