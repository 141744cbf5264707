"""A tokenizer rebuilt from the metadata of a GGUF file.

The file holds tokens, their kinds and scores or merges; how text is cut before merging is only named
(`tokenizer.ggml.pre`) and has to be known. Two models of vocabulary are implemented: `gpt2`, byte-level BPE, and
`llama`, the BPE of SentencePiece. Sources: `src/llama-vocab.cpp` of https://github.com/ggml-org/llama.cpp for names,
defaults and patterns; the `tokenizer.json` files that the original models come with for normalizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from giveway.core.errors import ModelFileError, UnsupportedModelError
from giveway.core.ids import TokenId
from giveway.runtime.tokenizer.sentencepiece_merges import merges_from_scores
from giveway.runtime.tokenizer.tokenizer import Tokenizer, building
from giveway.runtime.weights.gguf_header import GgufHeader, GgufNumbers, GgufStrings

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _GPT2, _QWEN2 = "llama3", "gpt2", "qwen2"
_SMOLLM, _TEKKEN = "smollm", "tekken"
# Name in the file -> how text is cut. A file from before the key existed says nothing and was GPT-2's kind.
_CUTS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_PATTERNS = {_LLAMA3: _LLAMA3_PATTERN, _QWEN2: _QWEN2_PATTERN, _TEKKEN: _TEKKEN_PATTERN}
# Whole words of the vocabulary are taken without merging, and BOS is added unless the file says otherwise.
_WHOLE_WORDS_FIRST = frozenset({_LLAMA3, _TEKKEN})
_EXTRA_END_KEYS = ("eot_token_id", "eom_token_id")


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """Rebuild the tokenizer. Raises UnsupportedModelError for an unknown kind, ModelFileError for malformed data."""
    keys = _TokenizerKeys(header)
    kind = keys.text("model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(keys)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(keys), True
    else:
        raise UnsupportedModelError(
            f"{header.path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level), 'llama' (SentencePiece)"
        )
    bos, eos = keys.token_id("bos_token_id"), keys.token_id("eos_token_id")
    ends = [eos, *(keys.token_id(name) for name in _EXTRA_END_KEYS)]
    _add_whole_tokens(backend, keys, forced={index for index in (bos, *ends) if index is not None})
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[index for index in ends if index is not None],
        prefix=[bos] if keys.flag("add_bos_token", add_bos) and bos is not None else [],
        suffix=[eos] if keys.flag("add_eos_token", default=False) and eos is not None else [],
    )


class _TokenizerKeys:
    """Typed access to the `tokenizer.ggml.*` keys."""

    def __init__(self, header: GgufHeader) -> None:
        self.path: Path = header.path
        self._metadata: Mapping[str, object] = header.metadata
        self.tokens = self.strings("tokens")
        self.kinds = self._kinds()

    def strings(self, name: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, GgufStrings):
            raise self._bad(name, value, "an array of strings")
        return value.decode()

    def has(self, name: str) -> bool:
        return f"tokenizer.ggml.{name}" in self._metadata

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self._bad(name, value, "a boolean")
        return value

    def token_id(self, name: str) -> TokenId | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self._bad(name, value, f"a token id below {len(self.tokens)}")
        return value

    def scores(self) -> list[float]:
        return [float(score) for score in self._numbers("scores")]

    def _kinds(self) -> Sequence[float]:
        return self._numbers("token_type") if self.has("token_type") else [_NORMAL] * len(self.tokens)

    def _numbers(self, name: str) -> Sequence[float]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, GgufNumbers) or value.count != len(self.tokens):
            raise self._bad(name, value, f"an array of {len(self.tokens)} numbers, one a token")
        return value.decode()

    def _bad(self, name: str, value: object, wanted: str) -> ModelFileError:
        shown = "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        return ModelFileError(f"{self.path}: metadata key 'tokenizer.ggml.{name}' is {shown}, not {wanted}")


def _byte_level(keys: _TokenizerKeys) -> tuple[Backend, bool]:
    """Byte-level BPE and whether BOS is added by default."""
    name = keys.text("pre", "default")
    if name not in _CUTS:
        raise UnsupportedModelError(
            f"{keys.path}: tokenizer.ggml.pre is {name!r}, a way to cut text that is not implemented; supported: "
            f"{', '.join(_CUTS)}. Take the model's safetensors files, which bring a tokenizer.json"
        )
    cut = _CUTS[name]
    vocabulary = {token: index for index, token in enumerate(keys.tokens)}
    merges = _merges(keys, vocabulary)
    with building(f"{keys.path}: tokenizer.ggml.merges"):
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut in _WHOLE_WORDS_FIRST)
    backend = Backend(model)
    if cut == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(cut)
    backend.decoder = decoders.ByteLevel()
    return backend, cut in _WHOLE_WORDS_FIRST


def _pre_tokenizer(cut: str) -> pre_tokenizers.PreTokenizer:
    if cut in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[cut]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut == _SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _merges(keys: _TokenizerKeys, vocabulary: Mapping[str, TokenId]) -> list[tuple[str, str]]:
    """Pairs in order of rank. The space that parts them is never the first character: a token may begin with one."""
    pairs = []
    for rank, merge in enumerate(keys.strings("merges")):
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFileError(
                f"{keys.path}: tokenizer.ggml.merges: entry {rank}, {merge[:60]!r}, is not two tokens that make a third"
            )
        pairs.append((left, right))
    return pairs


def _sentencepiece(keys: _TokenizerKeys) -> Backend:
    vocabulary = {token: index for index, token in enumerate(keys.tokens)}
    controls = {
        token for token, kind in zip(keys.tokens, keys.kinds, strict=True) if kind in (_UNKNOWN, _CONTROL, _UNUSED)
    }
    if keys.has("merges"):
        merges = _merges(keys, vocabulary)
    else:
        pieces = [token for token, kind in zip(keys.tokens, keys.kinds, strict=True) if kind == _BYTE]
        merges = merges_from_scores(vocabulary, keys.scores(), without=controls.union(pieces))
    unknown = keys.token_id("unknown_token_id")
    if unknown is None and _UNKNOWN in keys.kinds:
        unknown = list(keys.kinds).index(_UNKNOWN)
    with building(f"{keys.path}: tokenizer.ggml.tokens"):
        model = models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=keys.tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=_BYTE in keys.kinds,
        )
    backend = Backend(model)
    # A space is put before the text, and before the text after every control token, as SentencePiece itself does.
    is_prefixed = keys.flag("add_space_prefix", default=True)
    steps = [normalizers.Prepend("\u2581")] if is_prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    undo = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if is_prefixed else undo)
    return backend


def _add_whole_tokens(backend: Backend, keys: _TokenizerKeys, *, forced: set[TokenId]) -> None:
    """Declare the tokens that are matched whole. forced: ids that are control tokens whatever their kind says."""
    special, others = [], []
    for index, (token, kind) in enumerate(zip(keys.tokens, keys.kinds, strict=True)):
        if kind in (_CONTROL, _UNKNOWN) or index in forced:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens([token for token in special if token.content])
    backend.add_tokens([token for token in others if token.content])
