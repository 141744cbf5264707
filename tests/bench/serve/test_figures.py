"""Figures out of moments: exact, because nothing here looks at a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from giveway.bench.serve.driver import Run
from giveway.bench.serve.figures import (
    ClassWindow,
    Figure,
    Metric,
    Question,
    class_figures,
    is_good,
    parse_goodput,
    percentile,
    run_figures,
    spread,
)
from giveway.bench.serve.records import Outcome, RequestRecord
from giveway.core.errors import ConfigError


def record(*token_times_s: float, **changes: Any) -> RequestRecord:
    """A request due at 10 s, sent a bit later; by default the server counted a token an event."""
    base = RequestRecord(
        class_name="a",
        name="a-0",
        outcome=Outcome.COMPLETED,
        due_s=10.0,
        sent_s=10.25,
        token_times_s=token_times_s,
        end_s=token_times_s[-1] + 0.5 if token_times_s else 11.0,
        wished_prompt_tokens=64,
        wished_output_tokens=len(token_times_s),
        num_seen_tokens=len(token_times_s),
        usage_prompt_tokens=60,
        usage_output_tokens=len(token_times_s),
    )
    return replace(base, **changes)


def test_times_count_from_the_moment_it_was_due() -> None:
    # Goal: a client that sends late cannot hide what its request waited.
    seen = record(11.0, 11.5, 13.0)
    assert seen.ttft_s == 1.0
    assert seen.itls_s == [0.5, 1.5]
    assert seen.tpot_s == 1.0  # (13 - 11) / (3 - 1)
    assert seen.e2e_s == 3.5
    assert seen.lag_s == 0.25


def test_several_tokens_an_event_are_one_itl_but_all_count_for_tpot() -> None:
    seen = record(11.0, 12.0, 13.0, usage_output_tokens=9)
    assert seen.num_output_tokens == 9
    assert seen.tpot_s == 0.25  # (13 - 11) / (9 - 1)
    assert seen.itls_s == [1.0, 1.0]


def test_without_usage_what_was_wished_and_seen_counts() -> None:
    seen = record(11.0, 12.0, usage_prompt_tokens=None, usage_output_tokens=None)
    assert (seen.num_prompt_tokens, seen.num_output_tokens) == (64, 2)


def test_what_cannot_be_measured_is_none_and_not_zero() -> None:
    assert record(11.0).tpot_s is None
    assert record().ttft_s is None
    assert record(12.0, usage_output_tokens=30, is_streamed=False).tpot_s is None
    assert record(sent_s=None).lag_s is None


def test_percentiles_are_interpolated_between_neighbours() -> None:
    values = [1.0, 2.0, 3.0, 10.0]
    assert [percentile(values, percent) for percent in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 7.9, 10.0])
    assert percentile([4.0], 99) == 4.0
    found = spread([3.0, 1.0, 2.0], (50,))
    assert found is not None
    assert (found.count, found.mean, found.low, found.high, found.percentiles) == (3, 2.0, 1.0, 3.0, {50: 2.0})
    assert found.std == pytest.approx((2 / 3) ** 0.5)
    assert spread([], (50,)) is None


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    limits = parse_goodput(["ttft:1000", "tpot:60", "e2el:3500.5"])
    assert limits == {Figure.TTFT: 1.0, Figure.TPOT: 0.06, Figure.E2E: pytest.approx(3.5005)}
    good = record(11.0, 11.05)
    assert is_good(good, limits)
    assert not is_good(replace(good, due_s=9.9), limits)  # TTFT 1.1 s
    assert not is_good(record(11.0, 11.07), limits)  # TPOT 70 ms
    assert not is_good(replace(good, end_s=20.0), limits)
    assert not is_good(replace(good, outcome=Outcome.CUT_OFF), limits)
    assert is_good(record(11.0), limits)  # one token: no TPOT that could be too long


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", ":3"])
def test_a_limit_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="write NAME:MILLISECONDS with one of ttft, tpot, e2el"):
        parse_goodput([pair])


def test_a_limit_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="ttft twice"):
        parse_goodput(["ttft:1", "ttft:2"])


def test_a_class_is_counted_by_how_its_requests_ended() -> None:
    records = [
        record(11.0, 12.0),
        record(12.0, 14.0, 16.0),
        record(11.0, 11.5, outcome=Outcome.CUT_OFF, usage_prompt_tokens=None, usage_output_tokens=None),
        record(outcome=Outcome.CUT_OFF),
        record(outcome=Outcome.FAILED, failure="http 503"),
        record(11.0, outcome=Outcome.FAILED, failure="broken stream"),
        record(outcome=Outcome.FAILED, failure="http 503"),
        record(11.0, wished_output_tokens=5),
        record(11.0, usage_output_tokens=None),
    ]
    question = Question(limits={Figure.TTFT: 1.5})
    figures = class_figures("a", records, question, begin_s=10.0, end_s=20.0)
    assert (figures.num_requests, figures.num_completed, figures.num_cut_off) == (9, 4, 2)
    assert figures.errors == {"http 503": 2, "broken stream": 1}
    assert (figures.num_errors, figures.num_short, figures.num_without_usage) == (3, 1, 1)
    # Cut off: what it had received counts, its prompt too. Failed, or cut off before the first token: nothing.
    assert figures.output_tokens == 2 + 3 + 2 + 1 + 1
    assert figures.prompt_tokens == 60 + 60 + 64 + 60 + 60
    assert figures.per_second(figures.output_tokens) == 0.9
    assert (figures.num_good, figures.goodput) == (3, 0.3)
    # Times are of the completed alone.
    ttft, itl = figures.spreads[Metric.TTFT], figures.spreads[Metric.ITL]
    assert ttft is not None
    assert itl is not None
    assert (ttft.count, ttft.mean) == (4, 1.25)
    assert (itl.count, itl.high) == (3, 2.0)


def test_short_answers_are_no_news_where_the_model_may_end() -> None:
    found = class_figures(
        "a", [record(11.0, wished_output_tokens=5)], Question(fixed_lengths=False), begin_s=0, end_s=1
    )
    assert found.num_short == 0


def test_nothing_measured_gives_no_rate_and_no_time() -> None:
    figures = class_figures("a", [], Question(limits={Figure.TTFT: 1.0}), begin_s=5.0, end_s=5.0)
    assert figures.goodput == 0.0
    assert figures.lag is None
    assert set(figures.spreads.values()) == {None}


def test_a_class_is_measured_from_its_start_to_its_end() -> None:
    # Goal: what came before a class began, or after it had ended, does not thin its rates.
    records = (
        record(13.0, due_s=12.0, end_s=14.0, class_name="late"),
        record(11.0, outcome=Outcome.CUT_OFF, end_s=20.1, class_name="endless"),
    )
    run = Run(started_s=10.0, ended_s=20.0, records=records, is_interrupted=False)
    windows = [ClassWindow("late", 2.0, is_endless=False), ClassWindow("endless", 1.0, is_endless=True)]
    classes, total = run_figures(run, [*windows, ClassWindow("none", 0.0, is_endless=False)], Question())
    assert [figures.window_s for figures in classes] == [2.0, 9.0, 10.0]
    assert (total.window_s, total.num_requests) == (10.0, 2)
