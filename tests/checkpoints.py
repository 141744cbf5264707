"""Tiny random checkpoints written on the spot: a Hugging Face directory, and the same weights again as GGUF.

Weights are drawn with a spread that makes every part matter: norms differ from one and biases from zero, so a backend
that forgets one of them cannot agree with the reference by luck.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from giveway.runtime.weights.checkpoint import Encoding

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

VOCAB_SIZE = 320
BOS, EOS, END_OF_TURN = "<|bos|>", "<|eos|>", "<|im_end|>"
CONTROL_TOKENS = (BOS, EOS, "<|im_start|>", END_OF_TURN)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then it gives way to the next one",
    "requests wait until there is room; the urgent ones go first, the others go on later and lose nothing",
)


def write_hf_checkpoint(
    path: Path,
    family: Family,
    *,
    tied: bool,
    shards: int = 1,
    rope_llama3: bool = False,
    seed: int = 0,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write config.json, safetensors (in `shards` files), tokenizer and generation_config.json into `path`.

    vocab_size: of the model; the tokenizer has at most VOCAB_SIZE.

    Geometry: hidden 64, 2 layers, 4 heads, 2 KV heads, head 16 (qwen3: 32, so that heads * head != hidden), inner 128.
    """
    import transformers

    path.mkdir(parents=True, exist_ok=True)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if rope_llama3:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 64
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family == "qwen3":
        settings["head_dim"] = 32
    if family == "mistral":
        settings["sliding_window"] = sliding_window
    config = transformers.AutoConfig.for_model(family, **settings)
    torch_state = torch.random.get_rng_state()
    try:
        model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        torch.random.set_rng_state(torch_state)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    _redraw(model, seed)
    config.save_pretrained(path)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    _save_sharded(path, tensors, shards)
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [1, 3], "temperature": 0.7, "top_p": 0.9, "top_k": 40})
    )
    write_tokenizer(path)
    return path


def _redraw(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5))
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)


def _save_sharded(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path: Path) -> Path:
    """Train a byte-level BPE of at most VOCAB_SIZE tokens, controls first, and write it with a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    return path / "tokenizer.json"


def write_gguf_checkpoint(hf_dir: Path, gguf_path: Path, *, encoding: Encoding) -> Path:
    """Write the weights and tokenizer of a directory made by `write_hf_checkpoint` as GGUF; vectors stay F32."""
    config = json.loads((hf_dir / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(gguf_path, "llama" if family in ("llama", "mistral") else family)
    _add_geometry(writer, config)
    _add_tokenizer(writer, hf_dir)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        tensors |= load_file(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if family in ("llama", "mistral") and part in heads:
            values = permute_rows(values, heads[part])
        kind = gguf.GGMLQuantizationType[encoding.name if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config["rope_parameters"], config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_path


def permute_rows(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Interleave the two halves of every head, as GGUF files of the llama architecture store Q and K."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor with a canonical name."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    fields = name.split(".")
    return f"blk.{fields[2]}.{parts[fields[-2]]}.{fields[-1]}"


def llama3_divisors(rope: dict[str, Any], head_size: int) -> npt.NDArray[np.float32]:
    """What every rotary frequency is divided by under Llama 3's scaling, in float64 and rounded once."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size)
    wavelengths = 2 * np.pi / frequencies
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float32] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return divisors


def _add_geometry(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, hf_dir: Path) -> None:
    model = json.loads((hf_dir / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    padding = [f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE)]
    kinds = [gguf.TokenType.CONTROL if token in CONTROL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
