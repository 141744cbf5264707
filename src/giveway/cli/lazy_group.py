"""A click group that imports a command only when it is run: `--help` needs names and one line each."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands by name: (module, one line of help). Each module has a click command called `command`."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._homes = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order in which a newcomer needs them."""
        del ctx
        return list(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        del ctx
        if cmd_name not in self._homes:
            return None
        command = import_module(self._homes[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a wrong name is answered with the nearest right one."""
        if args and args[0] not in self._homes and not args[0].startswith("-"):
            near = get_close_matches(args[0], self._homes, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Commands: {', '.join(self._homes)}."
            raise click.UsageError(f"no such command: '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._homes.items()])
