"""A plan in words, and the questions it answers."""

from __future__ import annotations

from giveway.core.ids import CopyId, DeviceBlockId, HostBlockId, RequestId
from giveway.core.plan import (
    Admission,
    BlockCopy,
    CopyDirection,
    Decodes,
    Deferral,
    DeferralReason,
    GivenUp,
    Preemption,
    PreemptionMode,
    ScheduledChunk,
    StepPlan,
    SwapIn,
)

TABLE = (DeviceBlockId(0), DeviceBlockId(1))


def name(text: str) -> RequestId:
    return RequestId(text)


def make_plan() -> StepPlan:
    copy = BlockCopy(CopyId(0), name("back"), CopyDirection.IN, TABLE, (HostBlockId(0), HostBlockId(1)))
    return StepPlan(
        step_id=7,
        state_version=3,
        preemptions=(
            Preemption(name("low"), name("urgent"), PreemptionMode.SWAP, 3),
            Preemption(name("told"), None, PreemptionMode.RECOMPUTE, 2),
        ),
        swap_ins=(SwapIn(copy, TABLE, is_guest=False),),
        admissions=(
            Admission(name("urgent"), TABLE[:1], TABLE[1:], is_guest=False),
            Admission(name("g"), (), (), True),
        ),
        chunks=(ScheduledChunk(name("urgent"), 4, 3, True, TABLE),),
        decodes=Decodes((name("a"), name("b")), (5, 6), (TABLE, TABLE)),
        deferrals=(Deferral(name("later"), DeferralReason.NO_SEAT),),
        given_up=(GivenUp(name("lost"), "nothing can help it"),),
    )


def test_a_plan_tells_every_action_in_words() -> None:
    assert make_plan().describe().splitlines() == [
        "step 7: 5 tokens",
        "  low gives way for urgent: swap, 3 blocks (recompute 0.00 ms, swap impossible)",
        "  told gives way by command: recompute, 2 blocks (recompute 0.00 ms, swap impossible)",
        "  back is swapped in: 2 blocks",
        "  urgent is admitted: 1 blocks found, 1 new",
        "  g is admitted as a guest: 0 blocks found, 0 new",
        "  urgent prefills 4..6",
        "  decode: a, b",
        "  later waits: no_seat",
        "  lost ends: nothing can help it",
    ]


def test_a_decode_is_a_chunk_of_one_token_to_whoever_asks() -> None:
    plan = make_plan()
    assert plan.chunk_of(name("b")) == ScheduledChunk(name("b"), 6, 1, True, TABLE)
    assert plan.chunk_of(name("urgent")) is plan.chunks[0]
    assert plan.chunk_of(name("later")) is None
    assert plan.request_ids() == ("urgent", "a", "b")


def test_a_plan_that_only_moves_requests_is_idle_but_not_empty() -> None:
    # Goal: an engine may skip the device for such a plan, but must still commit it.
    plan = StepPlan(0, 0, preemptions=(Preemption(name("v"), None, PreemptionMode.RECOMPUTE, 1),))
    assert plan.is_idle
    assert not plan.is_empty
    assert StepPlan(0, 0, deferrals=(Deferral(name("w"), DeferralReason.NO_SEAT),)).is_empty
    assert not make_plan().is_idle
