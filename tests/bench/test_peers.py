"""The comparison with other engines, with engines that speak the protocol and compute nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.comparison import Comparison, Setup
from benchmarks.engine_process import Engine
from benchmarks.peers import as_text, chosen_engines, instruction_sets, make_report
from benchmarks.scenarios import SCENARIOS, Scenario, limits_for
from benchmarks.unpacked_weights import write_unpacked
from benchmarks.workers.giveway import GiveWayWorker
from benchmarks.workers.protocol import Limits, Model, Request
from giveway.runtime.weights.checkpoint import Encoding
from giveway.runtime.weights.dequantize import dequantize
from giveway.runtime.weights.gguf_checkpoint import GgufCheckpoint
from giveway.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.checkpoints import write_gguf_checkpoint, write_hf_checkpoint

NOWHERE = Model(gguf="none.gguf", directory="none")
WARM_UP_S = 99.0


def scenario(name: str) -> Scenario:
    return next(each for each in SCENARIOS if each.name == name)


def fake(name: str, *, is_peer: bool = True, **options: Any) -> Engine:
    return Engine(name, "tests.bench.fake_worker", sys.executable, options, is_peer)


def compare(
    tmp_path: Path, engines: list[Engine], *names: str, rounds: int = 3, timeout_s: float = 60.0
) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by scenario and engine."""
    setup = Setup(NOWHERE, kv_bytes_per_token=4, threads=1, rounds=rounds, timeout_s=timeout_s, directory=tmp_path)
    rows = Comparison(engines, [scenario(name) for name in names], setup, lambda _: None).run()
    return {(row["scenario"], row["engine"]): row for row in rows}


def test_figures_are_medians_of_the_rounds_without_the_warm_up_beside_the_best_peer(tmp_path: Path) -> None:
    engines = [
        fake("ours", is_peer=False, seconds=[WARM_UP_S, 1.0, 1.0, 1.0]),
        fake("slow", seconds=[WARM_UP_S, 8.0, 8.0, 8.0]),
        fake("best", seconds=[WARM_UP_S, 2.0, 4.0, 3.0]),
    ]
    rows = compare(tmp_path, engines, "batch")
    prompt, output = scenario("batch").num_prompt_tokens, scenario("batch").num_output_tokens
    best = rows["batch", "best"]
    assert best["output_tok_s"] == pytest.approx(output / 3)
    assert best["total_tok_s"] == pytest.approx((prompt + output) / 3)
    assert best["spread_pct"] == pytest.approx(100 * (1 / 2 - 1 / 4) / 2 / (1 / 3))
    assert best["rounds"] == 3
    assert best["cpu_s"] == 0.5
    assert best["version"] == "1.0"
    assert rows["batch", "ours"]["ratio_to_best_peer"] == pytest.approx(3.0)
    assert best["ratio_to_best_peer"] == pytest.approx(1.0)
    assert rows["batch", "slow"]["ratio_to_best_peer"] == pytest.approx(3 / 8)


def test_the_first_token_is_not_counted_when_decoding_is_measured_and_alone_when_prefilling_is(tmp_path: Path) -> None:
    rows = compare(tmp_path, [fake("one", seconds=[1.25])], "one_stream", "prefill_512")
    assert rows["one_stream", "one"]["output_tok_s"] == pytest.approx(127.0)  # in the second after 0.25 s
    assert rows["prefill_512", "one"]["prompt_tok_s"] == pytest.approx(512 / 0.25)


def test_a_crash_midway_is_told_with_its_cause_and_costs_the_others_and_later_scenarios_nothing(tmp_path: Path) -> None:
    engines = [fake("steady"), fake("frail", crash_at=3)]
    rows = compare(tmp_path, engines, "batch", "one_stream", rounds=2)
    frail = rows["batch", "frail"]
    assert frail["failure"].startswith("round 2: the process ended with code 1")
    assert "crashed as told" in frail["failure"]
    assert frail["rounds"] == 1
    assert rows["batch", "steady"]["failure"] is None
    assert rows["batch", "steady"]["rounds"] == 2
    assert rows["one_stream", "frail"]["rounds"] == 1  # it was started again, and got as far again


