"""Cost profiles kept between runs, so that the second start on a machine knows what the first one learned.

A cache and nothing more: whatever is wrong with it, a run goes on as if it were empty, and a debug line says why.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from giveway.core.cost_profile import CostProfile
from giveway.core.errors import ConfigError, ModelFileError
from giveway.processor import processor_model
from giveway.runtime.json_file import parse_json_object

MAX_FILE_BYTES = 64 << 10  # a profile takes a few hundred
_FORMAT = 1  # of the key: to be raised when the same numbers come to mean something else

PlainValue = str | int | float | bool | None

logger = logging.getLogger("giveway")


class ProfileCache:
    """One small file per key in a directory of its own, which need not exist yet. Several processes may share it."""

    def __init__(self, directory: Path | None) -> None:
        """Use `directory`; None keeps nothing."""
        self._directory = directory

    def load(self, key: str) -> CostProfile | None:
        """Return the profile saved last under the key, or None when there is none that can be read."""
        if self._directory is None:
            return None
        path = self._directory / _file_name(key)
        try:
            entry = parse_json_object(_read(path), source=path)
            if entry.keys() != {"key", "profile"} or not isinstance(entry["profile"], dict):
                raise ConfigError("a key and a profile are needed, and nothing else")
            if entry["key"] != key:
                raise ConfigError(f"it belongs to {entry['key']!r}")
            return CostProfile.from_dict(entry["profile"])
        except FileNotFoundError:
            return None
        except (OSError, ConfigError, ModelFileError) as error:
            logger.debug("the kept cost profile %s is not used: %s", path, error)
            return None

    def save(self, key: str, profile: CostProfile) -> None:
        """Put the profile in the place of the one kept under the key, whole or not at all."""
        if self._directory is None:
            return
        text = json.dumps({"key": key, "profile": profile.as_dict()}, indent=1)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._directory / _file_name(key), text.encode())
        except OSError as error:
            logger.debug("the cost profile is not kept in %s: %s", self._directory, error)


def default_directory() -> Path | None:
    """Return where profiles are kept: $GIVEWAY_CACHE_DIR, else giveway in $XDG_CACHE_HOME, else in ~/.cache.

    None when the user has no home directory. A relative $XDG_CACHE_HOME counts as unset, as its specification says.
    """
    chosen = os.environ.get("GIVEWAY_CACHE_DIR")
    if chosen:
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and Path(shared).is_absolute():
        return Path(shared) / "giveway"
    try:
        return Path.home() / ".cache" / "giveway"
    except RuntimeError:  # a container that runs as a user without a name
        return None


def profile_key(
    *,
    model: Mapping[str, PlainValue],
    dtype: str,
    device: str,
    backend: str,
    num_threads: int,
    processor: str,
    block_size: int,
) -> str:
    """Name everything that speed depends on, readably. Equal arguments give equal keys, any difference another one.

    model: its geometry and the format of its weights. device, backend: what they call themselves. num_threads: of the
    forward pass. processor: see `processor_kind`. block_size: tokens per block. Nothing in it may name a user or a
    machine: it is stored as it is.
    """
    parts = {
        "format": _FORMAT,
        "model": dict(model),
        "dtype": dtype,
        "device": device,
        "backend": backend,
        "num_threads": num_threads,
        "processor": processor,
        "block_size": block_size,
    }
    return json.dumps(parts, sort_keys=True)


def processor_kind() -> str:
    """Return the architecture and model name of the processor, which all machines of its kind share."""
    model = processor_model()
    return model if model == platform.machine() else f"{platform.machine()} {model}"


def _file_name(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest() + ".json"


def _read(path: Path) -> bytes:
    """Read a regular file of bounded size. Not through a link, and without waiting for whoever feeds a pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"larger than {MAX_FILE_BYTES} bytes")
    return content


def _replace(path: Path, content: bytes) -> None:
    """Write a file that readers see either as it was or as it will be.

    The temporary file has a name that cannot be foreseen and is never opened through something that lies there.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem[:8]}.", suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
