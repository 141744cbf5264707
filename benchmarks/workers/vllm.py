"""vLLM's CPU build, its V1 engine in this process, with the two libraries preloaded that its manual asks for.

Options: the arguments of its LLM class.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workers.protocol import Finished, Limits, Loaded, Model, Request, Stopwatch, serve

_PRELOAD = "LD_PRELOAD"


class VllmWorker:
    """Adds everything and steps."""

    def load(self, model: Model, limits: Limits, options: dict[str, Any]) -> Loaded:
        """Load the safetensors copy."""
        cores = sorted(os.sched_getaffinity(0))[: limits.threads]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(-(-limits.kv_bytes // 2**30)),  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all threads for computing; no second process beside them
            "VLLM_NO_USAGE_STATS": "1",
        }
        os.environ.update(environment)  # read when vllm is imported
        import vllm

        arguments = {
            "dtype": "float32",
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.num_seqs,
            "max_num_batched_tokens": max(2048, limits.max_model_len),
            "enable_prefix_caching": False,
            **options,
        }
        self.sampling = vllm.SamplingParams
        self.engine = vllm.LLM(model.directory, skip_tokenizer_init=True, **arguments).llm_engine
        self.num_runs = 0
        preloaded = [Path(path).name for path in os.environ.get(_PRELOAD, "").split(":") if path]
        return Loaded(vllm.__version__, {**environment, **arguments, "preloaded": preloaded})

    def run(self, requests: Sequence[Request]) -> Finished:
        """Answer all requests."""
        self.num_runs += 1
        watch = Stopwatch()
        outputs: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            name = f"{self.num_runs}-{number}"
            outputs[name] = []
            sampling = self.sampling(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
            self.engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                watch.saw_token()
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        return watch.finish(outputs.values())


def _preload() -> None:
    """Start this process anew with tcmalloc and Intel's OpenMP preloaded, as far as they are installed."""
    if _PRELOAD in os.environ:
        return
    found = [ctypes.util.find_library("tcmalloc_minimal"), *Path(sys.prefix, "lib").glob("libiomp5.so")]
    os.environ[_PRELOAD] = ":".join(str(library) for library in found if library)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.workers.vllm"])  # noqa: S606  # itself


if __name__ == "__main__":
    _preload()
    serve(VllmWorker)
