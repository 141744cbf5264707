"""From output tokens to text, one at a time: whole characters, stop strings, and nothing said too early."""

from __future__ import annotations

import codecs

from giveway.core.ids import TokenId
from giveway.core.sampling import SamplingParams
from giveway.core.tokenizing import Tokenizing


class Detokenizer:
    """Text of one request. It belongs to the request, so no preemption touches it."""

    __slots__ = (
        "_beginnings",
        "_decoder",
        "_floor",
        "_longest_stop",
        "_num_given",
        "_params",
        "_tokenizer",
        "num_tokens",
        "text",
    )

    def __init__(self, tokenizer: Tokenizing, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._longest_stop = max((len(stop) for stop in params.stop), default=0)
        self._beginnings = [_StopBeginning(stop) for stop in params.stop]
        self._floor = 0  # characters before it are not searched: they came before min_tokens
        self._num_given = 0  # characters already handed out
        self.num_tokens = 0
        self.text = ""

    def push(self, token_id: TokenId, *, is_silent: bool = False) -> str | None:
        """Add a token; return the stop string that it completes, if any.

        is_silent: the token ends the request and is not part of its text.
        The text is cut at the stop string: before it, or after it when the request wants it included.
        """
        self.num_tokens += 1
        searched = len(self.text)
        skip = is_silent or (self._params.skip_special_tokens and token_id in self._tokenizer.special_ids)
        if not skip:
            new = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self.text += new
            for beginning in self._beginnings:
                beginning.push(new)
        if self.num_tokens < self._params.min_tokens:
            self._floor = len(self.text)
            return None
        return self._find_stop(max(self._floor, searched - self._longest_stop + 1))

    def _find_stop(self, start: int) -> str | None:
        found: tuple[int, str] | None = None
        for stop in self._params.stop:
            place = self.text.find(stop, start)
            if place >= 0 and (found is None or place < found[0]):
                found = (place, stop)
        if found is None:
            return None
        place, stop = found
        self._decoder.reset()  # a character begun after the stop string is cut off with the rest
        self.text = self.text[: place + len(stop)] if self._params.include_stop_str_in_output else self.text[:place]
        return stop

    def take_new(self, *, is_last: bool) -> str:
        """Return the text not yet handed out, less a tail that may become a stop string; everything when it is last.

        Bytes of a character that never came whole are then shown as U+FFFD.
        """
        if is_last:
            self.text += self._decoder.decode(b"", final=True)
            end = len(self.text)
        else:
            end = len(self.text) - max((beginning.length for beginning in self._beginnings), default=0)
        new = self.text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return new


class _StopBeginning:
    """How much of one stop string the text ends with: the automaton of Knuth, Morris and Pratt, a step a character."""

    __slots__ = ("_fallback", "_stop", "length")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0  # characters of the stop string that the text ends with; less than all of them
        self._fallback = [0] * (len(stop) + 1)  # longest shorter beginning that also ends here
        length = 0
        for position in range(1, len(stop)):
            while length and stop[position] != stop[length]:
                length = self._fallback[length]
            length += stop[position] == stop[length]
            self._fallback[position + 1] = length

    def push(self, text: str) -> None:
        """Follow more text."""
        stop, length = self._stop, self.length
        for character in text:
            if length == len(stop):
                length = self._fallback[length]
            while length and character != stop[length]:
                length = self._fallback[length]
            length += character == stop[length]
        self.length = self._fallback[length] if length == len(stop) else length