def test_what_an_engine_cannot_do_has_a_reason_and_no_figure(tmp_path: Path) -> None:
    engines = [fake("able"), fake("unable", unable="no such thing"), fake("unloadable", cannot_load="no such format")]
    rows = compare(tmp_path, engines, "batch", "start", rounds=1)
    assert rows["batch", "unable"]["failure"] == "warm-up: no such thing"
    assert rows["start", "unloadable"]["failure"] == "warm-up: cannot be loaded: no such format"
    for name in ("unable", "unloadable"):
        row = rows["batch", name]
        assert row["output_tok_s"] is row["seconds"] is row["ratio_to_best_peer"] is row["spread_pct"] is None


def test_an_interpreter_that_is_not_there_is_told(tmp_path: Path) -> None:
    rows = compare(tmp_path, [replace(fake("absent"), python="/nowhere/python")], "batch", rounds=1)
    assert "/nowhere/python cannot be started" in rows["batch", "absent"]["failure"]


def test_outputs_of_a_wrong_length_are_not_measured(tmp_path: Path) -> None:
    rows = compare(tmp_path, [fake("hasty", short_at=2)], "one_stream", rounds=1)
    assert rows["one_stream", "hasty"]["failure"] == (
        "round 1: 1 of 1 outputs have a wrong length, the first 127 tokens instead of 128"
    )
    assert rows["one_stream", "hasty"]["output_tok_s"] is None


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    rows = compare(tmp_path, [fake("silent", hang_at=1)], "one_stream", rounds=1, timeout_s=3.0)
    assert "no answer in 3 s" in rows["one_stream", "silent"]["failure"]


def test_a_start_is_measured_in_a_fresh_process_every_round(tmp_path: Path) -> None:
    # Goal: an engine whose second run crashes never has one, and the seconds are not those it claims.
    rows = compare(tmp_path, [fake("frail", crash_at=2, seconds=[WARM_UP_S])], "start", rounds=2)
    assert rows["start", "frail"]["failure"] is None
    assert rows["start", "frail"]["rounds"] == 2
    assert 0 < rows["start", "frail"]["seconds"] != WARM_UP_S


def test_first_tokens_are_compared_with_those_of_the_first_engine(tmp_path: Path) -> None:
    rows = compare(tmp_path, [fake("ours", is_peer=False), fake("same"), fake("other", token=1)], "batch", rounds=1)
    assert [rows["batch", name]["same_first_token_pct"] for name in ("ours", "same", "other")] == [100, 100, 0]


def test_requests_have_the_same_lengths_and_other_tokens_in_every_round() -> None:
    first, second = scenario("batch").requests(1), scenario("batch").requests(2)
    assert first == scenario("batch").requests(1)
    assert [len(each.prompt) for each in first] == [len(each.prompt) for each in second]
    assert not any(a.prompt[:4] == b.prompt[:4] for a, b in zip(first, second, strict=True))
    assert len(first) == 64
    assert all(100 <= len(each.prompt) <= 512 and 64 <= each.max_tokens <= 192 for each in first)


def test_every_engine_has_room_for_all_requests_at_once() -> None:
    for each in SCENARIOS:
        limits = limits_for(each, threads=2, kv_bytes_per_token=8)
        assert limits.num_seqs == len(each.lengths)
        assert limits.kv_tokens >= each.num_prompt_tokens + each.num_output_tokens
        assert limits.kv_bytes == 8 * limits.kv_tokens
        assert limits.max_model_len >= max(length.prompt + length.output for length in each.lengths)


