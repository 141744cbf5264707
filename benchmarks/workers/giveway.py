"""GiveWay itself. Options are the fields of its `EngineOptions`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Stopwatch, Unable, serve
from giveway import LLM, SamplingParams
from giveway.core.errors import GiveWayError

_BLOCK_SIZE = 16


class GiveWayWorker:
    """Submits everything and steps."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the GGUF file."""
        settings = {
            "num_threads": limits.threads,
            "max_num_seqs": limits.num_seqs,
            "max_model_len": limits.max_model_len,
            "block_size": _BLOCK_SIZE,
            "num_kv_blocks": limits.kv_tokens // _BLOCK_SIZE,
            "swap_space": 0,
            **options,
        }
        try:
            self.llm = LLM(options.get("model", model.gguf), **{k: v for k, v in settings.items() if k != "model"})
        except GiveWayError as error:
            raise Unable(str(error)) from error
        return Loaded(version("giveway"), {**settings, "backend": self.llm.built.model.backend.description})

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests."""
        engine = self.llm.engine
        watch = Stopwatch()
        names = [
            engine.submit(request.prompt, SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True))
            for request in requests
        ]
        outputs: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_work:
            for update in engine.step():
                if update.token_ids:
                    watch.saw_token()
                outputs[update.request_id] += update.token_ids
        return watch.finish(outputs.values())


if __name__ == "__main__":
    serve(GiveWayWorker)
