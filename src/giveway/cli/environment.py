"""Variables GIVEWAY_*: a mistyped one is told, because nothing else would show that it has no effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import click

PREFIX = "GIVEWAY_"
CACHE_DIRECTORY = "GIVEWAY_CACHE_DIR"  # read by giveway.profile_cache, and no option of any command

logger = logging.getLogger("giveway")


def warn_about_unknown_variables(environment: Mapping[str, str], ctx: click.Context) -> None:
    """Log a warning for each variable with our prefix that no option of any command reads.

    ctx: of the group of all commands. They are imported to be asked, but only if there is a variable to ask about.
    """
    given = sorted(name for name in environment if name.startswith(PREFIX))
    known = {CACHE_DIRECTORY, *variables_of(ctx.command, ctx)} if given else set()
    bare = {name.removeprefix(PREFIX) for name in known}  # or the prefix would make any two names look alike
    for name in given:
        if name not in known:
            near = get_close_matches(name.removeprefix(PREFIX), bare, n=1)
            hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
            logger.warning("the environment variable %s is no setting and has no effect.%s", name, hint)


def variables_of(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yield the variables that a command and all commands below it read; some of them several times."""
    for param in command.params:
        yield from [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            if below is not None:
                yield from variables_of(below, ctx)
