"""Random arrivals, aborts, preemptions and faults: six checks after every step, an empty pool at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from giveway.core.config import PreemptionChoice, SchedulingPolicy, VictimOrder
from giveway.core.cost_profile import SHIPPED
from giveway.core.kv_cache import BlockCopy
from giveway.core.sampling import SamplingParams
from giveway.runtime.dry.scripted_copies import CopyFate
from tests.faulty_disk import FaultyDisk, Trouble
from tests.world import World

VOCABULARY = 50
MAX_UNFINISHED = 12

FATES = st.lists(
    st.builds(
        CopyFate,
        delay_steps=st.sampled_from([0, 0, 0, 1, 3, 6]),
        fails=st.sampled_from([False, False, False, True]),
        is_lost=st.sampled_from([False] * 9 + [True]),
    ),
    min_size=1,
    max_size=8,
)


class AnythingMayHappen(RuleBasedStateMachine):
    """A scheduler among clients, links and devices of the worst kind."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        device_blocks=st.integers(2, 16),
        host=st.sampled_from([0, 1, 4, 16]),
        seats=st.integers(1, 6),
        extra_budget=st.sampled_from([0, 2, 10, 60]),
        policy=st.sampled_from([SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS]),
        mode=st.sampled_from(list(PreemptionChoice)),
        prefix_caching=st.booleans(),
        overlapped=st.booleans(),
        waits=st.booleans(),
        fates=FATES,
        tails=st.booleans(),
        victim_order=st.sampled_from([None, *VictimOrder]),
        aging_s=st.sampled_from([None, None, 1.0, 7.0]),
        target_step_s=st.sampled_from([1e6, 0.02, None]),
        disk_blocks=st.sampled_from([0, 0, 2, 16]),
        disk_price=st.sampled_from([1.0, 0.01, 1000.0]),
    )
    def start(
        self,
        block_size: int,
        device_blocks: int,
        host: int,
        seats: int,
        extra_budget: int,
        policy: SchedulingPolicy,
        mode: PreemptionChoice,
        prefix_caching: bool,
        overlapped: bool,
        waits: bool,
        fates: list[CopyFate],
        tails: bool,
        victim_order: VictimOrder | None,
        aging_s: float | None,
        target_step_s: float | None,
        disk_blocks: int,
        disk_price: float,
    ) -> None:
        def fate_of(copy: BlockCopy) -> CopyFate:
            return fates[copy.copy_id % len(fates)]

        self.world = World(
            device_blocks=device_blocks,
            block_size=block_size,
            host_blocks=host,
            seats=seats,
            budget=seats + extra_budget,
            policy=policy,
            mode=mode,
            prefix_caching=prefix_caching,
            copies=fate_of if overlapped else None,
            copy_timeout_s=8.0,
            waits_for_copies=waits,
            vocab_size=VOCABULARY,
            tails=tails,
            victim_order=victim_order,
            aging_s=aging_s,
            target_step_s=target_step_s,
            disk_blocks=disk_blocks,
            disk=FaultyDisk(disk_blocks, block_size) if disk_blocks else None,
            costs=replace(
                SHIPPED,
                slot_to_disk_s=SHIPPED.slot_to_disk_s * disk_price,
                slot_from_disk_s=SHIPPED.slot_from_disk_s * disk_price,
            ),
        )
        self.num_slots = device_blocks * block_size
        self.num_sent = 0

    # Clients

    @precondition(lambda self: len(self.world.scheduler.requests) < MAX_UNFINISHED)
    @rule(
        priority=st.sampled_from([0, 5, 10]),
        share=st.floats(0.0, 1.0),
        new=st.integers(1, 24),
        changed_at=st.integers(0, 40),
        temperature=st.sampled_from([0.0, 0.8]),
        logprobs=st.sampled_from([None, None, 0, 1]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 1]),
        min_tokens=st.sampled_from([0, 0, 3]),
        stops=st.booleans(),
        poisoned_at=st.sampled_from([None] * 9 + [0, 3, 9]),
        faulty_at=st.sampled_from([None] * 9 + [0, 3, 9]),
        num_branches=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from([b"", b"", b"tenant"]),
    )
    def submit(
        self,
        priority: int,
        share: float,
        new: int,
        changed_at: int,
        temperature: float,
        logprobs: int | None,
        prompt_logprobs: int | None,
        min_tokens: int,
        stops: bool,
        poisoned_at: int | None,
        faulty_at: int | None,
        num_branches: int,
        salt: bytes,
    ) -> None:
        """Prompts are ones with a two somewhere, so that prefixes are shared and told apart."""
        num_prompt = min(1 + int(share * self.num_slots), 60)
        first = f"r{self.num_sent}"
        self.num_sent += 1
        for branch in range(num_branches):
            name = f"{first}/{branch}" if branch else first
            if poisoned_at is not None:
                self.world.backend.poison[name] = poisoned_at
            if faulty_at is not None:
                self.world.backend.faults[name] = faulty_at
            self.world.submit(
                name,
                priority=priority,
                prompt=[2 if place == changed_at else 1 for place in range(num_prompt)],
                max_tokens=new,
                sampling=SamplingParams(
                    temperature=temperature,
                    logprobs=logprobs,
                    prompt_logprobs=None if branch else prompt_logprobs,
                    min_tokens=min(min_tokens, new),
                    max_tokens=new,
                ),
                seed=self.num_sent + 1000 * branch,
                stop_token_ids=frozenset(range(0, VOCABULARY, 7)) if stops else frozenset(),
                branch_of=first if num_branches > 1 else None,
                salt=salt,
            )

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(number=st.integers(0, MAX_UNFINISHED))
    def abort(self, number: int) -> None:
        names = list(self.world.scheduler.requests)
        self.world.abort(names[number % len(names)])

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(number=st.integers(0, MAX_UNFINISHED))
    def abort_and_send_again_under_the_same_name(self, number: int) -> None:
        names = list(self.world.scheduler.requests)
        name = names[number % len(names)]
        self.world.abort(name)
        self.world.step()
        self.world.submit(name, priority=5, prompt=[1, 3, 1], max_tokens=2)

    # Trouble

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(number=st.integers(0, MAX_UNFINISHED), choice=st.sampled_from(list(PreemptionChoice)))
    def give_way(self, number: int, choice: PreemptionChoice) -> None:
        residents = [request.request_id for request in self.world.scheduler.state.residents]
        names = residents or list(self.world.scheduler.requests)
        self.world.give_way(names[number % len(names)], choice)

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(number=st.integers(0, MAX_UNFINISHED), is_end=st.booleans())
    def hold(self, number: int, is_end: bool) -> None:
        names = list(self.world.scheduler.requests)
        name = names[number % len(names)]
        if is_end:
            self.world.let_go(name)
        else:
            self.world.hold(name)

    @precondition(lambda self: self.world.disk is not None)
    @rule(trouble=st.sampled_from(list(Trouble)))
    def the_disk_has_trouble(self, trouble: Trouble) -> None:
        assert isinstance(self.world.disk, FaultyDisk)
        self.world.disk.trouble = trouble

    @rule(is_lucky=st.sampled_from([True, True, True, False]))
    def next_step_may_fail(self, is_lucky: bool) -> None:
        self.world.backend.fails_next = not is_lucky

    # Time

    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        self.world.steps(count)

    @invariant()
    def nothing_is_owned_by_nobody(self) -> None:
        if hasattr(self, "world") and not self.world.scheduler.requests and not self.world.scheduler.has_work:
            self.world.run_until_idle()

    def teardown(self) -> None:
        """Drain: whatever was sent ends, with the tokens of an undisturbed run, and only lost copies hold blocks."""
        if hasattr(self, "world"):
            self.world.let_go_all()
            self.world.run_until_idle(max_steps=3000)


def test_whatever_happens_everybody_ends_with_the_right_tokens_and_the_pools_are_empty() -> None:
    run_state_machine_as_test(AnythingMayHappen, settings=settings(max_examples=100, stateful_step_count=40))


@pytest.mark.long
def test_whatever_happens_at_length() -> None:
    run_state_machine_as_test(
        AnythingMayHappen, settings=settings(max_examples=4000, stateful_step_count=80, derandomize=False)
    )
