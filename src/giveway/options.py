"""Every setting of an engine, once: its name, its default, its unit and what it is for.

The command line, the configuration file and the environment are all derived from these fields. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from giveway.core.config import DEFAULT_CLASS
from giveway.core.errors import ConfigError

GIB = 1 << 30
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": GIB,
    "TIB": 1 << 40,
}


def parse_size(text: str | float, *, bare_unit: int = 1) -> int:
    """Return a number of bytes from `512MiB`, `2GiB`, `1.5GB` or a bare number.

    bare_unit: what a bare number counts (bytes). Raises ConfigError.
    """
    if isinstance(text, bool):
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match[2].upper() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    return int(float(match[1]) * (bare_unit if unit == "" else _UNITS[unit]))


def _option(default: Any, text: str, **extra: Any) -> Any:
    """Declare one setting; extra: kind ("size", "choice"), choices, bare_unit."""
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one engine. Names are those of `vllm serve` where it has them."""

    model: str | None = _option(
        None,
        "A .gguf file, a safetensors directory, a hub name, or 'tiny'. Default: the embedded SmolLM2-135M-Instruct.",
    )
    device: str = _option("auto", "Where to compute.", choices=("auto", "cpu", "cuda", "dry"))
    dtype: str = _option("auto", "Type of weights and KV cache.", choices=("auto", "float32", "bfloat16", "float16"))
    exact: bool | None = _option(
        None,
        "Answers do not depend on batch mates, chunking or preemption, to the bit. Default: on for cpu, off for cuda.",
    )
    num_threads: int | None = _option(None, "CPU threads. Default: what PyTorch chooses.")
    max_model_len: int | None = _option(
        None, "Prompt + output tokens of one request. Default: what the model was trained for, or what the pool holds."
    )
    max_num_seqs: int = _option(64, "Seats: requests resident at the same time.")
    max_num_batched_tokens: int = _option(2048, "Token budget of one step.")
    block_size: int = _option(16, "Tokens in one KV block.")
    kv_cache_memory_bytes: int | None = _option(
        None,
        "Size of the KV pool, such as 512MiB; a bare number is bytes. Default on CPU: 10 % of the available memory, "
        "at most 2 GiB; on CUDA: 85 % of what is free once the weights are loaded.",
        kind="size",
    )
    num_kv_blocks: int | None = _option(None, "Size of the KV pool in blocks, instead of --kv-cache-memory-bytes.")
    swap_space: int | None = _option(
        None,
        "Host memory that preempted KV is swapped to, such as 512MiB; a bare number is GiB. 0: preemption always "
        "recomputes. Default: half of the KV pool.",
        kind="size",
        bare_unit=GIB,
    )
    scheduling_policy: str = _option(
        "priority",
        "Who goes first: by class and arrival, by arrival alone, or (the control) nobody ever gives way.",
        choices=("priority", "fcfs", "none"),
    )
    preemption_mode: str = _option(
        "auto",
        "What becomes of the KV of those who give way: whichever costs the victim fewer seconds, or always the same.",
        choices=("auto", "swap", "recompute"),
    )
    cost_profile: str | None = _option(
        None,
        "JSON file with the seconds that computing and copying take, kept as it is. Default: a shipped profile, "
        "refined by real steps.",
    )
    default_priority: int = _option(DEFAULT_CLASS, "Class of a request that names none: 0 (the most urgent) to 100.")
    enable_prefix_caching: bool = _option(False, "Share the KV of equal prompt beginnings.")
    seed: int | None = _option(None, "Makes the seeds of unseeded requests repeatable. Default: drawn at random.")
    check_invariants: bool = _option(False, "Check the whole scheduler state after every step. Slow; for debugging.")

    def __post_init__(self) -> None:
        """Refuse values of a wrong type; their ranges are checked where they are used."""
        for field_ in fields(self):
            value, wanted = getattr(self, field_.name), [part.strip() for part in str(field_.type).split("|")]
            found = "None" if value is None else type(value).__name__  # by name: a bool must not pass for an int
            if found not in wanted:
                raise ConfigError(f"{field_.name} is {value!r}; it must be of type {' or '.join(wanted)}")


def options_from(values: Mapping[str, Any]) -> EngineOptions:
    """Make options from what a person wrote: sizes may be text such as "512MiB", and a bare swap_space counts GiB.

    Raises ConfigError for an unknown name, with the nearest one, or a value that is none.
    """
    known = {field_.name: field_ for field_ in fields(EngineOptions)}
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."
            raise ConfigError(f"unknown setting {name!r}. {hint}")
        about = known[name].metadata
        is_size = about.get("kind") == "size" and value is not None
        made[name] = parse_size(value, bare_unit=about.get("bare_unit", 1)) if is_size else value
    return EngineOptions(**made)
