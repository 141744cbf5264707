"""`giveway generate`."""

from __future__ import annotations

import sys
from typing import Any

import click

from giveway.cli.flags import WholeNumber, flag, takes_engine_options, takes_sampling
from giveway.options import EngineOptions

MAX_STDIN_BYTES = 16 << 20


@click.command("generate")
@click.argument("prompt")
@flag("raw", is_flag=True, help="Continue the text as it stands, without the model's chat template.")
@flag("system", metavar="TEXT", help="System message, before the prompt.")
@flag("stats", is_flag=True, help="Print a line of figures to standard error at the end.")
@flag(
    "n",
    help="Answers to the prompt, printed one after another. (-n is --max-tokens.)",
    type=WholeNumber(),
    default=1,
    variable="num_answers",
)
@takes_sampling(max_tokens=512)
@takes_engine_options()
def command(
    options: EngineOptions, sampling: dict[str, Any], prompt: str, raw: bool, system: str | None, stats: bool, n: int
) -> int:
    """Stream the answer to PROMPT; a lone - reads it from standard input.

    The prompt is sent as a user's message through the model's chat template; --raw continues the bare text instead,
    which is what a model without a template needs. --seed makes a sampled answer repeatable, and with --n the first
    answer is the one that the same seed gives alone.
    """
    from giveway.build import build_engine
    from giveway.cli.answering import describe, stream_answer, tell_if_meaningless
    from giveway.cli.standard_input import check_utf8, read_stdin
    from giveway.core.request import FinishReason
    from giveway.core.sampling import SamplingParams

    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out; put it into the prompt.")
    params = SamplingParams(n=n, seed=options.seed, **sampling)
    check_utf8(prompt, "PROMPT")
    check_utf8(system or "", "--system")
    text = read_stdin(MAX_STDIN_BYTES) if prompt == "-" else prompt
    built = build_engine(options)
    tell_if_meaningless(options)
    try:
        if raw:
            result = stream_answer(built.engine, text, params, _say)
        else:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            result = stream_answer(built.engine, built.model.encode_chat(messages), params, _say)
    finally:
        built.engine.close()
    _say("\n")
    if stats:
        for choice in result.choices:
            which = f"answer {choice.index + 1}: " if n > 1 else ""
            print(which + describe(choice), file=sys.stderr)
    return 130 if any(choice.finish_reason is FinishReason.ABORT for choice in result.choices) else 0


def _say(text: str) -> None:
    print(text, end="", flush=True)
