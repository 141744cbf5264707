"""Byte-pair encoding by the `tokenizers` package, with what the engine needs around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from giveway.core.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from giveway.core.ids import TokenId
from giveway.runtime.tokenizer.byte_alphabet import BYTE_OF_CHARACTER
from giveway.runtime.tokenizer.control_text import ESCAPED_LEAD, LEAD, MARK, ControlStrings, unmark

_LONG_TEXT_CHARACTERS = 2048


class Tokenizer:
    """A vocabulary in memory. See giveway.core.tokenizing.Tokenizing for the meaning of the methods."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: TokenId | None,
        eos_token_ids: Iterable[TokenId],
        prefix: Sequence[TokenId],
        suffix: Sequence[TokenId],
    ) -> None:
        """Wrap a backend, which is this object's own from now on and neither truncates nor pads.

        prefix, suffix: what encode puts around a text when asked for special tokens; the backend's own post-processor
        is not used. Raises UnsupportedModelError if the backend decodes in a way that token_bytes cannot follow.
        """
        self._backend = backend
        self._spell = _choose_spelling(backend)
        self._added = {index: str(token.content) for index, token in backend.get_added_tokens_decoder().items()}
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_ids = frozenset(
            special | self.eos_token_ids | ({bos_token_id} if bos_token_id is not None else set())
        )
        self.prefix = tuple(prefix)
        self.suffix = tuple(suffix)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocabulary.values(), default=-1)
        self.control_strings = ControlStrings.of(
            special=[text for index, text in self._added.items() if index in special],
            others=[text for index, text in self._added.items() if index not in special],
        )
        self._breaker = self.control_strings.breaker()
        self._bytes: dict[TokenId, bytes] = {}  # filled as tokens are asked for; never more than the vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[TokenId]:
        """Return the ids of a text; see Tokenizing.encode."""
        if parse_special or not self._breaker.holds_control(text):
            ids = list(self._run(self._backend, text).ids)
        else:
            ids = self.encode_marked(self._breaker.break_controls(text))
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def encode_marked(self, text: str) -> list[TokenId]:
        """Ids of a text in which control strings that are meant as text have been broken (see control_text).

        The same ids as those of the text without its marks, but for the broken control strings. No prefix or suffix.
        """
        if LEAD not in text:
            return list(self._run(self._backend, text).ids)
        encoding = self._run(self._marked_backend, text)
        ids: list[TokenId] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids and LEAD in text[start:end]:
                ids += self._in_halves(unmark(text[start:end]))
            else:
                ids.append(token_id)
        return ids

    def decode(self, ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence of ids; ids outside the vocabulary add nothing."""
        known = [index for index in ids if 0 <= index < self.vocab_size]
        if skip_special_tokens:
            known = [index for index in known if index not in self.special_ids]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Exact bytes that one token adds to a text; an id without a token adds none."""
        spelled = self._bytes.get(token_id)
        if spelled is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            spelled = self._bytes[token_id] = self._spell_token(token_id)
        return spelled

    def token_id(self, token: str) -> TokenId | None:
        """Id of a token by its name in the vocabulary, for example `<|im_end|>`; None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text has at least its own bytes over this many tokens."""
        return max((len(self.token_bytes(index)) for index in range(self.vocab_size)), default=1)

    def save(self, path: Path) -> None:
        """Write the vocabulary as a Hugging Face `tokenizer.json`, for other programs; without prefix and suffix."""
        self._backend.save(str(path))

    def _spell_token(self, token_id: TokenId) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)

    @staticmethod
    def _run(backend: tokenizers.Tokenizer, text: str) -> Any:
        try:
            if len(text) < _LONG_TEXT_CHARACTERS:
                return backend.encode(text, add_special_tokens=False)
            # For a batch the package lets go of the interpreter's lock, and a megabyte takes seconds.
            return backend.encode_batch([text], add_special_tokens=False)[0]
        except (UnicodeEncodeError, TypeError) as error:
            # `tokenizers` reports a lone surrogate as a TypeError of the whole argument.
            raise InvalidRequestError(
                "the text holds a lone surrogate, which no encoding of Unicode can carry"
            ) from error

    @cached_property
    def _control_ids(self) -> frozenset[TokenId]:
        texts = self.control_strings.special | self.control_strings.markup
        return frozenset(index for index, text in self._added.items() if text in texts)

    @cached_property
    def _marked_backend(self) -> tokenizers.Tokenizer:
        """A copy that undoes marks in its normalizer, after it has looked for control strings in the raw text.

        Made at the first text that needs it, a fifth of a second for 49,152 tokens: most servers never see one.
        """
        state = json.loads(self._backend.to_str())
        undo = [{"type": "Replace", "pattern": {"String": MARK}, "content": ""}]
        undo.append({"type": "Replace", "pattern": {"String": ESCAPED_LEAD}, "content": LEAD})
        own = state.get("normalizer")
        state["normalizer"] = {"type": "Sequence", "normalizers": undo + ([own] if own else [])}
        for added in state["added_tokens"]:
            added["normalized"] = False  # or it would be looked for again once the marks are gone
        control = self.control_strings.special | self.control_strings.markup
        # A vocabulary may have merges that lead to a control token's name; as text it must not be reached.
        if merges := state["model"].get("merges"):
            state["model"]["merges"] = [merge for merge in merges if _merged(merge) not in control]
        return tokenizers.Tokenizer.from_str(json.dumps(state))

    def _in_halves(self, text: str) -> list[TokenId]:
        """Ids of a control string as text when the vocabulary reaches it as a whole word: cut it in two."""
        ids: list[TokenId] = [index for part in (text[:1], text[1:]) for index in self._run(self._backend, part).ids]
        if any(index in self._control_ids for index in ids):
            raise InvalidRequestError(f"the text {text!r} is reserved by the model and cannot be written in a message")
        return ids


@contextmanager
def building(what: str) -> Iterator[None]:
    """Raise ModelFileError, naming `what`, for vocabulary data that the `tokenizers` package refuses.

    Some of it makes that package panic, which arrives here as an exception outside the tree of Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelFileError(f"{what}: not a usable tokenizer ({str(error)[:200]})") from error


def _merged(merge: str | list[str]) -> str:
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)


def _choose_spelling(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Find from the decoder how a token's name stands for bytes."""
    decoder = backend.decoder
    kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else []
    if "ByteLevel" in kinds:
        return _spell_byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _spell_sentencepiece
    raise UnsupportedModelError(
        f"tokenizer: decoder {kinds or None} is not implemented; supported: ByteLevel, ByteFallback"
    )


def _decoder_kinds(decoder: dict[str, Any]) -> list[str]:
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [str(part.get("type")) for part in parts or ()]


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # a token outside the byte alphabet, such as padding: the decoder shows its name too
        return token.encode()


def _spell_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()
