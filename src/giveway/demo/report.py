"""From results to rows, the JSON file, the closing sentence and the verdict. No display here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from giveway.bench.measure import describe_machine
from giveway.build import format_bytes
from giveway.demo.run import RunResult, count_equal
from giveway.demo.workload import Workload


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. None: the run gave no such number."""

    policy: str
    title: str
    finished: int  # requests
    total: int  # requests
    answers_equal: int  # of those finished, equal to the undisturbed run
    urgent_ttft_p50_s: float | None
    urgent_ttft_max_s: float | None
    background_tok_s: float | None
    preemptions: dict[str, int]  # by mode
    recomputed_tokens: int
    swapped_bytes: int  # out and back
    error: str | None
    must_finish: bool

    @property
    def is_as_promised(self) -> bool:
        """Whether no answer differs, and a run that should finish did."""
        return self.answers_equal == self.finished and (self.finished == self.total or not self.must_finish)

    def as_json(self) -> dict[str, Any]:
        """Return what goes into the JSON file."""
        return {
            "policy": self.policy,
            "finished": self.finished,
            "total": self.total,
            "answers_equal": self.answers_equal,
            "urgent_ttft_p50_s": self.urgent_ttft_p50_s,
            "urgent_ttft_max_s": self.urgent_ttft_max_s,
            "background_tok_s": self.background_tok_s,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "swapped_bytes": self.swapped_bytes,
            "error": self.error,
        }


def make_row(result: RunResult, reference: RunResult) -> Row:
    """Compare one run with the undisturbed one."""
    times = result.urgent_ttft_s
    return Row(
        policy=result.scenario.policy,
        title=result.scenario.title,
        finished=len(result.answers),
        total=len(result.workload.requests),
        answers_equal=count_equal(result, reference),
        urgent_ttft_p50_s=median(times) if times else None,
        urgent_ttft_max_s=max(times, default=None),
        background_tok_s=result.background_tok_s,
        preemptions={mode.value: count for mode, count in sorted(result.tally.preemptions.items(), key=_by_name)},
        recomputed_tokens=result.tally.num_recomputed_tokens,
        swapped_bytes=result.tally.swapped_bytes,
        error=result.error,
        must_finish=result.scenario.must_finish,
    )


def _by_name(item: tuple[Any, int]) -> str:
    return str(item[0].value)


def cells(row: Row) -> dict[str, str]:
    """Return a row for people: column title to text."""
    return {
        "policy": row.title,
        "finished": f"{row.finished}/{row.total}",
        "urgent TTFT p50": _seconds(row.urgent_ttft_p50_s),
        "max": _seconds(row.urgent_ttft_max_s),
        "background": "-" if row.background_tok_s is None else f"{row.background_tok_s:.1f} tok/s",
        "preemptions": ", ".join(f"{mode} {count}" for mode, count in row.preemptions.items()) or "0",
        "recomputed": f"{row.recomputed_tokens} tokens",
        "swapped": format_bytes(row.swapped_bytes),
        "answers equal": f"{row.answers_equal}/{row.finished}" if row.finished else "-",
    }


def table_cells(row: Row) -> dict[str, str]:
    """Return a row for a table that fits into 80 columns: column title to text."""
    first, last = row.urgent_ttft_p50_s, row.urgent_ttft_max_s
    return {
        "policy": row.policy.replace("-", "-\n"),
        "done": f"{row.finished}/{row.total}",
        "urgent TTFT\np50/max, s": "-" if first is None or last is None else f"{first:.2f}/{last:.2f}",
        "background\ntok/s": "-" if row.background_tok_s is None else f"{row.background_tok_s:.0f}",
        "preempted": "\n".join(f"{mode} {count}" for mode, count in row.preemptions.items()) or "0",
        "tokens\nredone": str(row.recomputed_tokens),
        "swapped": format_bytes(row.swapped_bytes),
        "answers\nequal": f"{row.answers_equal}/{row.finished}" if row.finished else "-",
    }


def plain_line(row: Row) -> str:
    """Return a row as one line, for logs and pipes."""
    line = "; ".join(text if title == "policy" else f"{title} {text}" for title, text in cells(row).items())
    return line if row.error is None else f"{line}; error: {row.error}"


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s:.3f} s"


def closing_sentence(rows: Sequence[Row]) -> str:
    """Say in plain words what was seen; every number is taken from the rows."""
    by_policy = {row.policy: row for row in rows}
    parts = []
    lost = by_policy.get("none")
    if lost is not None:
        parts.append(
            f"Without preemption the pool ran full and {lost.total - lost.finished} of {lost.total} requests were lost"
            if lost.error is not None
            else "Without preemption the pool happened to suffice"
        )
    others = [row for row in rows if row.must_finish]
    if all(row.finished == row.total for row in others):
        parts.append(f"with it every run finished all {others[0].total}")
    else:
        parts.append("with it some requests did not finish, which is a fault")
    differing = sum(row.finished - row.answers_equal for row in others)
    parts.append(
        f"{differing} answers differ from the undisturbed run, which is a fault"
        if differing
        else "every answer is token for token that of the undisturbed run"
    )
    sentence = "; ".join(parts) + "."
    waited = _waiting_time(by_policy)
    return f"{sentence} {waited}" if waited else sentence


def _waiting_time(by_policy: dict[str, Row]) -> str | None:
    """How long people waited, first come first served and with priorities; None: the workload had nobody waiting."""
    fcfs = by_policy.get("fcfs")
    with_priority = [row for name, row in by_policy.items() if name.startswith("priority")]
    times = [row.urgent_ttft_max_s for row in with_priority if row.urgent_ttft_max_s is not None]
    if fcfs is None or fcfs.urgent_ttft_max_s is None or not times:
        return None
    return (
        f"Urgent questions waited up to {fcfs.urgent_ttft_max_s:.2f} s for their first token when served in order of "
        f"arrival, and at most {max(times):.2f} s when less urgent work gave way."
    )


def as_json(rows: Sequence[Row], workload: Workload, model_description: str) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "machine": describe_machine(),
        "settings": {
            "workload": workload.title,
            "model": model_description,
            "num_kv_blocks": workload.num_blocks,
            "num_kv_blocks_undisturbed": workload.num_blocks_wanted,
            "block_size": workload.block_size,
            "max_num_seqs": workload.num_seats,
            "requests": [
                {
                    "name": request.name,
                    "priority": request.priority,
                    "prompt_tokens": len(request.token_ids),
                    "max_tokens": request.sampling.max_tokens,
                    "after_background_tokens": request.after_tokens,
                }
                for request in workload.requests
            ],
        },
        "rows": [row.as_json() for row in rows],
    }