def test_the_report_can_be_written_as_json_and_says_why_an_engine_has_no_figure(tmp_path: Path) -> None:
    rows = compare(tmp_path, [fake("able"), fake("unable", unable="no such thing")], "batch", rounds=1)
    report = json.loads(json.dumps(make_report(list(rows.values()), model="model.gguf", rounds=1, threads=1)))
    wanted = {"scenario", "engine", "version", "settings", "output_tok_s", "total_tok_s", "rounds", "spread_pct"}
    assert all(wanted <= row.keys() for row in report["rows"])
    text = as_text(report)
    assert "batch, unable: warm-up: no such thing" in text
    assert "able 1.0: {'threads': 1}" in text


def test_engines_are_chosen_by_name_and_label_with_options_of_their_own() -> None:
    engines = chosen_engines(
        ["giveway", "giveway:small", "vllm"],
        ["vllm=/env/python"],
        ["giveway:small.block_size=8", "giveway.dtype=bfloat16"],
        own_python="/own/python",
    )
    assert [engine.name for engine in engines] == ["giveway", "giveway:small", "vllm"]
    assert [engine.options for engine in engines] == [{"dtype": "bfloat16"}, {"block_size": 8}, {}]
    assert [engine.is_peer for engine in engines] == [False, False, True]
    assert [engine.python for engine in engines] == ["/own/python", "/own/python", "/env/python"]
    assert [engine.name for engine in chosen_engines(None, ["openvino=/env/python"], [])] == ["giveway", "openvino"]


@pytest.mark.parametrize(
    ("names", "pythons", "options"),
    [(["vllm"], [], []), (None, ["vlm=/env/python"], []), (None, ["vllm"], []), (None, [], ["vllm.dtype=float32"])],
)
def test_an_engine_that_cannot_be_started_as_written_is_refused(
    names: list[str] | None, pythons: list[str], options: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"ENGINE|interpreter"):
        chosen_engines(names, pythons, options)


def test_only_instruction_sets_that_engines_use_are_named(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu sse avx2 fma amx_bf16\n")
    assert instruction_sets(cpuinfo) == ["avx2", "fma", "amx_bf16"]
    assert instruction_sets(tmp_path / "none") == []


@pytest.mark.parametrize("encoding", [Encoding.Q4_1, Encoding.Q8_0])
def test_unpacked_weights_are_those_of_the_file_to_the_bit(tmp_path: Path, encoding: Encoding) -> None:
    hf = write_hf_checkpoint(tmp_path / "hf", "llama", tied=True)
    packed = GgufCheckpoint(write_gguf_checkpoint(hf, tmp_path / "m.gguf", encoding=encoding))
    write_unpacked(packed, tmp_path / "unpacked")
    unpacked = SafetensorsCheckpoint(tmp_path / "unpacked")
    assert unpacked.config == replace(packed.config, dtype="float32")
    for name in packed.config.tensor_shapes():
        np.testing.assert_array_equal(dequantize(unpacked.tensor(name)), dequantize(packed.tensor(name)))


def test_what_is_no_plain_llama_is_not_unpacked(tmp_path: Path) -> None:
    hf = write_hf_checkpoint(tmp_path / "hf", "qwen2", tied=True)
    packed = GgufCheckpoint(write_gguf_checkpoint(hf, tmp_path / "m.gguf", encoding=Encoding.Q8_0))
    with pytest.raises(ValueError, match="plain Llama"):
        write_unpacked(packed, tmp_path / "unpacked")


def test_the_worker_of_this_engine_answers_with_the_tokens_asked_for() -> None:
    worker = GiveWayWorker()
    limits = Limits(threads=1, num_seqs=4, kv_tokens=512, kv_bytes=0, max_model_len=128)
    loaded = worker.load(NOWHERE, limits, {"model": "tiny", "device": "cpu"})
    finished = worker.run([Request([5, 6, 7], 4), Request([8, 9], 1)])
    assert [len(output) for output in finished.token_ids] == [4, 1]
    assert 0 < finished.first_token_s <= finished.seconds
    assert loaded.settings["num_kv_blocks"] == 32
