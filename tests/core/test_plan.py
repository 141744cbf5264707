"""A plan in words, and the questions it answers."""

from __future__ import annotations

from giveway.core.config import PreemptionChoice
from giveway.core.ids import CopyId, DeviceBlockId, DiskBlockId, HostBlockId, RequestId
from giveway.core.plan import (
    Admission,
    BlockCopy,
    CopyDirection,
    Decodes,
    Deferral,
    DeferralReason,
    GivenUp,
    Giving,
    Preemption,
    PreemptionCost,
    PreemptionMode,
    ScheduledChunk,
    StepPlan,
    SwapIn,
    Tier,
    TierMove,
)

TABLE = (DeviceBlockId(0), DeviceBlockId(1))


def name(text: str) -> RequestId:
    return RequestId(text)


def preemption(
    victim: str, beneficiary: str | None, num_blocks: int, cost: PreemptionCost, *, num_kept: int = 0
) -> Preemption:
    giving = Giving(num_blocks, 9, 4 * num_kept, num_blocks, is_untouched=False, host_room=4, disk_room=0)
    who = None if beneficiary is None else name(beneficiary)
    return Preemption(name(victim), who, giving, PreemptionChoice.AUTO, cost, num_kept)


SWAP_TO_HOST = PreemptionCost(PreemptionMode.SWAP, Tier.HOST, 0.0123, 0.004, 0.0551)
DROP = PreemptionCost(PreemptionMode.RECOMPUTE, None, 0.002, None, None)


def make_plan() -> StepPlan:
    copy = BlockCopy(CopyId(0), name("back"), CopyDirection.IN, TABLE, (HostBlockId(0), HostBlockId(1)))
    return StepPlan(
        step_id=7,
        state_version=3,
        preemptions=(
            preemption("low", "urgent", 3, SWAP_TO_HOST, num_kept=1),
            preemption("told", None, 2, DROP),
        ),
        moves=(TierMove(CopyId(1), name("parked"), (HostBlockId(3),), (DiskBlockId(0),)),),
        dropped=(name("idle"),),
        swap_ins=(SwapIn(copy, (), TABLE, is_guest=False),),
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
        "  low gives way for urgent: swap to host, 3 blocks, keeps 1 (recompute 12.30 ms, host 4.00 ms, disk 55.10 ms)",
        "  told gives way by command: recompute, 2 blocks, keeps 0 "
        "(recompute 2.00 ms, host impossible, disk impossible)",
        "  parked moves from host to disk: 1 blocks",
        "  idle loses its parked KV",
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
    plan = StepPlan(0, 0, preemptions=(preemption("v", None, 1, DROP),))
    assert plan.is_idle
    assert not plan.is_empty
    assert StepPlan(0, 0, deferrals=(Deferral(name("w"), DeferralReason.NO_SEAT),)).is_empty
    assert not make_plan().is_idle


def test_a_plan_that_moves_parked_kv_has_work_for_the_executor() -> None:
    moves = (TierMove(CopyId(0), name("p"), (HostBlockId(0),), (DiskBlockId(0),)),)
    assert not StepPlan(0, 0, moves=moves).is_idle


def test_a_preemption_tells_its_mode_and_how_much_it_gives_up() -> None:
    given = preemption("v", "b", 3, SWAP_TO_HOST)
    assert (given.mode, given.num_blocks) == (PreemptionMode.SWAP, 3)
