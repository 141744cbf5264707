"""What can be said about a model without loading its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from giveway.backends import BackendName, choose_backend
from giveway.build import format_bytes, load_model, size_pools
from giveway.core.config import CacheConfig, blocks_for
from giveway.core.errors import MissingDependencyError
from giveway.options import EngineOptions
from giveway.runtime import memory, native, torch
from giveway.runtime.backend import Backend
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.model_source import open_model
from giveway.runtime.weights.checkpoint import Checkpoint, Encoding

logger = logging.getLogger("giveway")

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class _Estimate:
    """As much of a backend as is needed to size pools."""

    device: str
    kv_bytes_per_token: int
    free_memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Machine:
    """Where the model would run, and on what."""

    device: str
    dtype: str
    free_memory_bytes: int  # before the weights are loaded; 0: not known
    backend: str | None  # None: there is none that could compute it
    reason: str  # why this backend and not the other
    instruction_set: str | None = None  # of the native kernels
    keeps_encodings: bool = False  # weights stay quantized in memory

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self.dtype]


def model_facts(options: EngineOptions) -> dict[str, Any]:
    """Return geometry, sizes (bytes) and what fits, by name; None: there is no such thing, or it is not known.

    Works without any backend, which is then told as a warning: sizes are those of PyTorch on the CPU.
    Raises ModelError or ConfigError.
    """
    if options.device == "dry":
        return _facts_of_dry_run(options)
    name, checkpoint, stored_bytes = _open(options.model)
    config = checkpoint.config
    machine = _machine(options, config)
    weight_bytes = _loaded_bytes(checkpoint, machine)
    kv_bytes_per_token = config.kv_bytes_per_token(machine.dtype_bytes)
    free = max(machine.free_memory_bytes - weight_bytes, 0)
    cache = size_pools(options, cast(Backend, _Estimate(machine.device, kv_bytes_per_token, free)))
    return {
        "model": name,
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "num_parameters": sum(map(prod, config.tensor_shapes().values())),
        "weights_stored_bytes": stored_bytes,
        "device": machine.device,
        "backend": machine.backend,
        "backend_reason": machine.reason,
        "instruction_set": machine.instruction_set,
        "dtype": machine.dtype,
        "weights_bytes": weight_bytes,
        **_facts_of_pool(options, kv_bytes_per_token, config.max_positions, cache),
    }


def _facts_of_dry_run(options: EngineOptions) -> dict[str, Any]:
    """The same names; what only a real model has is None."""
    model = load_model(options)
    geometry = (
        "architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size",
    )  # fmt: skip
    return {
        "model": model.name,
        **dict.fromkeys(geometry),
        "vocab_size": model.tokenizer.vocab_size,
        "max_positions": model.max_positions,
        **dict.fromkeys(("num_parameters", "weights_stored_bytes")),
        "device": model.backend.device,
        **dict.fromkeys(("backend", "backend_reason", "instruction_set", "dtype", "weights_bytes")),
        **_facts_of_pool(
            options, model.backend.kv_bytes_per_token, model.max_positions, size_pools(options, model.backend)
        ),
    }


def _facts_of_pool(
    options: EngineOptions, kv_bytes_per_token: int, max_positions: int, cache: CacheConfig
) -> dict[str, Any]:
    max_model_len = min(options.max_model_len or max_positions, max_positions, cache.num_device_slots + 1)
    blocks_of_longest = blocks_for(max(max_model_len - 1, 1), options.block_size)
    return {
        "kv_bytes_per_token": kv_bytes_per_token,
        "block_size": options.block_size,
        "kv_bytes_per_block": kv_bytes_per_token * options.block_size,
        "num_kv_blocks": cache.num_device_blocks,
        "num_kv_tokens": cache.num_device_slots,
        "num_host_blocks": cache.num_host_blocks,
        "max_model_len": max_model_len,
        "num_longest_requests": cache.num_device_blocks // blocks_of_longest,
    }


def _loaded_bytes(checkpoint: Checkpoint, machine: _Machine) -> int:
    """Bytes of all parameters in memory, about: padding is not counted."""
    num_bytes = 0.0
    for name, shape in checkpoint.config.tensor_shapes().items():
        per_element = float(machine.dtype_bytes)
        if machine.keeps_encodings and len(shape) > 1:
            encoding = checkpoint.tensor(name).encoding
            if encoding is not Encoding.F16:  # which the kernels widen
                per_element = min(per_element, encoding.block_bytes / encoding.block_elements)
        num_bytes += prod(shape) * per_element
    return round(num_bytes)


def _machine(options: EngineOptions, config: ModelConfig) -> _Machine:
    """Raises ConfigError for a device or a dtype that there is not, or a backend that cannot be had."""
    try:
        choice = choose_backend(options, config)
        if choice.name is BackendName.NATIVE:
            return _machine_of_kernels(options, choice.reason)
        return _machine_of_torch(options, config, choice.reason)
    except MissingDependencyError as missing:
        if options.backend != "auto" or options.device == "cuda":
            raise
        logger.warning("sizes are those of PyTorch on the CPU: %s", missing)
        dtype = "float32" if options.dtype == "auto" else options.dtype
        return _Machine("cpu", dtype, memory.available_bytes() or 0, None, str(missing))


def _machine_of_kernels(options: EngineOptions, reason: str) -> _Machine:
    from giveway_kernels import chosen_instruction_set

    return _Machine(
        "cpu",
        native.choose_dtype(options.dtype),
        memory.available_bytes() or 0,
        BackendName.NATIVE.value,
        reason,
        chosen_instruction_set(),
        keeps_encodings=True,
    )


def _machine_of_torch(options: EngineOptions, config: ModelConfig, reason: str) -> _Machine:
    if not torch.is_installed():
        raise MissingDependencyError(f"PyTorch is not installed. {torch.INSTALL_TORCH}")
    from giveway.runtime.torch.kv_storage import available_bytes
    from giveway.runtime.torch.settings import choose_device, choose_dtype

    device = choose_device(options.device)
    dtype = str(choose_dtype(options.dtype, device, config)).removeprefix("torch.")
    return _Machine(device.type, dtype, available_bytes(device) or 0, BackendName.TORCH.value, reason)


def _open(model: str | None) -> tuple[str, Checkpoint, int | None]:
    """Name, headers and stored bytes; None: it is made in memory."""
    if model == "tiny":
        from giveway.runtime.tiny import tiny_checkpoint

        return "tiny", tiny_checkpoint(), None
    source = open_model(model)
    return source.name, source.checkpoint, _stored_bytes(source.path)


def _stored_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files if file.is_file())


def facts_for_people(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return titles and texts."""
    return [*_model_for_people(facts), *_pool_for_people(facts)]


