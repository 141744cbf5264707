"""Every operation of the kernels has a row with its floor; what cannot be measured is refused before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from giveway.bench import kernel_floors
from giveway.bench.kernel_floors import SMOLLM2_135M, Cost, Peaks
from giveway.cli.__main__ import main

pytest.importorskip("giveway_kernels", reason="giveway-kernels is not installed: `make kernels` builds it")

from giveway.bench import kernels
from giveway.bench.kernels import Setting, Sizes, bench_kernels, choose_setting, last_cache_bytes
from giveway.bench.random_decoder import Batch, RandomDecoder
from giveway.core.errors import ConfigError
from giveway.runtime.model_config import ModelConfig

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=16,
    max_positions=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
TINY = Sizes(
    shape=SHAPE,
    row_counts=(1, 8),
    head_row_counts=(1,),
    contexts=(40,),
    batches=(Batch(1, 1, 20), Batch(3, 1, 17), Batch(1, 33, 33)),
    moved_rows=32,
    measured_s=1e-5,
    large_bytes=1 << 20,
)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_every_operation_is_measured_beside_its_floor(compute: str) -> None:
    report = bench_kernels(Setting("scalar", compute, num_threads=2), sizes=TINY, num_rounds=2)
    encodings = ["q4_1", "bf16", "f32"] if compute == "f32" else ["q4_1", "bf16"]
    products = ["qkv 160x64", "output 64x96", "gate, up 192x64", "down 64x96"]
    heads = [("head 64x64", encoding, 1) for encoding in ["q8_0", *encodings[1:]]]
    assert [(row["operation"], row["stored_as"], row["rows"]) for row in report.rows] == [
        *((name, encoding, rows) for encoding in encodings for name in products for rows in (1, 8)),
        *heads,
        ("attention, decode, 40", compute, report.rows[-8]["rows"]),
        ("attention, prefill, 40", compute, 40),
        ("norm", "f32", 32),
        ("rotate, store KV", compute, 32),
        ("copy of 32 blocks", compute, 512),
        ("whole step, decode, batch 1", "q4_1, q8_0", 1),
        ("whole step, decode, batch 3", "q4_1, q8_0", 3),
        ("whole step, prefill of 33", "q4_1, q8_0", 33),
    ]
    for row in report.rows:
        assert row["us"] > 0
        assert row["share_pct"] > 0
        assert row["floor_is"] in ("reading", "arithmetic")
    assert all(row["tok_s"] > 0 for row in report.rows[-3:])
    assert report.settings["read_peak_gb_s"] >= 0
    assert (report.settings["isa"], report.settings["threads"]) == ("scalar", 2)


def test_a_floor_is_the_longer_of_reading_and_arithmetic() -> None:
    peaks = Peaks(read_bytes_s=10.0, operations_s=100.0)
    assert Cost(20, 100).floor_s(peaks) == 2.0
    assert Cost(20, 100).is_reading(peaks)
    assert Cost(20, 400).floor_s(peaks) == 4.0
    assert not Cost(20, 400).is_reading(peaks)


def test_what_operations_need_is_counted_by_hand() -> None:
    cost = kernel_floors.product_cost(num_rows=3, num_outputs=5, num_inputs=7, weight_bytes=140)
    assert cost == Cost(140, 2 * 3 * 5 * 7)
    # Three queries at positions 3, 4 and 5 see 4 + 5 + 6 positions; each pair is a product over the head, twice.
    cost = kernel_floors.attention_cost(SHAPE, num_rows=3, context=6, element_bytes=2)
    assert cost == Cost(6 * 2 * 2 * 16 * 2, (4 + 5 + 6) * 6 * 16 * 2 * 2)
    assert SMOLLM2_135M.qkv_columns == 960
    assert kernel_floors.norm_cost(num_rows=2, size=10, element_bytes=4) == Cost(160, 80)
    assert kernel_floors.copy_cost(100) == Cost(200, 0)


def test_the_bytes_of_a_step_are_its_weights_and_its_kv() -> None:
    decoder = RandomDecoder(SHAPE, TINY.batches, compute="f32", isa="scalar", num_threads=1)
    costs = decoder.costs(Batch(3, 1, 17))
    layer_weights = (160 * 64 + 192 * 64 + 2 * 64 * 96) * 20 // 32
    head, kv_layer = 64 * 64 * 34 // 32, 3 * 17 * 2 * 2 * 16 * 4
    assert sum(cost.num_bytes for cost in costs) == 2 * (layer_weights + kv_layer) + head


def test_the_default_is_the_fastest_set_with_the_type_that_suits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "instruction_sets", lambda: [("scalar", ""), ("avx512", ""), ("amx", "no tiles")])
    assert choose_setting(num_threads=2) == Setting("avx512", "f32", 2)
    assert choose_setting(isa="Scalar", dtype="bfloat16", num_threads=1) == Setting("scalar", "bf16", 1)
    with pytest.raises(ConfigError, match=r"isa is 'amx': no tiles\. This machine runs scalar, avx512"):
        choose_setting(isa="amx", num_threads=1)
    with pytest.raises(ConfigError, match="isa is 'mmx': there is no such instruction set"):
        choose_setting(isa="mmx", num_threads=1)
    with pytest.raises(ConfigError, match="dtype is 'float16'"):
        choose_setting(dtype="float16", num_threads=1)
    with pytest.raises(ConfigError, match="num_threads is 0"):
        choose_setting(num_threads=0)


def test_the_last_cache_is_what_the_system_says(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == 32 << 20
    for number, text in enumerate(("32K\n", "512K\n", "16384K\n", "?\n")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(text)
    assert last_cache_bytes(tmp_path) == 16 << 20


def test_the_command_writes_the_rows_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "QUICK", TINY)
    target = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--quick", "--isa", "scalar", "--num-threads", "1", "--json", str(target)]
    assert main(arguments) == 0
    content: dict[str, Any] = json.loads(target.read_text())
    assert content["settings"]["isa"] == "scalar"
    assert content["rows"][0]["operation"] == "qkv 160x64"
    assert "share_pct" in capsys.readouterr().out


def test_no_thread_at_all_is_not_taken_for_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--quick", "--num-threads", "0"]) != 0
    assert "num_threads is 0; it must be from 1 to 1024" in capsys.readouterr().err


def test_without_the_kernels_the_command_says_how_to_get_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "giveway_kernels", None)
    assert main(["bench", "kernels"]) != 0
    assert "pip install giveway-kernels" in capsys.readouterr().err
