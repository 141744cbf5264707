"""Explanations of small stories, in which one can say beforehand who stands in whose way."""

from __future__ import annotations

from pathlib import Path

import pytest

from giveway.core.config import PreemptionChoice
from giveway.core.errors import ConfigError
from giveway.core.kv_cache import BlockCopy
from giveway.core.plan import PreemptionMode
from giveway.engine.trace import Alternative, Trace, Unserved, UnservedReason
from giveway.engine.trace.text import describe, describe_all, printable
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.engine.traced_world import TracedWorld


def finish(world: TracedWorld) -> Trace:
    world.run_until_idle()
    world.writer.close()
    return world.read()


def only(spans: tuple[Unserved, ...], reason: UnservedReason) -> Unserved:
    (span,) = [span for span in spans if span.reason is reason]
    return span


def text_of(trace: Trace, name: str) -> str:
    (totals,) = [totals for totals in trace.totals() if totals.request.request_id == name]
    return describe(totals, trace.explain(name), origin_s=trace.origin_s)


def test_a_victim_hears_for_whom_it_gave_way_and_what_each_way_would_have_cost(tmp_path: Path) -> None:
    # Goal: one entry for the step of the preemption, with every price, and one for the steps without a seat.
    world = TracedWorld(tmp_path / "t", device_blocks=6, host_blocks=6, seats=4, mode=PreemptionChoice.AUTO)
    world.submit("slow", priority=20, prompt_tokens=12, max_tokens=8)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=12, max_tokens=4)
    trace = finish(world)
    gone, waits, returns = trace.explain("slow")
    assert (gone.reason, gone.beneficiary, gone.first_step, gone.num_steps) == (
        UnservedReason.PREEMPTED,
        "urgent",
        2,
        1,
    )
    assert gone.preemption is not None
    assert gone.preemption.mode is PreemptionMode.SWAP
    assert [(each.way, each.is_chosen) for each in gone.alternatives] == [
        ("recompute", False),
        ("swap to host", True),
        ("swap to disk", False),
    ]
    prices = {each.way: each.seconds for each in gone.alternatives}
    assert prices["swap to disk"] is None
    assert prices["swap to host"] is not None
    assert prices["recompute"] is not None
    assert prices["swap to host"] < prices["recompute"]
    assert (waits.reason, waits.holders) == (UnservedReason.NO_DEVICE_BLOCKS, ("urgent",))
    assert (waits.preempted_in, waits.alternatives) == (2, gone.alternatives)
    assert (returns.reason, returns.victims) == (UnservedReason.COPY_IN_FLIGHT, ())
    assert trace.explain("urgent") == ()
    assert text_of(trace, "slow") == (
        "slow: class 20, 12 prompt tokens, at most 8 new ones; arrived at 0.000 s\n"
        "ended (length) at 13.000 s after 8 tokens; served in 8 steps, not served in 5 (5.000 s)\n"
        "\n"
        "step 2, at 2.000 s for 1.000 s: preempted\n"
        "    gives way for urgent\n"
        "    swap to host: blocks given up 4, kept 0; wanted: auto\n"
        f"      recompute                  {1e3 * prices['recompute']:9.3f} ms\n"
        f"    > swap to host               {1e3 * prices['swap to host']:9.3f} ms\n"
        "      swap to disk               not possible\n"
        "\n"
        "steps 3 .. 5, at 3.000 s for 3.000 s: no_device_blocks\n"
        "    no room in the pool, and nobody whom it may displace would free enough; blocks lacking: 2; "
        "held by urgent\n"
        "    without a seat since step 2 (swap to host, for urgent)\n"
        "\n"
        "step 6, at 6.000 s for 1.000 s: copy_in_flight\n"
        "    its own KV is being copied\n"
        "    without a seat since step 2 (swap to host, for urgent)"
    )


def test_a_part_is_priced_beside_everything(tmp_path: Path) -> None:
    # Goal: who gives up a tail only sees what giving up all of it would have cost.
    world = TracedWorld(tmp_path / "t", device_blocks=8, host_blocks=8, mode=PreemptionChoice.AUTO, tails=True)
    world.submit("slow", priority=20, prompt_tokens=20, max_tokens=4)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=10, max_tokens=2)
    trace = finish(world)
    gone = only(trace.explain("slow"), UnservedReason.PREEMPTED)
    assert gone.preemption is not None
    assert gone.preemption.num_kept > 0
    everything = gone.alternatives[-1]
    assert everything.way == "everything: swap to host"
    (chosen,) = [each for each in gone.alternatives if each.is_chosen]
    assert everything.seconds is not None
    assert chosen.seconds is not None
    assert everything.seconds > chosen.seconds


def test_one_who_is_forced_out_gave_way_for_nobody(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=6, host_blocks=6)
    world.submit("a", prompt_tokens=4, max_tokens=6)
    world.steps(2)
    world.give_way("a", PreemptionChoice.RECOMPUTE)
    forced = only(finish(world).explain("a"), UnservedReason.FORCED_OUT)
    assert forced.beneficiary is None
    assert [each.way for each in forced.alternatives if each.is_chosen] == ["recompute"]


