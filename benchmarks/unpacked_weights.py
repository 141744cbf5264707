"""A GGUF model as a safetensors directory, for engines that cannot read the file: the same weights, in float32.

Source: the configuration keys of Hugging Face's Llama.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from giveway.runtime.model_config import ModelConfig
from giveway.runtime.tokenizer.tokenizer import Tokenizer
from giveway.runtime.weights.checkpoint import Checkpoint
from giveway.runtime.weights.dequantize import dequantize


def write_unpacked(checkpoint: Checkpoint, directory: Path) -> None:
    """Write `config.json` and `model.safetensors`, decoded. An existing copy is kept.

    Only the Llama family without biases and without scaled rotary embedding: ValueError for others.
    """
    config_file, weights_file = directory / "config.json", directory / "model.safetensors"
    if config_file.exists():  # written last
        return
    settings = llama_settings(checkpoint.config)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: dequantize(checkpoint.tensor(name)) for name in checkpoint.config.tensor_shapes()}
    save_file(tensors, weights_file, metadata={"format": "pt"})
    config_file.write_text(json.dumps(settings, indent=2) + "\n")


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the vocabulary beside the weights, for servers that answer with text."""
    tokenizer.save(directory / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def llama_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a Llama of this geometry."""
    is_plain = config.architecture == "llama" and not (config.qkv_bias or config.o_bias or config.qk_norm)
    if not is_plain or config.rope_scaling or config.rope_freq_factors or config.sliding_window:
        raise ValueError(f"only a plain Llama can be unpacked, this is {config}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "dtype": "float32",
    }
