"""`giveway info`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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


def without_torch(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line without PyTorch, after the code `before`."""
    code = (
        'import sys; sys.modules["torch"] = None\n'  # importing it fails, and looking for it finds nothing
        f"{before}"
        "from giveway.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_missing_torch_does_not_hide_what_the_files_say() -> None:
    for arguments, line in ((("info",), "30 layers, 9 heads"), (("info", "tiny"), "2 layers, 4 heads")):
        result = without_torch(*arguments)
        assert result.returncode == 0
        assert f"geometry         {line}" in result.stdout
        assert "blocks that fit  " in result.stdout
        assert result.stderr.startswith("warning: PyTorch is not installed: ")
        assert "`pip install 'giveway[torch]'` (from a clone: `pip install '.[torch]'`)" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_missing_torch_leaves_the_sizes_that_were_named() -> None:
    result = without_torch("info", "tiny", "--num-kv-blocks", "40", "--dtype", "bfloat16", "--json")
    facts = json.loads(result.stdout)
    assert (facts["num_kv_blocks"], facts["num_kv_tokens"], facts["num_host_blocks"]) == (40, 640, 20)
    assert (facts["device"], facts["dtype"], facts["kv_bytes_per_token"]) == ("cpu", "bfloat16", 256)


def test_a_missing_torch_does_not_hide_how_many_blocks_fit_by_default(cli: Cli) -> None:
    # Goal: the numbers are those that the CPU would have with it. A fixed amount of memory, because it is read twice.
    memory = "import giveway.runtime.memory as memory; memory.available_bytes = lambda: 10 << 30\n"
    without = json.loads(without_torch("info", "--json", before=memory).stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("giveway.runtime.memory.available_bytes", lambda: 10 << 30)
        assert without == json.loads(cli("info", "--json", "--device", "cpu").out)
    free = (10 << 30) - without["weights_bytes"]
    assert without["num_kv_blocks"] == free // 10 // without["kv_bytes_per_block"]
    assert without["num_host_blocks"] == without["num_kv_blocks"] // 2


def test_a_missing_torch_is_named_when_cuda_is_asked_about() -> None:
    result = without_torch("info", "tiny", "--device", "cuda")
    assert result.returncode == 1
    assert result.stderr.startswith("error: device is 'cuda', and only PyTorch can tell what it has. Install it with")


def test_the_dry_run_is_told_as_such_also_without_torch(cli: Cli) -> None:
    result = without_torch("info", "--device", "dry")
    assert (result.returncode, result.stderr) == (0, "")
    assert "none: this is the dry run, which schedules without weights; its text means nothing" in result.stdout
    assert "blocks that fit  512 (8192 tokens)" in result.stdout
    dry, tiny = (json.loads(cli("info", "tiny", "--json", "--device", device).out) for device in ("dry", "cpu"))
    assert list(dry) == list(tiny)
    assert (dry["model"], dry["architecture"], dry["device"]) == ("dry run", None, "dry")


def test_what_is_not_a_model_is_an_error(cli: Cli) -> None:
    result = cli("info", "no-such-model", "--device", "cpu")
    assert result.code == 1
    assert result.err.startswith("error: model 'no-such-model'")
