"""The alphabet in which byte-level vocabularies write bytes as printable characters.

Printable Latin-1 bytes stand for themselves, the others, in order, for those from U+0100 up; a space is U+0120.
Source: `bytes_to_unicode` of https://github.com/openai/gpt-2, src/encoder.py.
"""

from __future__ import annotations

from types import MappingProxyType


def _alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


CHARACTER_OF_BYTE = tuple(_alphabet())
BYTE_OF_CHARACTER = MappingProxyType({character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)})
