"""A class of load, as `--class interactive:rate=0.5,prompt=64,output=32,priority=0` states it."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any

from giveway.core.errors import ConfigError

MAX_TOKENS = 10_000_000  # of one prompt or answer: far above every context, far below what memory holds
_MAX_REQUESTS = 100_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TIER = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens of a prompt or an answer, each number from low to high equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise ConfigError(f"tokens {self.low}-{self.high}: write a number or low-high, from 1 to {MAX_TOKENS}")

    def draw(self, rng: random.Random) -> int:
        """Choose one."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Shape(Enum):
    """When the requests of a class come."""

    RATE = "rate"  # open loop: at random moments, however the server does
    BURST = "burst"  # open loop: all at once
    CLOSED = "concurrency"  # a fixed number under way; whichever ends is replaced


@dataclass(frozen=True, slots=True)
class LoadClass:
    """Requests of one kind.

    Exactly one of rate, burst and concurrency is not None. num_requests: None means no limit of its own.
    """

    name: str
    prompt: TokenRange
    output: TokenRange
    rate: float | None = None  # requests a second
    burst: int | None = None  # requests
    concurrency: int | None = None  # requests
    burstiness: float = 1.0  # shape of the gamma distribution of gaps; 1: Poisson, infinity: even gaps
    num_requests: int | None = None
    start_s: float = 0.0  # after the start of the run
    priority: int | None = None  # None: the request does not say
    service_tier: str | None = None  # None: the request does not say
    is_streamed: bool = True

    def __post_init__(self) -> None:
        chosen = [shape.value for shape in Shape if getattr(self, shape.value) is not None]
        if len(chosen) != 1:
            raise ConfigError(
                f"class {self.name!r}: {' and '.join(chosen) or 'no shape'} given; it needs exactly one of rate= (open "
                "loop), burst= (all at once) and concurrency= (closed loop)"
            )
        if self.burst is not None and self.num_requests is not None:
            raise ConfigError(
                f"class {self.name!r}: burst={self.burst} is already its number of requests; leave out num="
            )

    @property
    def shape(self) -> Shape:
        """Return when its requests come."""
        return next(shape for shape in Shape if getattr(self, shape.value) is not None)

    @property
    def limit(self) -> int | None:
        """Return how many requests it has; None: as many as there is time for."""
        return self.burst if self.burst is not None else self.num_requests

    @property
    def is_endless(self) -> bool:
        """Return whether it is a closed loop that runs for as long as the others do."""
        return self.shape is Shape.CLOSED and self.num_requests is None

    def describe(self) -> dict[str, Any]:
        """Return the settings that were made, for the report. An infinite number is written as text: JSON has none."""
        described: dict[str, Any] = {"prompt": str(self.prompt), "output": str(self.output), self.shape.value: 0}
        described[self.shape.value] = _finite(getattr(self, self.shape.value))
        if self.rate is not None:
            described["burstiness"] = _finite(self.burstiness)
        optional = {
            "num": self.num_requests,
            "start": self.start_s or None,
            "priority": self.priority,
            "service_tier": self.service_tier,
            "stream": None if self.is_streamed else 0,
        }
        return described | {name: value for name, value in optional.items() if value is not None}


def _finite(number: float) -> float | str:
    return "inf" if math.isinf(number) else number


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """What a class has whose text does not say."""

    prompt: TokenRange
    output: TokenRange
    burstiness: float = 1.0
    num_open_loop_requests: int | None = None  # None: as many as the duration allows


@dataclass(slots=True)
class _Draft:
    """The fields of a class while its text is read."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)

    def take(self, key: str, text: str) -> None:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            hint = f"Did you mean {near[0]}=?" if near else f"Known are: {', '.join(_KEYS)}."
            raise ConfigError(f"class {self.name!r}: unknown setting {key!r}. {hint}")
        name, read = _KEYS[key]
        if name in self.values:
            raise ConfigError(f"class {self.name!r}: {key}= is given twice")
        try:
            self.values[name] = read(text)
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"class {self.name!r}: {key}={text!r}: {error}") from None


def parse_class(text: str, defaults: ClassDefaults) -> LoadClass:
    """Read "NAME:key=value,key=value". Raises ConfigError, which names class, setting and what would be right."""
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name) or not colon:
        raise ConfigError(
            f"class {text!r}: write NAME:key=value,key=value with a name of letters, digits, '_', '.' and '-', for "
            "example interactive:rate=0.5,prompt=64,output=32"
        )
    draft = _Draft(name)
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"class {name!r}: {part!r} is no key=value")
        draft.take(key.strip(), value.strip())
    values: dict[str, Any] = {
        "prompt": defaults.prompt,
        "output": defaults.output,
        "burstiness": defaults.burstiness,
    } | draft.values
    load_class = LoadClass(name, **values)
    if load_class.shape is Shape.RATE and load_class.num_requests is None:
        load_class = replace(load_class, num_requests=defaults.num_open_loop_requests)
    return load_class


def parse_range(text: str) -> TokenRange:
    """Read "64" or "100-512". Raises ValueError."""
    low, dash, high = text.partition("-")
    return TokenRange(_whole(low), _whole(high) if dash else _whole(low))


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text.strip(), re.ASCII):
        raise ValueError("not a whole number")
    return int(text)


def _count(text: str) -> int:
    number = _whole(text)
    if not 1 <= number <= _MAX_REQUESTS:
        raise ValueError(f"must be from 1 to {_MAX_REQUESTS}")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:  # so that NaN fails too
        raise ValueError("must be above 0")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("must be seconds from 0 on")
    return number


def _tier(text: str) -> str:
    if not _TIER.fullmatch(text):
        raise ValueError("a service tier has letters, digits, '_' and '-'")
    return text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


_KEYS = {
    "rate": ("rate", _positive),
    "burst": ("burst", _count),
    "concurrency": ("concurrency", _count),
    "prompt": ("prompt", parse_range),
    "output": ("output", parse_range),
    "priority": ("priority", _whole),
    "service_tier": ("service_tier", _tier),
    "num": ("num_requests", _count),
    "burstiness": ("burstiness", _positive),
    "start": ("start_s", _seconds),
    "stream": ("is_streamed", _switch),
}
