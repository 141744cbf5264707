"""The engine for asyncio: streams, cancellation, and what happens when the engine dies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

import pytest

from giveway.build import build_engine
from giveway.core.errors import GiveWayError, InvalidRequestError
from giveway.core.ids import RequestId
from giveway.core.request import NEWCOMER_STATES
from giveway.core.sampling import SamplingParams
from giveway.engine.async_engine import AsyncEngine, News, RequestStream
from giveway.engine.outputs import RequestOutput
from giveway.llm import LLM
from giveway.options import EngineOptions

LONG = SamplingParams(temperature=0, max_tokens=4000)
SHORT = SamplingParams(temperature=0, max_tokens=16)


def paced_engine(**options: Any) -> AsyncEngine:
    """Start an engine whose steps take a while, as a model's do, so that callers come in between."""
    built = build_engine(EngineOptions(device="dry", **options))
    built.engine.add_listener(lambda *_: time.sleep(0.001))
    return AsyncEngine(built.engine)


def run(body: Callable[[AsyncEngine], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        engine = paced_engine(**options)
        async with engine:
            await asyncio.wait_for(body(engine), timeout=60)

    asyncio.run(main())


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(2000):
        if not engine.engine.num_unfinished and not engine.engine.has_work:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("requests are left behind")


def test_a_stream_adds_up_to_the_offline_answer() -> None:
    expected = LLM(device="dry").generate([[1, 2, 3]], SHORT)[0]

    async def body(engine: AsyncEngine) -> None:
        text = ""
        tokens: list[int] = []
        async for update in engine.generate([1, 2, 3], SHORT):
            text += update.text
            tokens += update.token_ids
        assert (text, tuple(tokens)) == (expected.text, expected.token_ids)

    run(body)


def test_many_streams_at_once_each_get_their_own_answer() -> None:
    prompts = [[i, i + 1] for i in range(40)]
    expected = [r.token_ids for r in LLM(device="dry").generate(prompts, SHORT)]

    async def body(engine: AsyncEngine) -> None:
        results = await asyncio.gather(*(engine.complete(p, SHORT, priority=i % 5) for i, p in enumerate(prompts)))
        assert [r.token_ids for r in results] == expected

    run(body, num_kv_blocks=12, block_size=4)


def test_closing_the_iterator_frees_everything() -> None:
    async def body(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate([1], LONG)) as updates:  # type: ignore[type-var]
            async for _ in updates:
                break
        await until_idle(engine)
        assert engine.engine.scheduler.state.kv.device.num_owned == 0

    run(body)


def test_cancelling_a_waiting_task_frees_everything_and_disturbs_nobody() -> None:
    async def body(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(engine.complete([i], LONG)) for i in range(8)]
        other = asyncio.create_task(engine.complete([9, 9], SHORT))
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        assert len((await other).token_ids) == 16
        await until_idle(engine)

    run(body, max_num_seqs=3)


def test_a_bad_request_is_refused_and_the_next_one_works() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError):
            await engine.complete([], SHORT)
        assert len((await engine.complete([1], SHORT)).token_ids) == 16

    run(body)


def test_when_the_engine_dies_every_reader_hears_of_it_and_none_waits_forever() -> None:
    async def body(engine: AsyncEngine) -> None:
        def fail(*_: object) -> None:
            raise OSError("the listener broke")

        stream = engine.generate([1], LONG)
        await anext(stream)
        engine.engine.add_listener(fail)
        with pytest.raises(GiveWayError, match="the listener broke"):
            async for _ in stream:
                pass
        with pytest.raises(GiveWayError, match="stopped"):
            await engine.complete([1], SHORT)

    run(body)


def test_closing_the_engine_ends_open_streams_with_an_error() -> None:
    async def main() -> None:
        engine = paced_engine()
        stream = engine.generate([1], LONG)
        await anext(stream)
        await engine.close()
        with pytest.raises(GiveWayError, match="closed"):
            async for _ in stream:
                pass

    asyncio.run(main())


def test_an_engine_that_stops_while_a_request_is_being_made_does_not_leave_it_waiting() -> None:
    # Goal: close comes between the look at the engine's state and the hand-in; the last word to all mailboxes would
    # miss this one.
    async def main() -> None:
        engine = paced_engine()
        prepare = engine.engine.prepare

        def close_first(*arguments: Any, **settings: Any) -> Any:
            engine.close_now()
            return prepare(*arguments, **settings)

        engine.engine.prepare = close_first  # type: ignore[method-assign]
        with pytest.raises(GiveWayError, match=r"stopped|closed"):
            await asyncio.wait_for(engine.complete([1], SHORT), timeout=30)

    asyncio.run(main())


def test_a_second_request_of_the_same_name_is_refused_and_the_first_goes_on() -> None:
    async def body(engine: AsyncEngine) -> None:
        first = asyncio.create_task(engine.complete([1], SHORT, request_id="twin"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="in use"):
            await engine.complete([2], SHORT, request_id="twin")
        assert len((await first).token_ids) == 16

    run(body)


SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=16, n=3)


def test_a_stream_of_several_answers_tells_them_apart_and_ends_when_all_have_ended() -> None:
    expected = LLM(device="dry").generate([[1, 2, 3]], SAMPLED)[0]

    async def body(engine: AsyncEngine) -> None:
        texts = ["", "", ""]
        wholes: list[RequestOutput] = []
        async for update in engine.generate([1, 2, 3], SAMPLED, cache_salt="tenant"):
            assert not wholes
            texts[update.index] += update.text
            if update.whole is not None:
                wholes.append(update.whole)
        assert texts == [choice.text for choice in expected.choices]
        assert [choice.token_ids for choice in wholes[0].choices] == [choice.token_ids for choice in expected.choices]
        complete = await engine.complete([1, 2, 3], SAMPLED)
        assert [choice.text for choice in complete.choices] == texts

    run(body, max_num_seqs=2)


@pytest.mark.parametrize("num_seats", [2, 8])
def test_leaving_a_stream_of_several_answers_early_frees_all_of_them(num_seats: int) -> None:
    many = SamplingParams(temperature=1, max_tokens=4000, n=5)

    async def body(engine: AsyncEngine) -> None:
        other = asyncio.create_task(engine.complete([9, 9], SHORT))
        async with aclosing(engine.generate([1], many, request_id="left")) as updates:  # type: ignore[type-var]
            async for _ in updates:
                break
        assert len((await other).token_ids) == 16
        await until_idle(engine)
        assert engine.engine.scheduler.state.kv.device.num_owned == 0
        assert len((await engine.complete([1], SHORT, request_id="left")).token_ids) == 16  # the name is free again

    run(body, max_num_seqs=num_seats)


def test_a_reader_who_is_too_slow_is_held_off_the_device_and_loses_nothing() -> None:
    # Goal: a bounded buffer, then the request gives way; it goes on where it was once its reader has caught up.
    expected = LLM(device="dry").generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=200))[0]

    async def body(engine: AsyncEngine) -> None:
        submission = engine.engine.prepare([1, 2, 3], SamplingParams(temperature=0, max_tokens=200))
        stream = engine.open(submission, max_unread=5)
        for _ in range(2000):
            if not engine.engine.has_work:  # only a held request is left
                break
            await asyncio.sleep(0.001)
        state = await engine.ask(lambda e: e.scheduler.requests[stream.request_id].state)
        assert state in NEWCOMER_STATES
        assert engine.engine.num_unfinished == 1
        tokens: list[int] = []
        most = 0
        while not stream.has_ended:
            for _ in range(2000):  # read no sooner than it is held again, or has ended
                if not engine.engine.has_work:
                    break
                await asyncio.sleep(0.001)
            updates = await stream.next()
            most = max(most, len(updates))
            for update in updates:
                tokens += update.token_ids
        assert tuple(tokens) == expected.token_ids
        assert most <= 5 + 3  # the limit, and what a step under way still gives
        assert updates[-1].whole is not None
        assert updates[-1].whole.stats.num_preemptions > 1

    run(body)


