"""The file named with --json, where a command writes it at its end."""

from __future__ import annotations

from pathlib import Path

from giveway.core.errors import ConfigError


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
