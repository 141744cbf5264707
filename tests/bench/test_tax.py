"""Work done again under a storm: what is counted, and that a model and the dry run count the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giveway.bench import tax
from giveway.bench.tax import ANY_POLICY, POLICIES, Storm, bench_tax
from giveway.core.errors import ConfigError
from giveway.options import EngineOptions

TINY = EngineOptions(model="tiny", device="cpu")
SMALL = Storm(num_requests=6, prompt_tokens=8, output_tokens=6, block_size=2, num_seats=4)  # 7 blocks each


def test_the_blocks_of_a_storm_are_those_that_its_requests_hold_at_their_end() -> None:
    # Goal: the public case is 14 blocks each and 4,200 in all, and a pool holds one request at least.
    public = Storm(300, 128, 96, block_size=16, num_seats=64)
    assert (public.blocks_each, public.num_blocks, public.pool_blocks(400 / 4200)) == (14, 4200, 400)
    assert SMALL.pool_blocks(0.01) == SMALL.blocks_each == 7


def test_a_model_and_the_dry_run_count_the_same() -> None:
    # Goal: bench_tax compares every real run with its dry twin and fails otherwise; here the two tables show it.
    rows = bench_tax(TINY, storm=SMALL, scaled=SMALL, shares=(1.0, 0.5)).rows
    counts = ("pool_pct", "policy", "recomputed_tokens", "computed_tokens", "tax", "preemptions", "steps")
    dry, real = (
        [{name: row[name] for name in counts} for row in rows if row["executor"] == executor]
        for executor in ("dry", "real")
    )
    assert dry == real
    assert [row["policy"] for row in dry] == [ANY_POLICY, *POLICIES]


def test_swapping_computes_nothing_twice_and_recomputing_does() -> None:
    rows = bench_tax(TINY, storm=SMALL, scaled=SMALL, shares=(0.4,)).rows
    found = {row["policy"]: row for row in rows}
    need = 6 * (8 + 6 - 1)
    for name in ("swap", "auto"):
        assert (found[name]["computed_tokens"], found[name]["tax"]) == (need, 0.0)
        assert found[name]["swapped_bytes"] > 0
    for name in ("newest-recompute", "least-work-recompute", "recompute"):
        assert found[name]["computed_tokens"] == need + found[name]["recomputed_tokens"]
        assert found[name]["tax"] == found[name]["recomputed_tokens"] / found[name]["computed_tokens"] > 0
        assert found[name]["swapped_bytes"] == 0


def test_the_quick_storm_is_small_and_still_makes_somebody_give_way() -> None:
    # It took more than a minute: 480 steps of the real model.
    rows = bench_tax(
        TINY, storm=tax.QUARTER, scaled=tax.SCALED_QUICK, shares=tax.QUICK_SHARES, policies=tax.QUICK_POLICIES
    ).rows
    assert [(row["executor"], row["policy"]) for row in rows] == [
        (executor, policy) for executor in ("dry", "real") for policy in tax.QUICK_POLICIES
    ]
    assert all(row["preemptions"] for row in rows)
    assert sum(row["steps"] for row in rows if row["executor"] == "real") < 150


def test_the_makespan_of_the_dry_run_follows_the_profile_it_is_given(tmp_path: Path) -> None:
    # Goal: a profile in which only steps take time makes the makespan the number of steps.
    profile = tmp_path / "profile.json"
    names = ("token_s", "context_s", "copy_s", "slot_out_s", "slot_in_s", "slot_to_disk_s", "slot_from_disk_s")
    profile.write_text(json.dumps({"step_s": 2.0, **dict.fromkeys(names, 0.0)}))
    options = EngineOptions(model="tiny", device="cpu", cost_profile=str(profile))
    report = bench_tax(options, storm=SMALL, scaled=SMALL, shares=(0.5,), policies=("recompute",))
    row = report.rows[0]
    assert row["makespan_s"] == 2.0 * row["steps"]
    assert report.settings["cost_profile"] == str(profile)
    with pytest.raises(ConfigError, match="cannot be read"):
        bench_tax(EngineOptions(model="tiny", cost_profile=str(tmp_path / "none.json")))
