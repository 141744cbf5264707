"""Urgent requests while background work fights for memory or seats: GiveWay's server beside vLLM's.

See benchmarks/README.md.

python -m benchmarks.co_serving --python vllm=/path/of/its/python --json co_serving.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import make_report
from benchmarks.unpacked_weights import write_tokenizer, write_unpacked
from giveway.runtime.model_source import embedded_model_path, open_model
from giveway.runtime.native import COMPUTE_TYPES, choose_dtype
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint

ENGINES = ("giveway", "vllm")
_START_TIMEOUT_S = 900.0  # vLLM compiles
_MODEL_NAME = "model"
_MAX_MODEL_LEN = 2048
_URGENT = "rate=0.5,prompt=64,output=32,priority=0"


@dataclass(frozen=True, slots=True)
class Situation:
    """What is short, and how much background work there is."""

    name: str
    num_seats: int
    kv_tokens: int | None  # None: ample
    num_background: int  # requests of 256 + 256 tokens, always so many under way


SITUATIONS = (
    Situation("memory_short", num_seats=32, kv_tokens=8192, num_background=48),
    Situation("seats_short", num_seats=8, kv_tokens=None, num_background=24),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. Returns 1 if an engine failed anywhere, else 0."""
    asked = _parser().parse_args(arguments)
    pythons = {"giveway": sys.executable}
    for text in asked.python:
        name, _, path = text.partition("=")
        if name not in ENGINES or not path:
            raise SystemExit(f"--python {text!r}: write vllm=PATH")
        pythons[name] = path
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the servers are ended too
    with tempfile.TemporaryDirectory(prefix="giveway-co-serving-") as scratch:
        directory = Path(asked.work_dir or scratch)
        model = embedded_model_path()
        write_unpacked(GgufCheckpoint(model), directory / "unpacked")
        write_tokenizer(open_model(None).tokenizer, directory / "unpacked")
        rows = [
            row
            for situation in SITUATIONS
            if situation.name in asked.situations
            for engine in pythons
            for row in _measure(engine, pythons[engine], situation, directory, asked)
        ]
    report = make_report(rows, model=model.name, rounds=1, threads=asked.threads)
    report["settings"]["dtype"] = asked.dtype
    report["settings"]["urgent"] = f"{asked.urgent} arrivals, {_URGENT}"
    print(as_text(report))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["failure"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    names = [situation.name for situation in SITUATIONS]
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.co_serving", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of vLLM's environment")
    add("--situations", nargs="+", choices=names, default=names)
    add("--urgent", type=int, default=100, help="urgent arrivals beside background work (default: 100)")
    add("--idle", type=int, default=30, help="urgent arrivals on an idle server (default: 30)")
    add("--threads", type=int, default=cores, help=f"of every engine (default: all cores, here {cores})")
    add(
        "--dtype",
        choices=tuple(COMPUTE_TYPES),
        default=choose_dtype("auto"),
        help="what every engine computes in (default: what suits this processor, here %(default)s)",
    )
    add("--work-dir", type=Path, metavar="DIR", help="keeps the servers' logs and the unpacked weights")
    add("--json", type=Path, metavar="FILE", help="write machine, settings and rows")
    return parser


def _measure(
    engine: str, python: str, situation: Situation, directory: Path, asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one engine in one situation: idle, then beside background work."""
    background = f"batch:concurrency={situation.num_background},prompt=256,output=256,priority=20"
    port = _free_port()
    try:
        with _server(engine, python, situation, port, directory, asked):
            base = f"http://127.0.0.1:{port}"
            idle = _load(base, directory, [f"urgent:num={asked.idle},{_URGENT}"], seed=1)
            yield from _rows(engine, situation, "idle", idle)
            loaded = _load(base, directory, [f"urgent:num={asked.urgent},start=15,{_URGENT}", background], seed=2)
            yield from _rows(engine, situation, "loaded", loaded)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        yield {"scenario": situation.name, "engine": engine, "phase": "", "class": "", "failure": str(error)[:300]}


def _rows(engine: str, situation: Situation, phase: str, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for values in result["rows"]:
        yield {
            "scenario": situation.name,
            "engine": engine,
            "phase": phase,
            "class": values["class"],
            "ttft_p50": values["ttft_p50"],
            "ttft_p99": values["ttft_p99"],
            "tpot_p50": values["tpot_p50"],
            "errors": values["errors"],
            "completed": values["completed"],
            "output_tok_s": values["output_tok_s"],
            "failure": None,
        }


def _load(base: str, directory: Path, classes: list[str], *, seed: int) -> dict[str, Any]:
    """Run the load generator; return what it measured."""
    output = directory / "load.json"
    command = [sys.executable, "-m", "giveway", "bench", "serve", "--base-url", base, "--model", _MODEL_NAME]
    command += ["--json", str(output), "--seed", str(seed), "--num-warmups", "2", "--disable-tqdm"]
    for each in classes:
        command += ["--class", each]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator ended with code {done.returncode}: {done.stderr[-300:]}")
    found: dict[str, Any] = json.loads(output.read_bytes())
    return found


@contextmanager
def _server(
    engine: str, python: str, situation: Situation, port: int, directory: Path, asked: argparse.Namespace
) -> Iterator[None]:
    """Start an engine's server, wait until it answers, and end it, with whatever it started, at the end."""
    command, environment = _command(engine, python, situation, port, directory, asked)
    with (directory / f"{engine}-{situation.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            _await(process, port)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _command(
    engine: str, python: str, situation: Situation, port: int, directory: Path, asked: argparse.Namespace
) -> tuple[list[str], dict[str, str]]:
    common = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", _MODEL_NAME]
    common += ["--max-num-seqs", str(situation.num_seats), "--max-model-len", str(_MAX_MODEL_LEN)]
    common += ["--dtype", asked.dtype]
    environment = {"OMP_NUM_THREADS": str(asked.threads)}
    if engine == "giveway":
        command = [python, "-m", "giveway", "serve", *common, "--num-threads", str(asked.threads), "--no-batch-api"]
        kv_tokens = situation.kv_tokens or situation.num_seats * _MAX_MODEL_LEN
        return [*command, "--num-kv-blocks", str(kv_tokens // 16)], environment
    cores = sorted(os.sched_getaffinity(0))[: asked.threads]
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory / "unpacked"), *common]
    command += ["--scheduling-policy", "priority", "--block-size", "32"]
    if situation.kv_tokens is not None:
        command += ["--num-gpu-blocks-override", str(situation.kv_tokens // 32)]
    return command, environment


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server answers. Raises RuntimeError when it ends, or takes too long."""
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}; its log is in --work-dir")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {_START_TIMEOUT_S:g} s")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def as_text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    machine = report["machine"]
    lines = [f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, {report['settings']['urgent']}", ""]
    lines.append(
        f"{'situation':14}{'engine':9}{'phase':8}{'class':8}{'TTFT p50':>9}{'p99':>8}{'TPOT p50':>10}{'tok/s':>8}"
        f"{'done':>6}{'errors':>7}"
    )
    for row in report["rows"]:
        if row["failure"]:
            lines.append(f"{row['scenario']:14}{row['engine']:9}{row['failure']}")
            continue
        lines.append(
            f"{row['scenario']:14}{row['engine']:9}{row['phase']:8}{row['class']:8}{_s(row['ttft_p50']):>9}"
            f"{_s(row['ttft_p99']):>8}{_s(row['tpot_p50']):>10}{row['output_tok_s']:>8.1f}{row['completed']:>6}"
            f"{row['errors']:>7}"
        )
    return "\n".join(lines)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


if __name__ == "__main__":
    sys.exit(main())
