"""A conversation with a model: what was said, and what of it still fits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from giveway.build import BuiltEngine
from giveway.cli.answering import describe, stream_answer
from giveway.core.ids import TokenId
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams

logger = logging.getLogger("giveway")


class Conversation:
    """Messages so far; each question is answered with all of them in view."""

    def __init__(self, built: BuiltEngine, sampling: SamplingParams, system: str | None = None) -> None:
        self._built = built
        self._sampling = sampling
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []
        self.was_interrupted = False  # Ctrl-C stopped the last answer
        self.last_figures = ""

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = []

    def ask(self, text: str, say: Callable[[str], None]) -> str:
        """Return the answer; `say` gets it in pieces as it comes. An answer stopped by Ctrl-C is kept as far as it got.

        Raises InvalidRequestError if even the bare question does not fit; the conversation is then as before.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._fit(messages)
        result = stream_answer(self._built.engine, prompt, self._sampling, say)
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        self.was_interrupted = result.finish_reason is FinishReason.ABORT
        self.last_figures = describe(result)
        return result.text

    def _fit(self, messages: list[dict[str, str]]) -> list[TokenId]:
        """Encode a conversation, leaving out its oldest question and answer until prompt and output fit."""
        limit = min(self._built.scheduler_config.max_model_len, self._built.cache_config.num_device_slots + 1)
        room = limit - (self._sampling.max_tokens or 1)
        num_left_out = 0
        while True:
            prompt = self._built.model.encode_chat([*self._system, *messages])
            if len(prompt) <= room or len(messages) <= 1:
                break
            del messages[:2]
            num_left_out += 2
        if num_left_out:
            logger.warning("the %d oldest messages no longer fit and are left out", num_left_out)
        return prompt
