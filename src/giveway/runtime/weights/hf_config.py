"""A Hugging Face `config.json` as a ModelConfig.

Both spellings are read: Transformers 5 writes `rope_parameters` and `dtype`, older releases `rope_theta`,
`rope_scaling` and `torch_dtype`. Whatever the file asks for beyond what is implemented is refused by name, because a
model that runs with an option left out answers wrongly without a sign of it.
Source: https://huggingface.co/docs/transformers, the configuration classes of Llama, Mistral, Qwen2 and Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from giveway.core.errors import ModelFileError, UnsupportedModelError
from giveway.runtime.model_config import ModelConfig, RopeScaling, window_among

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = ("float32", "float16", "bfloat16")
# What the configuration classes assume when a key is absent.
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


def model_config_from_json(values: Mapping[str, Any], *, path: Path) -> ModelConfig:
    """Derive the geometry from the members of config.json (`path` is for messages).

    Raises UnsupportedModelError for an architecture or option that is not implemented, ModelFileError for a member
    that is missing or of the wrong type.
    """
    return _HfConfig(values, path).model_config()


class _HfConfig:
    """Typed access to the members of one config.json."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path
        self._family = self._choose_family()

    def model_config(self) -> ModelConfig:
        self._refuse_unsupported_options()
        hidden, num_heads = self._integer("hidden_size"), self._integer("num_attention_heads")
        max_positions = self._integer("max_position_embeddings", _DEFAULT_MAX_POSITIONS[self._family])
        rope = self._rope()
        attention_bias = self._family in ("llama", "qwen3") and self._flag("attention_bias")
        return ModelConfig(
            architecture=self._family,
            vocab_size=self._integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._integer("intermediate_size"),
            num_layers=self._integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=self._integer("num_key_value_heads", num_heads),
            head_size=self._integer("head_dim", 128 if self._family == "qwen3" else hidden // max(num_heads, 1)),
            max_positions=max_positions,
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            rope_theta=_positive(rope, "rope_theta", 10_000.0, self._path),
            rope_scaling=self._rope_scaling(rope),
            tied_embeddings=self._flag("tie_word_embeddings"),
            qkv_bias=attention_bias or self._family == "qwen2",
            o_bias=attention_bias,
            qk_norm=self._family == "qwen3",
            sliding_window=window_among(max_positions, self._sliding_window()),
            dtype=self._dtype(),
        )

    def _choose_family(self) -> str:
        architectures = self._values.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        for name in names:
            if isinstance(name, str) and name in _FAMILIES:
                return _FAMILIES[name]
        if not names:
            raise UnsupportedModelError(
                f"{self._path}: architectures names no model, and model_type {self._values.get('model_type')!r} is not "
                f"enough; supported: {', '.join(_FAMILIES)}"
            )
        raise UnsupportedModelError(
            f"{self._path}: architecture {', '.join(map(str, names))} is not implemented; supported: "
            f"{', '.join(_FAMILIES)}"
        )

    def _refuse_unsupported_options(self) -> None:
        if self._flag("mlp_bias"):
            raise self._unsupported("mlp_bias", True, "only MLPs without bias")
        activation = self._values.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self._unsupported("hidden_act", activation, "silu")
        if self._values.get("quantization_config") is not None:
            method = self._section("quantization_config").get("quant_method")
            raise self._unsupported("quantization_config", method, "F32, F16 and BF16 weights, or GGUF quantizations")

    def _unsupported(self, name: str, value: object, supported: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._path}: {name} is {value!r}; supported: {supported}")

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if type(value) is not int:
            shown = "missing" if value is None else repr(value)[:60]
            raise ModelFileError(f"{self._path}: {name} is {shown}; a whole number is needed")
        return value

    def _number(self, name: str, default: float) -> float:
        return _positive(self._values, name, default, self._path)

    def _flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise ModelFileError(f"{self._path}: {name} is {value!r}; true or false is needed")
        return bool(value)

    def _section(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ModelFileError(f"{self._path}: {name} is {repr(value)[:60]}; an object is needed")
        return value

    def _rope(self) -> Mapping[str, Any]:
        """Rotary settings in the newer spelling, whichever one the file uses."""
        rope = dict(self._section("rope_parameters") or self._section("rope_scaling"))
        if "rope_type" not in rope and "type" in rope:
            rope["rope_type"] = rope["type"]
        for name in ("rope_theta", "partial_rotary_factor"):
            if rope.get(name) is None and self._values.get(name) is not None:
                rope[name] = self._values[name]
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise self._unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1")
        return rope

    def _rope_scaling(self, rope: Mapping[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", "default")
        if kind in (None, "default"):
            return None
        if kind != "llama3":
            raise self._unsupported("rope_type", kind, "default, llama3")
        original = rope.get("original_max_position_embeddings")
        if type(original) is not int or original < 1:
            raise ModelFileError(
                f"{self._path}: original_max_position_embeddings is {original!r}; rope_type llama3 needs a whole number"
            )
        scaling = RopeScaling(
            factor=_positive(rope, "factor", None, self._path),
            low_freq_factor=_positive(rope, "low_freq_factor", None, self._path),
            high_freq_factor=_positive(rope, "high_freq_factor", None, self._path),
            original_max_positions=original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelFileError(
                f"{self._path}: high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor "
                f"{scaling.low_freq_factor}"
            )
        return scaling

    def _sliding_window(self) -> int | None:
        """Window of every layer; a model that mixes windowed and full layers is refused."""
        window = self._values.get("sliding_window")
        if self._family == "llama" or window is None:
            return None
        if type(window) is not int or window < 1:
            raise ModelFileError(
                f"{self._path}: sliding_window is {window!r}; a positive whole number or null is needed"
            )
        if self._family == "mistral":
            return window
        return window if self._flag("use_sliding_window") and self._is_every_layer_windowed() else None

    def _is_every_layer_windowed(self) -> bool:
        num_layers = self._integer("num_hidden_layers")
        kinds = self._values.get("layer_types")
        if isinstance(kinds, list):
            num_windowed = kinds.count("sliding_attention")
            is_known = len(kinds) == num_layers and kinds.count("full_attention") == num_layers - num_windowed
        else:
            num_windowed = num_layers - min(self._integer("max_window_layers", 28), num_layers)
            is_known = True
        if not is_known or num_windowed not in (0, num_layers):
            raise self._unsupported("sliding_window", f"on {num_windowed} of {num_layers} layers", "all layers or none")
        return num_windowed > 0

    def _dtype(self) -> str:
        value = self._values.get("dtype") or self._values.get("torch_dtype") or "float32"
        if value not in _DTYPES:
            raise self._unsupported("dtype", value, ", ".join(_DTYPES))
        return str(value)


def _positive(values: Mapping[str, Any], name: str, default: float | None, path: Path) -> float:
    value = values.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        shown = "missing" if value is None else repr(value)[:60]
        raise ModelFileError(f"{path}: {name} is {shown}; a positive number is needed")
    return float(value)
