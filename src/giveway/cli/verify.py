"""`giveway verify`."""

from __future__ import annotations

import json

import click

from giveway.cli.flags import WholeNumber, flag, takes_engine_options
from giveway.cli.output_file import open_target, takes_json_file
from giveway.options import EngineOptions

_CHOICES = ("model", "device", "backend", "dtype", "exact", "num_threads", "block_size", "swap_dir", "check_invariants")


@click.command("verify")
@flag(
    "num_requests",
    variable="verify_requests",
    help="Requests, greedy and seeded in turn. A mode takes as many as it needs.",
    type=WholeNumber(),
    default=16,
)
@flag(
    "num_tokens",
    variable="verify_tokens",
    help="Output tokens of each request.",
    type=WholeNumber(),
    default=16,
)
@takes_json_file("the results")
@takes_engine_options(only=_CHOICES)
def command(options: EngineOptions, num_requests: int, num_tokens: int, json_file: str | None) -> int:
    """Check on this machine that whoever gives way gets the answer of an undisturbed run, to the bit.

    Requests are answered alone, then again while they fight over a pool that is too small: swapped to the host and to
    disk, dropped and recomputed, in part and as a whole, in small and large chunks and batches, with the prefix cache,
    on one thread and on two. Tokens, text and log-probabilities are compared. Exit code 1: an answer differs, or a mode
    did not preempt as it should and so has shown nothing. Half a minute or a few with the embedded model.
    """
    from giveway.verify.check import verify
    from giveway.verify.report import as_json, make_console, show

    target = open_target(json_file)
    console = make_console()
    with console.status("loading the model") as status:
        verdict = verify(
            options,
            num_requests=num_requests,
            num_tokens=num_tokens,
            tell=lambda name, number, count: status.update(f"{number} of {count}: {name}"),
        )
    show(verdict, console)
    if target is not None:
        target.write_text(json.dumps(as_json(verdict), indent=2) + "\n")
    return 0 if verdict.is_as_promised else 1
