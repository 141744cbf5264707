"""Process start to first token, and the memory that the weights take on the way: a fresh process every time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

from giveway.bench.measure import Report, sample
from giveway.cli.model_facts import model_facts
from giveway.core.errors import GiveWayError
from giveway.options import EngineOptions

_CHILD = """
import json, sys, threading
from importlib import import_module
def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
from giveway.build import build_on, load_model
from giveway.core.sampling import SamplingParams
from giveway.options import EngineOptions
model, backend, dtype = sys.argv[1:]
import_module(f"giveway.runtime.{backend}.backend")
options = EngineOptions(
    model=model or None, device="cpu", backend=backend, dtype=dtype, num_kv_blocks=64, swap_space=0, max_model_len=1000
)
before, peak, loaded = anonymous_bytes(), 0, threading.Event()
def watch():
    global peak
    while not loaded.wait(0.004):
        peak = max(peak, anonymous_bytes())
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(options)
peak = max(peak, anonymous_bytes())
loaded.set()
watcher.join()
engine = build_on(model, options).engine
engine.submit("Hello", SamplingParams(temperature=0, max_tokens=1))
while engine.has_work:
    engine.step()
print(json.dumps({"peak_bytes": peak - before}), flush=True)
"""


def bench_start(options: EngineOptions, *, num_rounds: int = 5) -> Report:
    """Measure model, backend and dtype of `options` on the CPU.

    start_to_serving_s: from the start of `giveway serve` to the first line that it prints, when it takes requests.
    start_to_first_token_s: from the start of the child to the line that it prints once the first token is there.
    loading_peak_mib: the most anonymous memory (not file-backed) that the process held while loading, above what it
    held before, sampled every 4 ms. weights_mib: the parameters as the backend keeps them.
    """
    facts = model_facts(replace(options, device="cpu"))
    arguments = [options.model or "", str(facts["backend"]), str(facts["dtype"])]
    times, peaks = [], []
    for _ in range(num_rounds):
        started_s = time.perf_counter()
        with subprocess.Popen(  # our own interpreter and text
            [sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            times.append(time.perf_counter() - started_s)
        if not line:
            raise GiveWayError(f"the measured process ended with code {child.returncode}; its message is above")
        peaks.append(json.loads(line)["peak_bytes"] / 2**20)
    serving = sample([_start_to_serving_s(arguments) for _ in range(num_rounds)])
    start, weights_mib = sample(times), facts["weights_bytes"] / 2**20
    settings = {
        "model": facts["model"],
        "backend": facts["backend"],
        "instruction_set": facts["instruction_set"],
        "dtype": facts["dtype"],
        "rounds": num_rounds,
    }
    row = {
        "start_to_first_token_s": start.median,
        "low_s": start.low,
        "high_s": start.high,
        "start_to_serving_s": serving.median,
        "serving_low_s": serving.low,
        "serving_high_s": serving.high,
        "weights_mib": weights_mib,
        "loading_peak_mib": sample(peaks).median,
        "peak_over_weights": sample(peaks).median / weights_mib,
    }
    return Report("Process start to first token", settings, [row])


def _start_to_serving_s(arguments: list[str]) -> float:
    model, backend, dtype = arguments
    command = [sys.executable, "-m", "giveway", "serve", "--port", "0", "--no-batch-api", "--device", "cpu"]
    command += ["--backend", backend, "--dtype", dtype, *(["--model", model] if model else [])]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        seconds = time.perf_counter() - started_s
        server.terminate()
    if not line:
        raise GiveWayError(f"`giveway serve` ended with code {server.returncode} before it served")
    return seconds
