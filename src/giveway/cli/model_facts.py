"""What can be said about a model without loading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from giveway.build import format_bytes, size_pools
from giveway.core.config import blocks_for
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions
from giveway.runtime.backend import Backend
from giveway.runtime.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class _Estimate:
    """As much of a backend as is needed to size pools."""

    device: str
    kv_bytes_per_token: int
    free_memory_bytes: int


def model_facts(options: EngineOptions) -> dict[str, Any]:
    """Return geometry, sizes (bytes) and what fits, by name. Raises ModelError or ConfigError."""
    from giveway.runtime.torch.kv_storage import available_bytes
    from giveway.runtime.torch.settings import choose_device, choose_dtype

    if options.device == "dry":
        raise ConfigError("device is 'dry', which has no weights and no tensors to measure; use cpu or cuda")
    name, config, stored_bytes = _open(options.model)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, config)
    num_parameters = sum(map(prod, config.tensor_shapes().values()))
    weight_bytes = num_parameters * dtype.itemsize
    free = max((available_bytes(device) or 0) - weight_bytes, 0)
    estimate = _Estimate(device.type, config.kv_bytes_per_token(dtype.itemsize), free)
    cache = size_pools(options, cast(Backend, estimate))
    max_model_len = min(options.max_model_len or config.max_positions, config.max_positions, cache.num_device_slots + 1)
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
        "num_parameters": num_parameters,
        "weights_stored_bytes": stored_bytes,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "weights_bytes": weight_bytes,
        "kv_bytes_per_token": estimate.kv_bytes_per_token,
        "block_size": cache.block_size,
        "kv_bytes_per_block": estimate.kv_bytes_per_token * cache.block_size,
        "num_kv_blocks": cache.num_device_blocks,
        "num_kv_tokens": cache.num_device_slots,
        "num_host_blocks": cache.num_host_blocks,
        "max_model_len": max_model_len,
        "num_longest_requests": cache.num_device_blocks // blocks_for(max(max_model_len - 1, 1), cache.block_size),
    }


def _open(model: str | None) -> tuple[str, ModelConfig, int | None]:
    """Name, geometry and stored bytes; None: it is made in memory."""
    if model == "tiny":
        from giveway.runtime.torch.tiny import tiny_checkpoint

        return "tiny", tiny_checkpoint().config, None
    from giveway.runtime.model_source import open_model

    source = open_model(model)
    return source.name, source.checkpoint.config, _stored_bytes(source.path)


def _stored_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def facts_for_people(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return titles and texts."""
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
        ("weights, loaded", f"about {format_bytes(facts['weights_bytes'])} as {facts['dtype']} on {facts['device']}"),
        ("KV of a token", format_bytes(facts["kv_bytes_per_token"])),
        ("KV of a block", f"{format_bytes(facts['kv_bytes_per_block'])} ({facts['block_size']} tokens)"),
        ("blocks that fit", f"{facts['num_kv_blocks']} ({facts['num_kv_tokens']} tokens)"),
        ("host blocks", str(facts["num_host_blocks"])),
        ("longest request", f"{facts['max_model_len']} tokens; {facts['num_longest_requests']} of them fit at once"),
    ]
