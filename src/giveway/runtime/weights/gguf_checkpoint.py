"""A GGUF file as a checkpoint: its metadata as a ModelConfig, its tensors under canonical names.

Source of the key and tensor names: the GGUF specification and the constants of its reference writer (`gguf` package).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from giveway.core.errors import ModelFileError, TensorMismatchError, UnsupportedModelError
from giveway.runtime.model_config import ModelConfig, window_among
from giveway.runtime.weights.checkpoint import Encoding, RawTensor, check_tensor_shape, warn_of_unused_tensors
from giveway.runtime.weights.dequantize import dequantize
from giveway.runtime.weights.gguf_header import ByteView, GgufHeader, GgufTensor, read_gguf_header

# Architectures whose converters interleave the two rotary halves of every Q and K head; the others keep HF's order.
_INTERLEAVED = frozenset({"llama"})
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
SUPPORTED_ARCHITECTURES = "llama (Mistral too), qwen2, qwen3"

_WHOLE_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufCheckpoint:
    """An opened GGUF model. Opening checks that every tensor is there, with its shape and a known encoding."""

    def __init__(self, path: Path) -> None:
        """Read the header of `path`.

        Raises ModelNotFoundError, ModelFileError, UnsupportedModelError or TensorMismatchError.
        """
        self._header = read_gguf_header(path)
        self._metadata = _Metadata(self._header)
        self._config = _model_config(self._metadata)
        shapes = self._config.tensor_shapes()
        for name, wanted in shapes.items():
            found = self._find(name)
            check_tensor_shape(name, found=found.shape, wanted=wanted, file=path)
            self._header.rows(found)
        warn_of_unused_tensors(self._header.tensors, {gguf_tensor_name(name) for name in shapes}, file=path)

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""
        return self._config

    @property
    def header(self) -> GgufHeader:
        """The file's header; the tokenizer is rebuilt from it."""
        return self._header

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor by canonical name.

        Q and K rows of the llama architecture come as a copy in Hugging Face's order, everything else as a view of the
        mapped file. Raises TensorMismatchError if there is no such tensor.
        """
        found = self._find(name)
        data = self._header.rows(found)
        if self._metadata.architecture in _INTERLEAVED:
            data = self._without_interleaving(name, data, is_vector=len(found.shape) == 1)
        return RawTensor(name=name, encoding=Encoding[found.type_name], shape=found.shape, data=data)

    def _find(self, name: str) -> GgufTensor:
        stored = gguf_tensor_name(name)
        try:
            return self._header.tensors[stored]
        except KeyError:
            raise TensorMismatchError(
                f"{self._header.path}: tensor {name!r} (in GGUF {stored!r}) is missing; found none, wanted shape "
                f"{list(self._config.tensor_shapes().get(name, ()))}"
            ) from None

    def _without_interleaving(self, name: str, data: ByteView, *, is_vector: bool) -> ByteView:
        if ".q_proj." in name:
            num_heads = self._config.num_heads
        elif ".k_proj." in name:
            num_heads = self._config.num_kv_heads
        else:
            return data
        if is_vector:  # a bias: its elements are the rows
            return _deinterleave(data.reshape(num_heads * self._config.head_size, -1), num_heads).reshape(1, -1)
        return _deinterleave(data, num_heads)


def _deinterleave(rows: ByteView, num_heads: int) -> ByteView:
    """Undo the converter's order: rows 0, 2, 4 ... of a head are its first half, rows 1, 3, 5 ... its second.

    Rows move whole, so this holds for quantized rows too: a block never spans two rows.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    ordered = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
    ordered.flags.writeable = False
    return ordered


def gguf_tensor_name(name: str) -> str:
    """Name in a GGUF file of a tensor with this canonical name; an unknown one is returned as it is."""
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    fields = name.split(".")
    part = _OF_A_LAYER.get(".".join(fields[3:-1]))
    return f"blk.{fields[2]}.{part}.{fields[-1]}" if part else name


class _Metadata:
    """Typed access to the keys of the file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        architecture = header.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{header.path}: architecture {architecture!r} is not implemented; supported: {SUPPORTED_ARCHITECTURES}"
            )
        self.architecture = str(architecture)

    def integer(self, name: str, default: int | None = None) -> int:
        """Value of `<architecture>.<name>`; without a default the key must exist."""
        value = self.header.metadata.get(f"{self.architecture}.{name}", default)
        if type(value) is not int:
            raise self._bad(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Value of `<architecture>.<name>` as a positive float."""
        value = self.header.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._bad(name, value, "a positive number")
        return float(value)

    def window(self) -> int | None:
        """Positions of the sliding window; None if absent or 0."""
        value = self.integer("attention.sliding_window", 0)
        if value < 0:
            raise self._bad("attention.sliding_window", value, "a whole number of positions")
        return value or None

    def text(self, name: str) -> str | None:
        """Value of `<architecture>.<name>`, None if absent."""
        value = self.header.metadata.get(f"{self.architecture}.{name}")
        if value is not None and not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def _bad(self, name: str, value: object, wanted: str) -> ModelFileError:
        shown = "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        return ModelFileError(f"{self.header.path}: metadata key '{self.architecture}.{name}' is {shown}, not {wanted}")


