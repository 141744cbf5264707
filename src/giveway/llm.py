"""Offline use: one call in, all answers out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Self

from giveway.build import BuiltEngine, build_engine
from giveway.core.errors import InvalidRequestError
from giveway.core.ids import RequestId
from giveway.core.sampling import SamplingParams
from giveway.engine.engine import Engine
from giveway.engine.intake import Prompt
from giveway.engine.interrupts import Interrupt
from giveway.engine.outputs import RequestOutput
from giveway.options import options_from

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model for offline use. Keyword arguments are the fields of `EngineOptions`; sizes may be text such as "64MiB".

    Calls from several threads wait for each other. A child forked after a step hangs in its own, because the threads of
    OpenMP are not copied: start processes by `spawn`. Example:
    LLM(swap_space="64MiB").generate(["Hello"], SamplingParams(max_tokens=8), priorities=[0])
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.built: BuiltEngine = build_engine(options_from({"model": model, **options}))
        self._one_call = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The engine below, for whoever wants to submit and step by hand."""
        return self.built.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one result for each prompt, in order.

        prompts: texts or lists of token ids, or a single one. sampling: for all, or one each; with `n` above 1 a result
        is that of choice 0, and its `choices` are all of them. priorities: one each.
        Raises InvalidRequestError before anything runs, KVCacheFullError under the policy `none`. A fault of one
        request is told in its result (`error`).
        """
        prompts = _as_prompts(prompts)
        with self._one_call:
            return self._generate(prompts, sampling, priorities)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int | None] | None,
    ) -> list[RequestOutput]:
        params = _one_each("sampling", sampling, len(prompts))
        classes = _one_each("priorities", priorities, len(prompts))
        submissions = [
            self.engine.prepare(prompt, each, priority=priority)
            for prompt, each, priority in zip(prompts, params, classes, strict=True)
        ]
        return self._run([self.engine.hand_in(submission) for submission in submissions])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int | None] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several; each is a list of {"role": ..., "content": ...}."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequestError(f"messages must be a list of role and content, not {type(messages).__name__}")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.built.model.encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling, priorities=priorities)

    def _run(self, names: Sequence[RequestId]) -> list[RequestOutput]:
        results: dict[RequestId, RequestOutput] = {}
        waiting = set(names)
        try:
            with Interrupt() as interrupt:
                while waiting:
                    if interrupt.is_wanted:
                        raise KeyboardInterrupt
                    for update in self.engine.step():
                        if update.whole is not None:
                            results[update.submission_id] = update.whole
                            waiting.discard(update.submission_id)
        except BaseException:
            for name in names:  # leave nothing behind for the next call
                self.engine.abort(name)
            raise
        return [results[name] for name in names]

    def close(self) -> None:
        """Release the model."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts must be texts or lists of token ids, not {type(prompts).__name__}")
    given: list[Any] = list(prompts)
    is_single = bool(given) and all(isinstance(item, Integral) for item in given)  # one list of token ids
    return [given] if is_single else given


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if values is None or isinstance(values, SamplingParams):
        return [values] * count
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidRequestError(f"{name} must be a list, one entry a prompt, not {type(values).__name__}")
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts; give one each")
    return list(values)
