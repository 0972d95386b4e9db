"""The command `tensorlease config-check`: whether a broker's settings can work."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tensorlease.broker.preflight import check_start
from tensorlease.broker.settings import load, render_toml


@click.command("config-check")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--print", "print_config", is_flag=True, help="Print what would be in effect.")
def config_check(file: Path | None, print_config: bool) -> None:
    """Say whether a broker could start here with the settings of a FILE (TOML) and the environment.

    Every one that cannot work is named in a line, with what is allowed, and the exit code is 2.
    Nothing is bound or changed; a broker may run. Whose directories, groups and limits are looked
    at is this process's: call it as the broker's user.
    """
    config = load(file, os.environ)
    check_start(config, os.environ)
    click.echo(
        render_toml(config) if print_config else "the settings can work", nl=not print_config
    )