def _model_config(metadata: _Metadata) -> ModelConfig:
    tensors = metadata.header.tensors
    hidden, num_heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    vocab_size = _vocab_size(metadata, hidden)
    head_size = _head_size(metadata, hidden, num_heads)
    _check_rotary(metadata, head_size)
    query = tensors.get("blk.0.attn_q.weight")
    max_positions = metadata.integer("context_length")
    return ModelConfig(
        architecture=metadata.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=metadata.integer("feed_forward_length"),
        num_layers=_num_layers(metadata),
        num_heads=num_heads,
        num_kv_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        max_positions=max_positions,
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.number("rope.freq_base", 10_000.0),
        rope_freq_factors=_rope_freq_factors(metadata.header, head_size),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or metadata.architecture == "qwen2",
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=metadata.architecture == "qwen3",
        # Only Mistral's converters mean it: qwen2 files may carry a window that the model was told not to use.
        sliding_window=window_among(max_positions, metadata.window()) if metadata.architecture == "llama" else None,
        dtype=_DTYPES.get(query.type_name, "float32") if query else "float32",
    )


def _num_layers(metadata: _Metadata) -> int:
    """Number of layers, refused when the file has not even one tensor for each: nothing is sized by a bare claim."""
    claimed, num_tensors = metadata.integer("block_count"), len(metadata.header.tensors)
    if claimed > num_tensors:
        raise ModelFileError(
            f"{metadata.header.path}: '{metadata.architecture}.block_count' is {claimed}, but the file has only "
            f"{num_tensors} tensors"
        )
    return claimed


def _vocab_size(metadata: _Metadata, hidden: int) -> int:
    embedding = metadata.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        shape = "missing" if embedding is None else f"of shape {list(embedding.shape)}"
        raise TensorMismatchError(
            f"{metadata.header.path}: tensor 'token_embd.weight' is {shape}, wanted [vocabulary, hidden]"
        )
    vocab_size, row_size = embedding.shape
    if row_size != hidden:
        raise TensorMismatchError(
            f"{metadata.header.path}: '{metadata.architecture}.embedding_length' is {hidden}, but the rows of tensor "
            f"'token_embd.weight' have {row_size} elements"
        )
    return vocab_size


def _head_size(metadata: _Metadata, hidden: int, num_heads: int) -> int:
    """Elements of a head: what the file says, or what the hidden size has for each head."""
    architecture = metadata.architecture
    if f"{architecture}.attention.key_length" in metadata.header.metadata:
        return metadata.integer("attention.key_length")
    if num_heads < 1 or hidden % num_heads:
        raise ModelFileError(
            f"{metadata.header.path}: '{architecture}.attention.head_count' is {num_heads}, which does not divide "
            f"'{architecture}.embedding_length', {hidden}, evenly"
        )
    return hidden // num_heads


def _check_rotary(metadata: _Metadata, head_size: int) -> None:
    path, architecture = metadata.header.path, metadata.architecture
    value_size = metadata.integer("attention.value_length", head_size)
    if value_size != head_size:
        raise UnsupportedModelError(f"{path}: value heads of {value_size} beside key heads of {head_size} elements")
    rotated = metadata.integer("rope.dimension_count", head_size)
    if rotated != head_size:
        raise UnsupportedModelError(
            f"{path}: '{architecture}.rope.dimension_count' is {rotated}; only whole heads can be rotated, and one has "
            f"{head_size} elements (key_length, or embedding_length over head_count)"
        )
    scaling = metadata.text("rope.scaling.type")
    if scaling not in (None, "none"):
        raise UnsupportedModelError(
            f"{path}: '{architecture}.rope.scaling.type' is {scaling!r}; supported: none, or a rope_freqs.weight tensor"
        )
    if metadata.number("rope.scale_linear", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{path}: '{architecture}.rope.scale_linear' is not 1; linear scaling is not supported"
        )


def _rope_freq_factors(header: GgufHeader, head_size: int) -> tuple[float, ...] | None:
    stored = header.tensors.get("rope_freqs.weight")
    if stored is None:
        return None
    check_tensor_shape("rope_freqs.weight", found=stored.shape, wanted=(head_size // 2,), file=header.path)
    raw = RawTensor(stored.name, Encoding[stored.type_name], stored.shape, header.rows(stored))
    factors = tuple(float(factor) for factor in dequantize(raw))
    if not all(0 < factor < float("inf") for factor in factors):
        raise ModelFileError(
            f"{header.path}: tensor 'rope_freqs.weight' holds a factor that is not positive and finite"
        )
    return factors
