"""OpenVINO GenAI: its continuous batching pipeline, which reads the GGUF file itself.

Options: cache_gib, max_num_batched_tokens, and any property of its CPU plugin by its name in capitals, such as
KV_CACHE_PRECISION or INFERENCE_PRECISION_HINT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Stopwatch, serve


class OpenVinoWorker:
    """Adds everything and steps."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the GGUF file; weights stay compressed."""
        properties = {"INFERENCE_NUM_THREADS": limits.threads}
        properties |= {name: value for name, value in options.items() if name.isupper()}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options.get("cache_gib", -(-limits.kv_bytes // 2**30))
        scheduler.max_num_seqs = limits.num_seqs
        scheduler.max_num_batched_tokens = options.get("max_num_batched_tokens", 2048)
        self.pipeline = genai.ContinuousBatchingPipeline(model.gguf, scheduler, "CPU", properties)
        settings = {
            **properties,
            "cache_gib": scheduler.cache_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "dynamic_split_fuse": scheduler.dynamic_split_fuse,
        }
        return Loaded(genai.__version__, settings)

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests."""
        prompts = [openvino.Tensor(np.array([request.prompt], np.int64)) for request in requests]
        watch = Stopwatch()
        handles = [
            self.pipeline.add_request(number, prompt, _greedy(request.max_tokens))
            for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        ]
        outputs: list[list[int]] = [[] for _ in requests]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for handle, output in zip(handles, outputs, strict=True):
                if handle.can_read():
                    watch.saw_token()
                    output += (token for piece in handle.read().values() for token in piece.generated_ids)
        return watch.finish(outputs)


def _greedy(max_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(OpenVinoWorker)
