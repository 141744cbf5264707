"""Two answers streamed at the same time. Leaving the loop early would abort that request."""

import asyncio

from giveway import AsyncEngine, EngineOptions, SamplingParams
from giveway.build import build_engine


async def stream(engine: AsyncEngine, prompt: str, priority: int) -> None:
    async for update in engine.generate(prompt, SamplingParams(max_tokens=12, temperature=0), priority=priority):
        print(f"{prompt}: {update.text!r}")


async def main() -> None:
    print("The tiny model has random weights: its text means nothing.")
    async with AsyncEngine(build_engine(EngineOptions(model="tiny")).engine) as engine:
        await asyncio.gather(stream(engine, "a question", 0), stream(engine, "nightly work", 30))


asyncio.run(main())
