"""Opening a weight file: mapped into memory, not read."""

from __future__ import annotations

import mmap
from pathlib import Path

from giveway.core.errors import ModelFileError, ModelNotFoundError


def map_file(path: Path, format_name: str) -> mmap.mmap:
    """Map a file for reading. Raises ModelNotFoundError if it cannot be opened, ModelFileError if it is empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelFileError(f"{path}: the file is empty, so it is not {format_name}") from error
    except OSError as error:
        raise ModelNotFoundError(f"cannot open model file {path}: {error.strerror}") from error