def test_who_has_no_seat_hears_who_has_them_and_others_behind_whom_they_stand(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20, seats=2)
    for name in ("a", "b", "c", "d"):
        world.submit(name, max_tokens=4)
    trace = finish(world)
    (waits,) = trace.explain("c")
    assert (waits.reason, waits.holders, waits.num_steps) == (UnservedReason.NO_SEAT, ("a", "b"), 4)
    (behind,) = trace.explain("d")
    assert (behind.reason, behind.beneficiary) == (UnservedReason.BEHIND_DEFERRED, "c")
    assert waits.alternatives == ()
    assert "stands behind c, which could not be served" in text_of(trace, "d")
    assert "held by a, b" in text_of(trace, "c")


def test_aging_counts_in_who_stands_behind_whom(tmp_path: Path) -> None:
    # Goal: `old` has come down from class 9 to 5, so the newer one of class 6 stands behind it.
    world = TracedWorld(tmp_path / "t", device_blocks=20, seats=1, aging_s=1.0)
    world.submit("first", priority=0, max_tokens=7)
    world.submit("old", priority=9, max_tokens=1)
    world.steps(4)
    world.submit("new", priority=6, max_tokens=1)
    spans = finish(world).explain("new")
    assert (spans[0].reason, spans[0].beneficiary) == (UnservedReason.BEHIND_DEFERRED, "old")


def test_who_waits_for_a_copy_hears_whose(tmp_path: Path) -> None:
    def late(_: BlockCopy) -> CopyFate:
        return CopyFate(delay_steps=3)

    world = TracedWorld(tmp_path / "t", device_blocks=6, host_blocks=6, copies=late)
    world.submit("slow", priority=20, prompt_tokens=12, max_tokens=8)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=12, max_tokens=4)
    trace = finish(world)
    (waits,) = trace.explain("urgent")
    assert (waits.reason, waits.victims) == (UnservedReason.COPY_IN_FLIGHT, ("slow",))
    assert waits.num_steps >= 3
    assert "its room comes free when KV of slow has been copied" in text_of(trace, "urgent")
    reasons = [span.reason for span in trace.explain("slow")]
    assert reasons[:2] == [UnservedReason.PREEMPTED, UnservedReason.COPY_IN_FLIGHT]


def test_a_branch_waits_for_the_one_that_computes_their_prompt(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20, budget=9)
    for name in ("a", "a/1"):
        world.submit(name, prompt=[5] * 20, max_tokens=2, branch_of="a")
    trace = finish(world)
    waits = only(trace.explain("a/1"), UnservedReason.PROMPT_IN_PROGRESS)
    assert waits.beneficiary == "a"
    assert waits.num_steps > 1
    assert "a computes the prompt that both will share" in text_of(trace, "a/1")


def test_the_budget_went_to_somebody(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20, budget=8, seats=8)
    world.submit("long", prompt_tokens=24, max_tokens=1)
    world.submit("next", prompt_tokens=8, max_tokens=1)
    span = only(finish(world).explain("next"), UnservedReason.NO_TOKENS)
    assert span.holders == ("long",)


def test_a_failed_step_and_the_search_for_the_culprit_are_told(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20)
    world.backend.poison["b"] = 5
    for name in ("a", "b"):
        world.submit(name, max_tokens=6)
    trace = finish(world)
    assert only(trace.explain("a"), UnservedReason.STEP_FAILED).num_steps == 1
    suspects = [span for span in trace.explain("b") if span.reason is UnservedReason.FAULT_ISOLATION]
    assert suspects[0].holders == ("a",)
    assert [totals.finish_reason.value for totals in trace.totals() if totals.finish_reason] == ["length", "error"]


def test_a_name_that_is_used_twice_is_two_requests(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20, seats=1)
    for _ in range(2):
        world.submit("other", max_tokens=2)
        world.submit("again", max_tokens=2)
        world.run_until_idle()
    trace = finish(world)
    spans = trace.explain("again")
    assert [(span.number, span.num_steps) for span in spans] == [(1, 2), (3, 2)]
    assert [totals.request.number for totals in trace.totals()] == [0, 1, 2, 3]


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=20)
    world.submit("request-12", max_tokens=2)
    trace = finish(world)
    with pytest.raises(ConfigError, match=r"there is no request 'request-21'. Did you mean 'request-12'\?"):
        trace.explain("request-21")
    with pytest.raises(ConfigError, match="There are 1, such as"):
        trace.explain("x")


def test_all_requests_are_one_table(tmp_path: Path) -> None:
    world = TracedWorld(tmp_path / "t", device_blocks=6, host_blocks=6)
    world.submit("slow", priority=20, prompt_tokens=12, max_tokens=8)
    world.steps(2)
    world.submit("urgent", priority=0, prompt_tokens=12, max_tokens=4)
    lines = describe_all(finish(world).totals()).splitlines()
    assert lines[0].split("  ")[0] == "request"
    assert lines[1].split() == (
        "slow 20 8 5 5.000 swap 1 no_device_blocks 3, preempted 1, copy_in_flight 1".split()  # noqa: SIM905
    )
    assert lines[2].split() == ["urgent", "0", "4", "0", "0.000", "-", "-"]


def test_a_name_cannot_write_to_the_terminal() -> None:
    assert printable("job-7/2 ü") == "job-7/2 ü"
    assert printable("\x1b[31mred\n") == "\\x1b[31mred\\n"


def test_an_alternative_is_a_plain_value() -> None:
    assert Alternative("pause", 0.0, is_chosen=True) == Alternative("pause", 0.0, is_chosen=True)
