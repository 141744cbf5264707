"""Geometry of a decoder-only transformer, independent of the file it came from and of the backend that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from giveway.core.errors import UnsupportedModelError

_MOST_POSITIONS = 2**40  # more is a mistake in a file, and some number of a backend would overflow


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def window_among(max_positions: int, window: int | None) -> int | None:
    """Return a sliding window as it counts: None where no position is so far that it hides another."""
    return window if window is not None and window < max_positions else None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What every backend needs to know to run a model of the Llama, Mistral, Qwen2 or Qwen3 family.

    Layer: x += attention(rms_norm(x)); x += down(silu(gate(y)) * up(y)) with y = rms_norm(x).
    """

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # tokens the model was trained for
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    # What each of the head_size / 2 rotary frequencies is divided by, as GGUF stores Llama 3's scaling; None: by one.
    rope_freq_factors: tuple[float, ...] | None = None
    tied_embeddings: bool = False  # the output head is the embedding
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False  # Llama's `attention_bias` puts one on the output projection too
    qk_norm: bool = False  # Qwen3: RMSNorm of every query and key head
    sliding_window: int | None = None  # tokens; None: full attention
    dtype: str = "float32"  # of the stored weights: "float32", "float16" or "bfloat16"

    def __post_init__(self) -> None:
        """Refuse geometry that no backend can run."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"model configuration: {name} is {getattr(self, name)}; at least 1 needed")
        if self.max_positions > _MOST_POSITIONS:
            raise UnsupportedModelError(
                f"model configuration: max_positions is {self.max_positions}; at most {_MOST_POSITIONS} are possible"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"model configuration: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise UnsupportedModelError(
                f"model configuration: head size {self.head_size}; rotary embedding needs pairs"
            )
        if self.rope_freq_factors is not None and len(self.rope_freq_factors) != self.head_size // 2:
            raise UnsupportedModelError(
                f"model configuration: {len(self.rope_freq_factors)} rotary frequency factors; "
                f"head size {self.head_size} needs {self.head_size // 2}"
            )

    @property
    def query_columns(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_size

    @property
    def qkv_columns(self) -> int:
        """Elements of all query, key and value heads of a token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * bytes_per_element

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model is made of: canonical name (that of Hugging Face's Llama) -> shape [out, in]."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_size
        query, key = self.query_columns, self.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            attention = prefix + "self_attn."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
                shapes[f"{attention}{name}.weight"] = (rows, hidden)
                if self.qkv_bias:
                    shapes[f"{attention}{name}.bias"] = (rows,)
            shapes[attention + "o_proj.weight"] = (hidden, query)
            if self.o_bias:
                shapes[attention + "o_proj.bias"] = (hidden,)
            if self.qk_norm:
                shapes[attention + "q_norm.weight"] = (head,)
                shapes[attention + "k_norm.weight"] = (head,)
            shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes
