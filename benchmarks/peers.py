"""GiveWay beside other engines: the same weights, the same requests, in turns. See benchmarks/README.md.

python -m benchmarks.peers --python llama_cpp=/path/of/its/python --python openvino=... --json peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.comparison import Comparison, Setup
from benchmarks.engine_process import Engine
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.unpacked_weights import write_unpacked
from benchmarks.workers.protocol import Model
from giveway.bench.measure import describe_machine
from giveway.runtime.model_source import embedded_model_path
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint

GIVEWAY = "giveway"
PEERS = ("llama_cpp", "openvino", "transformers", "vllm")
_FLOAT32 = 4  # bytes
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison that the command line asks for. Returns 1 if an engine failed anywhere, else 0."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        engines = chosen_engines(asked.engines, asked.python, asked.option)
    except ValueError as error:
        parser.error(str(error))
    asked.model = asked.model or embedded_model_path()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the workers are ended too
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in asked.scenarios]
    with tempfile.TemporaryDirectory(prefix="giveway-peers-") as scratch:
        directory = Path(asked.work_dir or scratch)
        rows = _measure(engines, scenarios, directory, asked)
    report = make_report(rows, model=asked.model.name, rounds=asked.rounds, threads=asked.threads)
    print(as_text(report))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["failure"] for row in rows))


def _measure(
    engines: Sequence[Engine], scenarios: Sequence[Scenario], directory: Path, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    checkpoint = GgufCheckpoint(asked.model)
    unpacked = directory / "unpacked"
    write_unpacked(checkpoint, unpacked)
    setup = Setup(
        model=Model(gguf=str(asked.model.resolve()), directory=str(unpacked.resolve())),
        kv_bytes_per_token=checkpoint.config.kv_bytes_per_token(_FLOAT32),
        threads=asked.threads,
        rounds=asked.rounds,
        timeout_s=asked.timeout,
        directory=directory,
    )
    return Comparison(engines, scenarios, setup, lambda line: print(line, file=sys.stderr, flush=True)).run()


def _parser() -> argparse.ArgumentParser:
    names = [scenario.name for scenario in SCENARIOS]
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--engines", nargs="+", metavar="ENGINE", help="default: giveway and all that --python names; see the README")
    add("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine's environment")
    add("--option", action="append", default=[], metavar="ENGINE.KEY=VALUE", help="a setting of one engine")
    add("--scenarios", nargs="+", choices=names, default=names)
    add("--rounds", type=int, default=5, help="after one warm-up (default: 5)")
    add("--threads", type=int, default=cores, help=f"of every engine (default: all cores, here {cores})")
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of one load or run (default: 1800)")
    add("--model", type=Path, default=None, metavar="GGUF", help="default: the embedded SmolLM2-135M-Instruct")
    add("--work-dir", type=Path, metavar="DIR", help="keeps the engines' logs and the unpacked weights")
    add("--json", type=Path, metavar="FILE", help="write machine, settings and rows")
    return parser


def chosen_engines(
    names: Sequence[str] | None, pythons: Sequence[str], options: Sequence[str], own_python: str = sys.executable
) -> list[Engine]:
    """Return the contestants.

    names: "engine" or "engine:label", so that one engine can take part with several settings; None: GiveWay and all
    that have an interpreter. pythons: "engine=path". options: "engine.key=value" or "engine:label.key=value", the value
    JSON or text. Raises ValueError.
    """
    found = {GIVEWAY: own_python}
    for text in pythons:
        name, _, path = text.partition("=")
        if name not in (GIVEWAY, *PEERS) or not path:
            raise ValueError(f"--python {text!r}: write ENGINE=PATH with one of {', '.join((GIVEWAY, *PEERS))}")
        found[name] = path
    engines = {name: _engine(name, found) for name in names or found}
    for text in options:
        left, _, value = text.partition("=")
        name, _, key = left.partition(".")
        if name not in engines or not key:
            raise ValueError(f"--option {text!r}: write ENGINE.KEY=VALUE with one of {', '.join(engines)}")
        engines[name].options[key] = _value(value)
    return list(engines.values())


def _engine(name: str, pythons: dict[str, str]) -> Engine:
    kind = name.partition(":")[0]
    if kind not in pythons:
        raise ValueError(f"engine {name!r} needs its interpreter: --python {kind}=PATH")
    return Engine(name, f"benchmarks.workers.{kind}", pythons[kind], {}, is_peer=kind != GIVEWAY)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def make_report(rows: list[dict[str, Any]], *, model: str, rounds: int, threads: int) -> dict[str, Any]:
    """Return what --json writes: the rows, and what they were measured on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**describe_machine(), "instruction_sets": instruction_sets()},
        "settings": {"model": model, "rounds": rounds, "threads": threads},
        "rows": rows,
    }


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return those of this processor that matter to the engines; empty where the system does not say."""
    if not cpuinfo.exists():
        return []
    lines = cpuinfo.read_text(errors="replace").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [feature for feature in _FEATURES if feature in flags]


def as_text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    machine = report["machine"]
    lines = [
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, {' '.join(machine['instruction_sets'])}",
        f"{report['settings']['model']}, {report['settings']['threads']} threads, medians of the rounds; spread: half "
        "the distance between lowest and highest",
        "",
    ]
    heads = [
        "scenario",
        "engine",
        "output tok/s",
        "prompt tok/s",
        "total tok/s",
        "seconds",
        "cpu s",
        "spread",
        "rounds",
    ]
    heads += ["x best peer", "same 1st token"]
    lines += _aligned([heads, *(_cells(row) for row in report["rows"])])
    failed = [f"{row['scenario']}, {row['engine']}: {row['failure']}" for row in report["rows"] if row["failure"]]
    settings = {row["engine"]: f"{row['engine']} {row['version']}: {row['settings']}" for row in report["rows"]}
    return "\n".join([*lines, "", *failed, *([""] if failed else []), *settings.values()])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["scenario"],
        row["engine"],
        *(_number(row[name]) for name in ("output_tok_s", "prompt_tok_s", "total_tok_s")),
        *(_number(row[name], digits=2) for name in ("seconds", "cpu_s")),
        _number(row["spread_pct"], digits=1, unit=" %"),
        str(row["rounds"]),
        _number(row["ratio_to_best_peer"], digits=2),
        _number(row["same_first_token_pct"], digits=0, unit=" %"),
    ]


def _number(value: float | None, *, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


if __name__ == "__main__":
    sys.exit(main())