def _model_for_people(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    if facts["device"] == "dry":
        return [
            ("model", "none: this is the dry run, which schedules without weights; its text means nothing"),
            ("context", f"{facts['max_positions']} tokens"),
        ]
    stored = facts["weights_stored_bytes"]
    return [
        ("model", f"{facts['model']} ({facts['architecture']}, {facts['num_parameters'] / 1e6:.1f} M parameters)"),
        (
            "geometry",
            f"{facts['num_layers']} layers, {facts['num_heads']} heads, {facts['num_kv_heads']} KV heads, head size "
            f"{facts['head_size']}, hidden {facts['hidden_size']}, inner {facts['intermediate_size']}",
        ),
        ("vocabulary", f"{facts['vocab_size']} tokens"),
        ("context", f"{facts['max_positions']} tokens"),
        ("weights, stored", "made in memory" if stored is None else format_bytes(stored)),
        ("weights, loaded", f"about {format_bytes(facts['weights_bytes'])} on {facts['device']}"),
        ("backend", _backend_for_people(facts)),
    ]


def _backend_for_people(facts: Mapping[str, Any]) -> str:
    reason, dtype = facts["backend_reason"], facts["dtype"]
    if facts["backend"] == BackendName.NATIVE.value:
        return f"native kernels with {facts['instruction_set']}, {dtype}: {reason}"
    if facts["backend"] == BackendName.TORCH.value:
        return f"PyTorch, {dtype}: {reason}"
    return f"none: {reason}"


def _pool_for_people(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("KV of a token", format_bytes(facts["kv_bytes_per_token"])),
        ("KV of a block", f"{format_bytes(facts['kv_bytes_per_block'])} ({facts['block_size']} tokens)"),
        ("blocks that fit", f"{facts['num_kv_blocks']} ({facts['num_kv_tokens']} tokens)"),
        ("host blocks", str(facts["num_host_blocks"])),
        ("longest request", f"{facts['max_model_len']} tokens; {facts['num_longest_requests']} of them fit at once"),
    ]
