"""What the server itself can be told, beside the options of its engine; frozen values whose ranges are checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from giveway.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on what clients may ask for and hold."""

    max_body_bytes: int = 4 * MIB  # of one request; uploads have a limit of their own
    max_queued: int = 10_000  # requests of one class that wait for their first seat
    max_queued_of: dict[str, int] = field(default_factory=dict)  # the same, for classes by name
    max_unread: int = 512  # updates that may wait for a slow reader before its request gives way
    max_prompts: int = 2048  # in one completion request
    max_http_requests: int | None = None  # in progress at a time, whoever sends them; None: no limit
    body_timeout_s: float = 60.0  # from the end of the head to the last byte of a body
    request_timeout_s: float | None = None  # from arrival to end; None: no limit
    keep_alive_s: float = 5.0  # a stream with nothing to say sends a comment so often
    stall_timeout_s: float = 60.0  # a step that takes longer counts as a stuck loop

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("max_body_bytes", "max_queued", "max_unread", "max_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1")
        if self.max_http_requests is not None and self.max_http_requests < 1:
            raise ConfigError(f"max_http_requests is {self.max_http_requests}; at least 1")
        for name, limit in self.max_queued_of.items():
            if limit < 0:
                raise ConfigError(f"max_queued of class {name!r} is {limit}; 0 takes none, less is no limit")
        for name in ("body_timeout_s", "keep_alive_s", "stall_timeout_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        if self.request_timeout_s is not None and not 0 < self.request_timeout_s < 1e9:
            raise ConfigError(f"request_timeout_s is {self.request_timeout_s}; it must be above 0 seconds")
