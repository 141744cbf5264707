"""`giveway info`."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli


def test_geometry_and_sizes_of_a_model(cli: Cli) -> None:
    result = cli("info", "tiny", "--device", "cpu", "--json", "--num-kv-blocks", 40, "--block-size", 8)
    facts = json.loads(result.out)
    assert (facts["num_layers"], facts["num_kv_heads"], facts["head_size"]) == (2, 2, 16)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert facts["kv_bytes_per_block"] == 8 * facts["kv_bytes_per_token"]
    assert (facts["num_kv_blocks"], facts["num_kv_tokens"], facts["num_host_blocks"]) == (40, 320, 20)
    assert facts["max_model_len"] == 321
    assert facts["weights_bytes"] == 4 * facts["num_parameters"]


def test_the_numbers_are_those_of_the_engine(cli: Cli) -> None:
    from giveway.build import build_engine
    from giveway.options import EngineOptions

    facts = json.loads(cli("info", "tiny", "--device", "cpu", "--json").out)
    built = build_engine(EngineOptions(model="tiny", device="cpu", num_kv_blocks=4, max_model_len=64))
    assert facts["kv_bytes_per_token"] == built.model.backend.kv_bytes_per_token
    assert facts["max_positions"] == built.model.max_positions
    assert facts["dtype"] in built.model.backend.description
    built.engine.close()


def test_the_embedded_model_is_the_default_and_its_weights_are_not_loaded(cli: Cli) -> None:
    result = cli("info", "--device", "cpu", "--kv-cache-memory-bytes", "90MiB")
    assert result.code == 0
    assert "30 layers, 9 heads, 3 KV heads, head size 64, hidden 576, inner 1536" in result.out
    assert "weights, stored  93.8 MiB" in result.out
    assert "blocks that fit  128 (2048 tokens)" in result.out


def test_what_is_not_a_model_is_an_error(cli: Cli) -> None:
    result = cli("info", "no-such-model", "--device", "cpu")
    assert result.code == 1
    assert result.err.startswith("error: model 'no-such-model'")
