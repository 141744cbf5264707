"""One answer at a time, streamed as it comes: what `generate` and `chat` share."""

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

    Raises InvalidRequestError before anything runs, RequestFailedError if the request ended with a fault.
    """
    name = engine.submit(prompt, sampling)
    with Interrupt() as interrupt:
        while True:
            for update in engine.step():
                if update.text:
                    say(update.text)
                if update.result is not None:
                    if update.result.finish_reason is FinishReason.ERROR:
                        raise RequestFailedError(update.result.error or "the request failed")
                    return update.result
            if interrupt.is_wanted:
                engine.abort(name)


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
