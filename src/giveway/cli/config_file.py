"""The TOML file named with --config: engine settings at the top, a table for each command's own options.

max_num_seqs = 32
kv_cache_memory_bytes = "512MiB"

[generate]
max_tokens = 200
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from giveway.core.errors import ConfigError

MAX_FILE_BYTES = 1 << 20


def read_config_file(
    path: Path,
    *,
    command: str,
    engine_names: Collection[str],
    command_names: Collection[str],
    commands: Collection[str],
) -> dict[str, Any]:
    """Return the settings of a file for one command, by option name.

    engine_names: settings that may stand at the top. command_names: options of `command`, which may stand in its
    table. commands: all that there are; the tables of the others are left to them.
    Raises ConfigError: unreadable, not TOML, or a name that is not known (with the nearest one that is).
    """
    values: dict[str, Any] = {}
    for key, value in _read_toml(path).items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            if key not in commands:
                raise ConfigError(f"{path}: table [{key}] is not a command.{_nearest(key, commands)}")
            if key == command:
                values |= _named(path, value, {*command_names, *engine_names}, f"[{key}] ")
        elif name in engine_names:
            values.setdefault(name, value)
        elif name in command_names:
            raise ConfigError(f"{path}: {key} is not an engine setting; put it below [{command}]")
        else:
            raise ConfigError(f"{path}: unknown setting {key}.{_nearest(name, engine_names)}")
    return values


def _named(path: Path, table: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {where}{key}.{_nearest(name, known)}")
        values[name] = value
    return values


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else f" Known are: {', '.join(sorted(known))}."


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes; this is not a configuration file")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
