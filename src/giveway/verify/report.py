"""From results to the table, the closing lines and the JSON file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from giveway.bench.measure import describe_machine
from giveway.verify.check import Verdict
from giveway.verify.modes import Kind
from giveway.verify.run import ModeResult

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120  # characters: nothing is cut off in a pipe or a log


def make_console() -> Console:
    """Return a console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def show(verdict: Verdict, console: Console) -> None:
    """Print the table, what is wrong in each mode, and the verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Preempted against undisturbed: {verdict.model_description}")
    for title in ("mode", "gave way", "batch", "answers equal", ""):
        table.add_column(title, justify="right" if title in ("batch", "answers equal") else "left")
    for result in verdict.results:
        is_fine = result.is_as_promised
        table.add_row(
            result.mode.name,
            kinds_in_words(result),
            str(result.largest_batch),
            f"{result.num_equal}/{result.num_answers}",
            Text("as promised" if is_fine else "FAILED", style="green" if is_fine else "bold red"),
        )
    console.print(table)
    for result in verdict.results:
        for problem in problems_of(result):
            console.print(f"{result.mode.name}: {problem}", style="red", soft_wrap=True, markup=False, highlight=False)
    console.print(closing_sentence(verdict), soft_wrap=True, highlight=False)


def kinds_in_words(result: ModeResult) -> str:
    """Return what happened and how often: "host 5, host tail 3"."""
    counts = [f"{kind.value} {result.kinds[kind]}" for kind in Kind if result.kinds.get(kind)]
    return ", ".join(counts) or "nobody"


def problems_of(result: ModeResult) -> list[str]:
    """Return a line for everything that is not as promised."""
    problems = []
    if result.error is not None:
        problems.append(f"the run ended with {result.error}")
    if result.difference is not None:
        num_others = result.num_answers - result.num_equal - 1
        more = f" (and {num_others} more answers)" if num_others and result.error is None else ""
        problems.append(f"first difference: {result.difference.describe()}{more}")
    for wanted in result.missing:
        names = " or ".join(kind.value for kind in Kind if kind in wanted)
        problems.append(f"there was no {names}, so this mode has shown nothing")
    return problems


def closing_sentence(verdict: Verdict) -> str:
    """Say what was found; every number is taken from the results."""
    failed = [result for result in verdict.results if not result.is_as_promised]
    num_answers = sum(result.num_answers for result in verdict.results)
    num_equal = sum(result.num_equal for result in verdict.results)
    times = sum(count for result in verdict.results for kind, count in result.kinds.items() if kind.is_preemption)
    if not failed:
        return (
            f"All {num_answers} answers of {len(verdict.results)} modes are those of the undisturbed run, to the bit; "
            f"{times} times somebody gave way."
        )
    return (
        f"{len(failed)} of {len(verdict.results)} modes failed; {num_equal} of {num_answers} answers are those of the "
        "undisturbed run."
    )


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "machine": describe_machine(),
        "settings": {
            "model": verdict.model_description,
            "block_size": verdict.block_size,
            "requests": [
                {
                    "name": request.name,
                    "prompt_tokens": len(request.token_ids),
                    "output_tokens": request.sampling.max_tokens,
                }
                for request in verdict.requests
            ],
        },
        "is_as_promised": verdict.is_as_promised,
        "rows": [_row(result) for result in verdict.results],
    }


def _row(result: ModeResult) -> dict[str, Any]:
    return {
        "mode": result.mode.name,
        "gave_way": {kind.value: result.kinds[kind] for kind in Kind if result.kinds.get(kind)},
        "largest_batch": result.largest_batch,
        "answers": result.num_answers,
        "answers_equal": result.num_equal,
        "seconds": round(result.seconds, 3),
        "problems": problems_of(result),
        "first_difference": None if result.difference is None else result.difference.as_json(),
        "is_as_promised": result.is_as_promised,
    }