def test_a_reader_who_catches_up_while_his_request_is_being_held_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Goal: the order to let go never overtakes the order to hold, after which nobody would ever let go.
    async def body(engine: AsyncEngine) -> None:
        stream = engine.open(engine.engine.prepare([1], LONG, request_id="slow"), max_unread=3)
        is_holding, has_read, hold = threading.Event(), threading.Event(), engine.engine.hold

        def hold_late(request_id: RequestId) -> None:
            is_holding.set()
            has_read.wait(0.3)  # the reader comes in between, if it can
            hold(request_id)

        monkeypatch.setattr(engine.engine, "hold", hold_late)
        await asyncio.to_thread(is_holding.wait)
        updates = await asyncio.to_thread(stream.take)
        has_read.set()
        while len(updates) < 40:
            updates += await stream.next()
        stream.close()
        await until_idle(engine)

    run(body)


@pytest.mark.parametrize("num_turns", range(5))
def test_a_reader_who_is_cancelled_at_the_moment_that_news_come_is_cancelled(num_turns: int) -> None:
    # Goal: whichever comes first, the cancellation counts; else a client's request would outlive its client.
    async def main() -> None:
        news, stream = News(), cast(RequestStream, object())
        reader = asyncio.ensure_future(news.wait(60))
        for _ in range(3):
            await asyncio.sleep(0)
        news.tell(stream)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if not reader.done():
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(main())


def test_a_held_request_can_be_taken_back() -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.open(engine.engine.prepare([1, 2, 3], LONG), max_unread=2)
        while engine.engine.has_work:
            await asyncio.sleep(0.001)
        stream.close()
        await until_idle(engine)
        assert (await engine.complete([5], SHORT)).token_ids

    run(body)


def test_a_question_is_answered_between_two_steps_and_also_when_idle() -> None:
    async def body(engine: AsyncEngine) -> None:
        assert await engine.ask(lambda e: e.num_unfinished) == 0
        stream = engine.open(engine.engine.prepare([1, 2, 3], LONG))
        assert await engine.ask(lambda e: e.num_unfinished) == 1
        with pytest.raises(ZeroDivisionError):
            await engine.ask(lambda _: 1 // 0)
        stream.close()

    run(body)


def test_a_question_to_an_engine_that_was_closed_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        engine = paced_engine()
        await engine.close()
        with pytest.raises(GiveWayError, match="stopped"):
            await asyncio.wait_for(engine.ask(lambda e: e.num_unfinished), 30)

    asyncio.run(main())


def test_under_the_control_policy_a_full_pool_ends_its_batch_with_an_error_and_the_next_one_is_served() -> None:
    async def body(engine: AsyncEngine) -> None:
        wish = SamplingParams(temperature=0, max_tokens=40)
        ends = await asyncio.gather(*(engine.complete([n, 2], wish) for n in range(4)), return_exceptions=True)
        assert all(isinstance(end, GiveWayError) and "KV cache full" in str(end) for end in ends)
        await until_idle(engine)
        assert len((await engine.complete([9], wish)).token_ids) == 40

    run(body, scheduling_policy="none", num_kv_blocks=4)
