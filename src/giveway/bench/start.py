"""Process start to first token, and the memory that the weights take on the way: a fresh process every time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from giveway.bench.measure import Report, sample
from giveway.core.errors import GiveWayError

_CHILD = """
import json, sys
def anonymous_bytes(field):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))
from giveway.llm import LLM
from giveway.core.sampling import SamplingParams
import giveway.runtime.torch.backend
before = anonymous_bytes("RssAnon:")
llm = LLM(sys.argv[1] or None, num_kv_blocks=64, swap_space=0, max_model_len=1000)
after = anonymous_bytes("RssAnon:")
(answer,) = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=1))
print(json.dumps({"grown_bytes": after - before, "kv_bytes": 64 * llm.engine.block_bytes}), flush=True)
"""


def bench_start(model: str | None, *, num_rounds: int = 5) -> Report:
    """Measure; the child's time runs from its start to the line it prints once the first token is there.

    grown_bytes: anonymous memory (not file-backed) that loading took, KV pool included, seen when it had ended.
    """
    times, grown, kv_bytes = [], [], 0
    for _ in range(num_rounds):
        started_s = time.perf_counter()
        with subprocess.Popen(  # our own interpreter and text
            [sys.executable, "-c", _CHILD, model or ""], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            times.append(time.perf_counter() - started_s)
        if not line:
            raise GiveWayError(f"the measured process ended with code {child.returncode}; its message is above")
        said = json.loads(line)
        grown.append(float(said["grown_bytes"]))
        kv_bytes = said["kv_bytes"]
    start, memory = sample(times), sample(grown)
    row = {
        "start_to_first_token_s": start.median,
        "low_s": start.low,
        "high_s": start.high,
        "grown_mib": memory.median / 2**20,
        "kv_pool_mib": kv_bytes / 2**20,
    }
    return Report("Process start to first token", {"model": model or "embedded", "rounds": num_rounds}, [row])
