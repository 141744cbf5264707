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
    backend: str = _option(
        "auto",
        "What computes: the native kernels (CPU only) or PyTorch. Default: the kernels where they are installed and "
        "can run the model.",
        choices=("auto", "native", "torch"),
    )
    dtype: str = _option("auto", "Type of weights and KV cache.", choices=("auto", "float32", "bfloat16", "float16"))
    exact: bool | None = _option(
        None,
        "Answers do not depend on batch mates, chunking or preemption, to the bit. Default: on for cpu, off for cuda. "
        "The native kernels always keep this.",
    )
    num_threads: int | None = _option(None, "CPU threads. Default: one for each physical core.")
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
    preemption_victim: str | None = _option(
        None,
        "Who gives way first inside a class. Default: the newest under fcfs, else the cheapest (fewest seconds lost "
        "for each block that is still lacking).",
        choices=("newest", "least-work", "cheapest"),
    )
    partial_preemption: bool = _option(True, "A victim gives up only as many blocks as are lacking.")
    swap_dir: str | None = _option(None, "Directory of the file for --swap-disk. Default: the system's temporary one.")
    swap_disk: int = _option(
        0,
        "Disk space that preempted KV goes to when --swap-space is full, such as 4GiB; a bare number is GiB. 0: none.",
        kind="size",
        bare_unit=GIB,
    )
    cost_profile: str | None = _option(
        None,
        "JSON file with the seconds that computing and copying take, kept as it is. Default: the one learned here "
        "earlier, else a shipped one; refined by real steps.",
    )
    priority_aging_s: float | None = _option(
        None, "The class of a request counts as one lower for every so many seconds since its arrival. Default: never."
    )
    target_step_ms: float | None = _option(
        None,
        "Milliseconds that a step with less urgent work in it may take. Default: a chunk of a less urgent prompt may "
        "double the time of a decode step, and beside an urgent prompt less urgent work may add a tenth.",
    )
    most_urgent_priority: int | None = _option(
        None,
        "A class that may come at any time: prefills of less urgent ones are always held to --target-step-ms. More "
        "urgent ones count for ten minutes after they came. Default of `giveway serve`: --default-priority.",
    )
    default_priority: int = _option(DEFAULT_CLASS, "Class of a request that names none: 0 (the most urgent) to 100.")
    enable_prefix_caching: bool = _option(True, "Share the KV of equal prompt beginnings.")
    cache_lead_s: float = _option(
        60.0, "Seconds by which shareable KV of a class outlives that of the next less urgent one."
    )
    seed: int | None = _option(None, "Makes the seeds of unseeded requests repeatable. Default: drawn at random.")
    trace: str | None = _option(
        None, "File for a trace of every decision, for `giveway explain`; an older trace is replaced. Default: none."
    )
    check_invariants: bool = _option(False, "Check the whole scheduler state after every step. Slow; for debugging.")

    def __post_init__(self) -> None:
        """Refuse values of a wrong type; their ranges are checked where they are used."""
        for field_ in fields(self):
            value, wanted = getattr(self, field_.name), [part.strip() for part in str(field_.type).split("|")]
            found = "None" if value is None else type(value).__name__  # by name: a bool must not pass for an int
            if found not in wanted and not (found == "int" and "float" in wanted):
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
