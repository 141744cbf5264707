"""A tokenizer without a file: one token a byte, for models that are made in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from giveway.core.errors import InvalidRequestError
from giveway.core.ids import TokenId
from giveway.runtime.tokenizer.control_text import ControlStrings, unmark

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, in the control tokens of ByteTokenizer."""

_CONTROLS = {"<|bos|>": 256, "<|eos|>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
_CONTROL = re.compile("(" + "|".join(map(re.escape, _CONTROLS)) + ")")


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8, 256 is BOS, 257 EOS, 258 `<|im_start|>` and 259 `<|im_end|>`.

    See giveway.core.tokenizing.Tokenizing for the meaning of the methods. Nothing is put around a text.
    """

    vocab_size: int = 260
    longest_token_bytes: int = len("<|im_start|>")
    bos_token_id: TokenId | None = 256
    eos_token_ids: frozenset[TokenId] = frozenset({257, 259})
    special_ids: frozenset[TokenId] = frozenset(_CONTROLS.values())
    prefix: tuple[TokenId, ...] = ()
    suffix: tuple[TokenId, ...] = ()
    control_strings = ControlStrings.of(special=_CONTROLS, others=())

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[TokenId]:
        """Return the ids of a text; see Tokenizing.encode."""
        del add_special_tokens  # there are none to add
        return self._encode_parts(_CONTROL.split(text)) if parse_special else list(_utf8(text))

    def encode_marked(self, text: str) -> list[TokenId]:
        """Ids of a text in which control strings that are meant as text have been broken (see control_text)."""
        return self._encode_parts([unmark(part) for part in _CONTROL.split(text)])

    def decode(self, ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence of ids."""
        shown = (index for index in ids if not (skip_special_tokens and index in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Exact bytes that one token adds to a text; an id without a token adds none."""
        if 0 <= token_id < 256:
            return bytes((token_id,))
        return next((text.encode() for text, control in _CONTROLS.items() if control == token_id), b"")

    def token_id(self, token: str) -> TokenId | None:
        """Id of a control token by its name; None if there is none."""
        return _CONTROLS.get(token)

    @staticmethod
    def _encode_parts(parts: Sequence[str]) -> list[TokenId]:
        """Encode what a split at the control tokens gave: text, control, text, control ..., text."""
        ids: list[TokenId] = []
        for index, part in enumerate(parts):
            ids += (_CONTROLS[part],) if index % 2 else _utf8(part)
        return ids


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the text holds a lone surrogate, which no encoding of Unicode can carry") from error
