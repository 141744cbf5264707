"""One line of a trace, looked at with suspicion: whatever is not as it must be is named with its line."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, TypeVar

from giveway.core.errors import ConfigError
from giveway.core.ids import RequestId

Choice = TypeVar("Choice", bound=Enum)

_LARGEST_COUNT = 1 << 53
_LONGEST_S = 1e15  # beyond it neighbouring microseconds are one number


class Line:
    """A JSON object. Every method raises ConfigError for what it does not find as it must be."""

    __slots__ = ("_values", "where")

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: a JSON object is needed, found {_short(value)}")
        self._values: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def wrong(self, name: str, needed: str) -> ConfigError:
        """Return the error for a field."""
        return ConfigError(f"{self.where}: {name} is {_short(self._values.get(name))}; it must be {needed}")

    def plain(self, name: str) -> Any:
        """Return whatever stands there, to be checked by the caller."""
        return self._values.get(name)

    def count(self, name: str) -> int:
        """Return a whole number from 0."""
        value = self._values.get(name)
        if value is None or not _is_count(value):
            raise self.wrong(name, "a whole number from 0")
        return int(value)

    def maybe_count(self, name: str) -> int | None:
        """Return a whole number from 0; None: null, or absent."""
        return None if self._values.get(name) is None else self.count(name)

    def seconds(self, name: str) -> float:
        """Return a finite number."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LONGEST_S:
            raise self.wrong(name, "a number of seconds")
        return float(value)

    def maybe_seconds(self, name: str) -> float | None:
        """Return a finite number; None: null, or absent."""
        return None if self._values.get(name) is None else self.seconds(name)

    def truth(self, name: str, default: bool | None = None) -> bool:
        """Return true or false. default: for an absent one; None: it must be there."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def request(self, name: str) -> RequestId:
        """Return the name of a request."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "the id of a request")
        return RequestId(value)

    def maybe_request(self, name: str) -> RequestId | None:
        """Return the name of a request; None: null, or absent."""
        return None if self._values.get(name) is None else self.request(name)

    def choice(self, name: str, kind: type[Choice]) -> Choice:
        """Return a member of an enumeration, by its value."""
        return self._member(name, self._values.get(name), kind)

    def maybe_choice(self, name: str, kind: type[Choice]) -> Choice | None:
        """Return a member of an enumeration; None: null, or absent."""
        return None if self._values.get(name) is None else self.choice(name, kind)

    def _member(self, name: str, value: object, kind: type[Choice]) -> Choice:
        try:
            return kind(value)
        except ValueError as error:
            raise ConfigError(
                f"{self.where}: {name} is {_short(value)}; it must be one of {', '.join(str(m.value) for m in kind)}"
            ) from error

    def part(self, name: str) -> Line:
        """Return an object within this one."""
        return Line(self._values.get(name), f"{self.where}: {name}")

    def parts(self, name: str) -> Iterator[Line]:
        """Yield the objects of a list; none if it is absent."""
        for value in self.items(name):
            yield Line(value, f"{self.where}: {name}")

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def requests(self, name: str) -> tuple[RequestId, ...]:
        """Return a list of names of requests; empty if it is absent."""
        values = self.items(name)
        for value in values:
            if not isinstance(value, str):
                raise ConfigError(f"{self.where}: {name} has {_short(value)}; a list of request ids is needed")
        return tuple(values)

    def rows(self, name: str, kinds: tuple[type, ...]) -> Iterator[list[Any]]:
        """Yield lists of one shape. kinds: str, bool, int (from 0) or an enumeration, for each place."""
        for row in self.items(name):
            if not isinstance(row, list) or len(row) != len(kinds):
                raise ConfigError(f"{self.where}: {name} has {_short(row)}; lists of {len(kinds)} are needed")
            yield [self._cell(name, value, kind) for value, kind in zip(row, kinds, strict=True)]

    def _cell(self, name: str, value: object, kind: type) -> Any:
        if issubclass(kind, Enum):
            return self._member(name, value, kind)
        if not (_is_count(value) if kind is int else isinstance(value, kind)):
            raise ConfigError(f"{self.where}: {name} has {_short(value)} where {kind.__name__} is needed")
        return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
