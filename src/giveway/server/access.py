"""Who may ask: API keys, and what each of them may do."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giveway.core.config import LEAST_URGENT_CLASS, MOST_URGENT_CLASS
from giveway.core.errors import ConfigError
from giveway.server.http_errors import ApiError

MAX_KEY_FILE_BYTES = 1 << 20
MIN_KEY_CHARACTERS = 8
ANYBODY = "anybody"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sends a request, as far as the server cares."""

    name: str  # for logs; never the key
    owner: str  # whose files and batches are seen
    default_priority: int | None = None  # class of requests that name none; None: the server's
    ceiling: int = MOST_URGENT_CLASS  # the most urgent class that it may use
    max_concurrent: int | None = None  # requests at a time; None: no limit


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes  # SHA-256: the keys themselves are not kept
    caller: Caller


class Keyring:
    """The keys that are known. Without any, everybody is let in."""

    def __init__(self, keys: Sequence[tuple[str, Caller]] = ()) -> None:
        """keys: secret and holder. Raises ConfigError for a secret that is too short or given twice."""
        self._keys: list[_Key] = []
        for secret, caller in keys:
            if len(secret) < MIN_KEY_CHARACTERS:
                raise ConfigError(f"the key of {caller.name!r} has {len(secret)} characters; at least 8")
            key = _Key(_digest(secret), caller)
            if any(hmac.compare_digest(key.digest, other.digest) for other in self._keys):
                raise ConfigError(f"the key of {caller.name!r} is given twice")
            self._keys.append(key)
        names = [key.caller.name for key in self._keys]
        if len(set(names)) < len(names):
            raise ConfigError("two keys have the same name: their files and batches would be each other's")
        self._anybody = Caller(ANYBODY, ANYBODY)

    def holder(self, owner: str) -> Caller | None:
        """Return the holder of a key by its owner's name; None: the key has been taken away."""
        if self.is_open:
            return self._anybody
        return next((key.caller for key in self._keys if key.caller.owner == owner), None)

    @property
    def is_open(self) -> bool:
        """Whether there are no keys, so that everybody is let in."""
        return not self._keys

    def identify(self, authorization: str | None) -> Caller:
        """Return who sends this header. Raises ApiError 401. Takes as long for a wrong key as for a right one."""
        if self.is_open:
            return self._anybody
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _refused("No API key was given. Send it as `Authorization: Bearer KEY`.")
        digest, found = _digest(secret.strip()), None
        for key in self._keys:  # all of them, whichever it is
            if hmac.compare_digest(digest, key.digest):
                found = key.caller
        if found is None:
            raise _refused("The API key is not known here.")
        return found


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def plain_caller(number: int) -> Caller:
    """Return the holder of a key that was given without a name. number: from 1, in the order given."""
    name = "key" if number == 1 else f"key-{number}"
    return Caller(name, name)


def read_key_file(path: Path) -> list[tuple[str, Caller]]:
    """Read keys from a file: TOML with a [[key]] table for each if its name ends in .toml, else one key a line.

    A table has `key`, and any of `name`, `priority` (the class of requests that name none), `ceiling` (the most urgent
    class it may use) and `max_concurrent`. Empty lines and those that begin with # are skipped. Raises ConfigError,
    which never shows a key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"key file {path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"key file {path}: more than {MAX_KEY_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"key file {path}: not UTF-8") from None
    if path.suffix == ".toml":
        keys = _from_toml(path, text)
    else:
        lines = [line.strip() for line in text.splitlines()]
        secrets = [line for line in lines if line and not line.startswith("#")]
        keys = [(secret, plain_caller(number)) for number, secret in enumerate(secrets, 1)]
    if not keys:
        raise ConfigError(f"key file {path}: there is no key in it, so nobody could ask anything")
    return keys


def _from_toml(path: Path, text: str) -> list[tuple[str, Caller]]:
    try:
        tables = tomllib.loads(text).get("key")
    except (tomllib.TOMLDecodeError, RecursionError):
        # The parser's own message would show a part of the line.
        raise ConfigError(f"key file {path}: not valid TOML") from None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"key file {path}: a [[key]] table for each key is needed")
    return [_from_table(f"key file {path}, key {number}", table, number) for number, table in enumerate(tables, 1)]


def _from_table(where: str, table: Mapping[str, Any], number: int) -> tuple[str, Caller]:
    unknown = table.keys() - {"key", "name", "priority", "ceiling", "max_concurrent"}
    if unknown:
        raise ConfigError(f"{where}: unknown setting {sorted(unknown)[0]}")
    secret, name = table.get("key"), table.get("name", plain_caller(number).name)
    if not isinstance(secret, str):
        raise ConfigError(f"{where}: `key` is needed, as a text")
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isprintable():
        raise ConfigError(f"{where}: `name` must be a text of 1 to 64 printable characters")
    ceiling = _whole(where, table, "ceiling", MOST_URGENT_CLASS, LEAST_URGENT_CLASS)
    return secret, Caller(
        name,
        name,
        _whole(where, table, "priority", MOST_URGENT_CLASS, LEAST_URGENT_CLASS),
        MOST_URGENT_CLASS if ceiling is None else ceiling,
        _whole(where, table, "max_concurrent", 1, 10**6),
    )


def _whole(where: str, table: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{where}: `{name}` is {value!r}; it must be a whole number from {low} to {high}")
    return value
