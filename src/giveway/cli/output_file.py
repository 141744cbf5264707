"""The file named with --json, where a command writes it at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from giveway.cli.flags import flag
from giveway.core.errors import ConfigError


def takes_json_file(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare --json FILE, which reaches the command as json_file. what: is also written to it."""
    return flag(
        "json",
        into="json_file",
        variable="json_file",
        metavar="FILE",
        help=f"Also write {what} to this file.",
        type=click.Path(dir_okay=False),
    )


def open_target(json_file: str | None) -> Path | None:
    """Fail before the work, not after it, when the file cannot be written. Raises ConfigError."""
    if json_file is None:
        return None
    path = Path(json_file)
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}. Name another file with --json.") from error
    return path
