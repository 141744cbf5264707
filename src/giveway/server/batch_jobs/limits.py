"""What one key may put into the data directory, and for how long it stays there."""

from __future__ import annotations

from dataclasses import dataclass, fields

from giveway.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of files and batches. Raises ConfigError for a number below 1."""

    max_file_bytes: int = 200 * 2**20  # of one uploaded file
    max_owner_bytes: int = 10 * 2**30  # of all files of one key, outputs as well; beyond it uploads are refused
    max_owner_files: int = 10_000
    max_lines: int = 50_000  # requests in one batch
    max_line_bytes: int = 4 * 2**20  # of one line of an input file; a parsed line takes up to 30 times this
    max_unfinished_batches: int = 100  # of one key
    keep_days: int | None = None  # finished batches, and files that no batch waits for, go after so many; None: never

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(f"{field.name} is {value}; it must be at least 1")
