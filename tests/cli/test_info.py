"""`giveway info`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.backends import needs_kernels
from tests.cli.conftest import Cli


def test_geometry_and_sizes_of_a_model(cli: Cli) -> None:
    result = cli(
        "info", "tiny", "--device", "cpu", "--backend", "torch", "--json", "--num-kv-blocks", 40, "--block-size", 8
    )
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

    facts = json.loads(cli("info", "tiny", "--device", "cpu", "--backend", "torch", "--json").out)
    built = build_engine(EngineOptions(model="tiny", device="cpu", backend="torch", num_kv_blocks=4, max_model_len=64))
    assert facts["kv_bytes_per_token"] == built.model.backend.kv_bytes_per_token
    assert facts["max_positions"] == built.model.max_positions
    assert facts["dtype"] in built.model.backend.description
    built.engine.close()


def test_the_embedded_model_is_the_default_and_its_weights_are_not_loaded(cli: Cli) -> None:
    result = cli("info", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "90MiB")
    assert result.code == 0
    assert "30 layers, 9 heads, 3 KV heads, head size 64, hidden 576, inner 1536" in result.out
    assert "weights, stored  93.8 MiB" in result.out
    assert "blocks that fit  128 (2048 tokens)" in result.out


def without(*packages: str, arguments: Sequence[str], before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line without some packages, after the code `before`."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"  # importing fails, looking for finds nothing
        f"{before}"
        "from giveway.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


BACKENDS = ("torch", "giveway_kernels")


def test_without_anything_to_compute_with_the_files_say_what_they_say_and_both_remedies_are_named() -> None:
    for arguments, line in ((["info"], "30 layers, 9 heads"), (["info", "tiny"], "2 layers, 4 heads")):
        result = without(*BACKENDS, arguments=arguments)
        assert result.returncode == 0
        assert f"geometry         {line}" in result.stdout
        assert "blocks that fit  " in result.stdout
        assert "backend          none: nothing can compute this model: the native kernels are not inst" in result.stdout
        assert result.stderr.startswith(
            "warning: sizes are those of PyTorch on the CPU: nothing can compute this model"
        )
        assert "`pip install 'giveway[torch]'` (from a clone: `pip install '.[torch]'`)" in result.stderr
        assert "`pip install giveway-kernels` (from a clone: `pip install ./native`)" in result.stderr
        assert result.stderr.count("\n") == 1


def test_without_anything_to_compute_with_the_sizes_that_were_named_are_left() -> None:
    arguments = ["info", "tiny", "--num-kv-blocks", "40", "--dtype", "bfloat16", "--json"]
    facts = json.loads(without(*BACKENDS, arguments=arguments).stdout)
    assert (facts["num_kv_blocks"], facts["num_kv_tokens"], facts["num_host_blocks"]) == (40, 640, 20)
    assert (facts["device"], facts["dtype"], facts["kv_bytes_per_token"]) == ("cpu", "bfloat16", 256)
    assert (facts["backend"], facts["instruction_set"]) == (None, None)


def test_a_missing_torch_does_not_hide_how_many_blocks_fit_by_default(cli: Cli) -> None:
    # Goal: the numbers are those that the CPU would have with it. A fixed amount of memory, because it is read twice.
    memory = "import giveway.runtime.memory as memory; memory.available_bytes = lambda: 10 << 30\n"
    found = json.loads(without(*BACKENDS, arguments=["info", "--json"], before=memory).stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("giveway.runtime.memory.available_bytes", lambda: 10 << 30)
        with_torch = json.loads(cli("info", "--json", "--device", "cpu", "--backend", "torch").out)
    for name in ("backend", "backend_reason"):
        del found[name], with_torch[name]
    assert found == with_torch
    free = (10 << 30) - found["weights_bytes"]
    assert found["num_kv_blocks"] == free // 10 // found["kv_bytes_per_block"]
    assert found["num_host_blocks"] == found["num_kv_blocks"] // 2


def test_a_missing_torch_is_named_when_it_is_needed() -> None:
    for wish in (["--device", "cuda"], ["--backend", "torch"]):
        result = without("torch", arguments=["info", "tiny", *wish])
        assert result.returncode == 1
        assert result.stderr.startswith(
            "error: PyTorch is not installed. Install it with `pip install 'giveway[torch]'`"
        )


@needs_kernels
def test_the_native_backend_is_told_with_its_instruction_set_and_needs_no_torch() -> None:
    result = without("torch", arguments=["info", "--json"])
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["backend"] == "native"
    assert facts["instruction_set"] in ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
    assert facts["backend_reason"] == "installed, and can run this model; PyTorch is not installed"
    # The embedded model's weights are quantized, and stay it.
    assert 0.9 < facts["weights_bytes"] / facts["weights_stored_bytes"] < 1


@needs_kernels
def test_the_numbers_are_those_of_the_native_engine(cli: Cli) -> None:
    from giveway.build import build_engine
    from giveway.options import EngineOptions

    for dtype in ("auto", "float32", "bfloat16"):
        facts = json.loads(cli("info", "tiny", "--device", "cpu", "--dtype", dtype, "--json").out)
        options = EngineOptions(model="tiny", device="cpu", dtype=dtype, num_kv_blocks=4, max_model_len=64)
        backend = build_engine(options).model.backend
        assert facts["kv_bytes_per_token"] == backend.kv_bytes_per_token
        assert f"cpu, {facts['dtype']}, native {facts['instruction_set']} exact" == backend.description
        backend.close()


@needs_kernels
def test_why_the_kernels_are_not_used_is_told(cli: Cli) -> None:
    result = cli("info", "tiny", "--device", "cpu", "--block-size", 8)
    assert "backend          PyTorch, float32: the block size is 8; the native kernels need a multiple of" in result.out


def test_the_dry_run_is_told_as_such_also_without_torch(cli: Cli) -> None:
    result = without(*BACKENDS, arguments=["info", "--device", "dry"])
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
