"""The table of commands, and the click group that imports a command when it is called.

This module needs click; `cli` imports it only when a command line is being run.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import NamedTuple, NoReturn

import click
from click.shell_completion import CompletionItem


class Command(NamedTuple):
    """Where a command lives, and its one line in the help (read without importing it)."""

    target: str
    """Module and attribute: "package.module:name"."""
    summary: str

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            ModuleNotFoundError: Something that its module imports is not installed.
            TypeError: The table names something that is no command.
        """
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is a {type(command).__name__}, not a click command")
        return command


COMMANDS = {
    "bench": Command("tensorlease.commands.bench:bench", "Measure this installation."),
    "bridge": Command(
        "tensorlease.commands.bridge:bridge", "Lead inference servers through the rounds."
    ),
    "broker": Command("tensorlease.broker.command:broker", "Run the broker of this host."),
    "config-check": Command(
        "tensorlease.commands.config_check:config_check",
        "Say whether a broker's settings can work.",
    ),
    "demo": Command(
        "tensorlease.commands.demo:demo", "Train a small model and hand it to workers."
    ),
    "doctor": Command(
        "tensorlease.commands.doctor:doctor", "Say whether weights can be handed over here."
    ),
    "drain": Command(
        "tensorlease.commands.drain:drain", "Admit no new round, and wait for those under way."
    ),
    "pull": Command("tensorlease.commands.pull:pull", "Show, or write, the versions that come."),
    "push": Command(
        "tensorlease.commands.push:push", "Make a version of a directory of safetensors files."
    ),
    "run": Command("tensorlease.commands.run:run", "Run a command with a broker of its own."),
    "status": Command("tensorlease.commands.status:status", "Ask a broker what it holds."),
    "story": Command(
        "tensorlease.commands.story:story", "Tell what happened to a version of a channel."
    ),
    "top": Command("tensorlease.commands.top:top", "Watch a broker: stages, stragglers, rates."),
}


class LazyGroup(click.Group):
    """A group whose commands are rows of a table, each imported when it is called."""

    def __init__(self, name: str, table: dict[str, Command], help: str) -> None:
        super().__init__(name, help=help, no_args_is_help=True)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = self.table.get(cmd_name)
        return row.load() if row is not None else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            self._refuse(ctx, args[0])
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names from the table: a key press imports no command."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=row.summary)
            for name, row in sorted(self.table.items())
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.table[name].summary) for name in sorted(self.table)])

    def _refuse(self, ctx: click.Context, name: str) -> NoReturn:
        near = difflib.get_close_matches(name, self.table, n=1, cutoff=0.5)
        hint = (
            f"the nearest is {near[0]!r}" if near else f"there are {', '.join(sorted(self.table))}"
        )
        ctx.fail(f"no command {name!r}; {hint}")


def build() -> click.Group:
    """The command `tensorlease`, with every row of the table below it."""
    group = LazyGroup(
        "tensorlease",
        COMMANDS,
        help="Hand weights from trainers to inference workers on one host, and free no buffer"
        " before its last reader is done.",
    )
    return click.version_option(package_name="tensorlease", prog_name="tensorlease")(group)
