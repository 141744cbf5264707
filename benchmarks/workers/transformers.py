"""Continuous batching of Hugging Face transformers, on PyTorch.

Options: dtype, attention ("sdpa" or "paged|eager"), and the fields of its ContinuousBatchingConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Stopwatch, Unable, serve

_PAGE = 256  # tokens
_NO_EOS = -1


class TransformersWorker:
    """Keeps one batching manager running and hands it requests."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the safetensors copy."""
        torch.set_num_threads(limits.threads)
        dtype, attention = options.pop("dtype", "float32"), options.pop("attention", "sdpa")
        fields = {
            "page_size": _PAGE,
            "num_blocks": limits.kv_tokens // _PAGE,
            "max_batch_tokens": 2048,
            "max_requests_per_batch": limits.num_seqs,
            "allow_block_sharing": False,
            **options,
        }
        network = AutoModelForCausalLM.from_pretrained(
            model.directory, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self.manager = network.init_continuous_batching(
            GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=_NO_EOS),
            continuous_batching_config=ContinuousBatchingConfig(**fields),
        )
        self.manager.start()
        settings = {"dtype": dtype, "attention": attention, "threads": limits.threads, **fields}
        return Loaded(f"{transformers.__version__} (torch {torch.__version__})", settings)

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests; tokens are streamed only of a single one, whose first token is asked for."""
        is_streamed = len(requests) == 1
        outputs: list[list[int]] = [[] for _ in requests]
        watch = Stopwatch()
        order = {
            self.manager.add_request(
                request.prompt, max_new_tokens=request.max_tokens, streaming=is_streamed, eos_token_id=_NO_EOS
            ): number
            for number, request in enumerate(requests)
        }
        waiting = set(order)
        while waiting:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise Unable(f"its generation thread ended: {self.manager.background_thread_status.fatal_error}")
                continue
            if result.error:
                raise Unable(result.error)
            watch.saw_token()
            if result.is_finished():
                waiting.discard(result.request_id)
                outputs[order[result.request_id]] = result.generated_tokens
        return watch.finish(outputs)


if __name__ == "__main__":
    serve(TransformersWorker)
