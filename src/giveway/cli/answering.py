"""One prompt at a time, answered as the text comes: what `generate` and `chat` share."""

from __future__ import annotations

import sys
from collections.abc import Callable

from giveway.core.errors import RequestFailedError
from giveway.core.request import FinishReason
from giveway.core.sampling import SamplingParams
from giveway.engine.engine import Engine
from giveway.engine.intake import Prompt
from giveway.engine.interrupts import Interrupt
from giveway.engine.outputs import RequestOutput
from giveway.options import EngineOptions


def stream_answer(
    engine: Engine, prompt: Prompt, sampling: SamplingParams, say: Callable[[str], None]
) -> RequestOutput:
    """Run one request to its end, or to the next step after Ctrl-C (finish reason ABORT); `say` gets each new text.

    With `sampling.n` above 1 the answers are computed together and said one after another, each below a heading.
    Raises InvalidRequestError before anything runs, RequestFailedError if the request ended with a fault.
    """
    name = engine.submit(prompt, sampling)
    turns = _Turns(sampling.n, say)
    with Interrupt() as interrupt:
        while True:
            for update in engine.step():
                turns.add(update.index, update.text, is_last=update.result is not None)
                if update.whole is not None:
                    _raise_fault(update.whole)
                    return update.whole
            if interrupt.is_wanted:
                engine.abort(name)


def _raise_fault(output: RequestOutput) -> None:
    for choice in output.choices:
        if choice.finish_reason is FinishReason.ERROR:
            which = f"answer {choice.index + 1}: " if output.others else ""
            raise RequestFailedError(which + (choice.error or "the request failed"))


class _Turns:
    """Says several answers one after another: the one whose turn it is as it comes, the others when theirs is."""

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: list[list[str]] = [[] for _ in range(count)]
        self._ended = [False] * count
        self._turn = 0
        self._say_heading()

    def add(self, index: int, text: str, *, is_last: bool) -> None:
        """Take new text of one answer."""
        if text:
            self._waiting[index].append(text)
        self._ended[index] = is_last
        self._say_what_may_be_said()

    def _say_what_may_be_said(self) -> None:
        while True:
            for text in self._waiting[self._turn]:
                self._say(text)
            self._waiting[self._turn].clear()
            if not self._ended[self._turn] or self._turn + 1 == len(self._ended):
                return
            self._turn += 1
            self._say("\n")
            self._say_heading()

    def _say_heading(self) -> None:
        if len(self._ended) > 1:
            self._say(f"--- answer {self._turn + 1} of {len(self._ended)} ---\n")


def tell_if_meaningless(options: EngineOptions) -> None:
    """Print one line to standard error when what will answer is no trained model: its text looks like a fault."""
    if options.device == "dry":
        print("dry run: no model, the text means nothing", file=sys.stderr, flush=True)
    elif options.model == "tiny":
        print("tiny: a model with random weights, the text means nothing", file=sys.stderr, flush=True)


def describe(output: RequestOutput) -> str:
    """Return the figures of one answer as a line for people."""
    stats, count = output.stats, len(output.token_ids)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens, {count} output tokens ({output.finish_reason.value})"]
    if stats.ttft_s is not None:
        parts.append(f"first token after {stats.ttft_s:.3f} s")
        if stats.e2e_s is not None and count > 1 and stats.e2e_s > stats.ttft_s:
            parts.append(f"then {(count - 1) / (stats.e2e_s - stats.ttft_s):.1f} tokens/s")
    if stats.num_preemptions:
        parts.append(f"gave way {stats.num_preemptions} times, {stats.num_recomputed_tokens} tokens recomputed")
    return "; ".join(parts)
