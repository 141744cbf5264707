"""The loop itself: submit at any time, step, and look at each step. A dry run: no weights, the tokens mean nothing."""

from giveway import EngineOptions, SamplingParams
from giveway.build import build_engine
from giveway.core.events import Preempted

engine = build_engine(EngineOptions(device="dry", block_size=4, num_kv_blocks=8, max_model_len=32)).engine
engine.add_listener(lambda plan, _: print(plan.describe()) if plan is not None else None)
preempted: list[str] = []
engine.add_listener(lambda _, events: preempted.extend(e.request_id for e in events if isinstance(e, Preempted)))

wishes = SamplingParams(max_tokens=12, temperature=0)
engine.submit("background", wishes, priority=20, request_id="slow")
for number in range(20):
    if number == 4:  # while it runs, somebody more urgent comes
        engine.submit("urgent question", wishes, priority=0, request_id="urgent")
    for update in engine.step() if engine.has_work else ():
        if update.result is not None:
            print(f"{update.request_id} is finished: {len(update.result.token_ids)} tokens")
while engine.has_work:
    engine.step()
assert set(preempted) == {"slow"}  # it gave up only as many blocks as were lacking, more than once
