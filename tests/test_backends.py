"""Which backend is chosen, what is said about it, and what is said when there is none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from giveway.backends import BackendChoice, BackendName, choose_backend, load_backend
from giveway.core.errors import ConfigError, MissingDependencyError
from giveway.options import EngineOptions
from giveway.runtime import native, torch
from giveway.runtime.model_config import ModelConfig
from giveway.runtime.tiny import tiny_checkpoint
from tests.backends import needs_kernels

CPU = EngineOptions(device="cpu")
TINY = tiny_checkpoint().config
ABSENT = "the native kernels are not installed. Install them"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend what is installed: machine(kernels=..., torch=..., cuda=...)."""

    def pretend(*, kernels: bool = True, pytorch: bool = True, cuda: bool = False, slow: bool = False) -> None:
        monkeypatch.setattr(native, "is_slow_here", lambda: slow)
        monkeypatch.setattr(native, "is_installed", lambda: kernels)
        monkeypatch.setattr(native, "missing_reason", lambda: None if kernels else ABSENT)
        monkeypatch.setattr(torch, "is_installed", lambda: pytorch)
        monkeypatch.setattr(torch, "finds_cuda", lambda: cuda)

    return pretend


def chosen(options: EngineOptions, config: ModelConfig = TINY) -> BackendChoice:
    return choose_backend(options, config)


@pytest.mark.parametrize("pytorch", [True, False])
def test_the_kernels_compute_where_they_are_installed_and_can(machine: Any, pytorch: bool) -> None:
    machine(pytorch=pytorch)
    for options in (CPU, EngineOptions(), replace(CPU, exact=False), replace(CPU, dtype="bfloat16", block_size=32)):
        choice = chosen(options)
        assert choice.name is BackendName.NATIVE
        assert ("PyTorch is not installed" in choice.reason) != pytorch


def test_pytorch_computes_where_the_kernels_are_not_installed(machine: Any) -> None:
    machine(kernels=False)
    assert chosen(CPU) == BackendChoice(BackendName.TORCH, ABSENT)


def test_pytorch_computes_on_a_processor_for_which_the_kernels_have_plain_code_only(machine: Any) -> None:
    machine(slow=True)
    assert (chosen(CPU).name, "lacks AVX2" in chosen(CPU).reason) == (BackendName.TORCH, True)
    assert chosen(replace(CPU, backend="native")).name is BackendName.NATIVE
    machine(slow=True, pytorch=False)
    assert chosen(CPU).name is BackendName.NATIVE


def test_pytorch_computes_on_a_gpu_unless_the_cpu_or_the_kernels_are_named(machine: Any) -> None:
    machine(cuda=True)
    assert chosen(EngineOptions()).name is BackendName.TORCH
    assert chosen(EngineOptions(device="cuda")).name is BackendName.TORCH
    assert chosen(CPU).name is BackendName.NATIVE
    assert chosen(EngineOptions(backend="native")).name is BackendName.NATIVE
    with pytest.raises(ConfigError, match="computes on the CPU, but device is 'cuda'"):
        chosen(EngineOptions(backend="native", device="cuda"))


UNSUPPORTED = {
    "head size is 24; .* multiple of 16, at most 256": (CPU, replace(TINY, head_size=24)),
    "head size is 272": (CPU, replace(TINY, head_size=272)),
    "intermediate size is 100": (CPU, replace(TINY, intermediate_size=100)),
    "hidden size is 63; the native kernels need an even one": (CPU, replace(TINY, hidden_size=63)),
    "block size is 8; .* multiple of 16 tokens, such as --block-size 16": (replace(CPU, block_size=8), TINY),
    "dtype is float16; .*: --dtype bfloat16": (replace(CPU, dtype="float16"), TINY),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_kernels_cannot_run_goes_to_pytorch_with_the_reason(machine: Any, reason: str) -> None:
    options, config = UNSUPPORTED[reason]
    machine()
    choice = chosen(options, config)
    assert (choice.name, choice.is_second_best) == (BackendName.TORCH, True)
    with pytest.raises(ConfigError, match=f"backend is 'native', but the {reason}.* Or set --backend torch"):
        chosen(replace(options, backend="native"), config)
    machine(pytorch=False)
    with pytest.raises(MissingDependencyError, match=f"{reason}.*PyTorch is not installed.*giveway\\[torch\\]"):
        chosen(options, config)


def test_what_is_asked_for_by_name_and_absent_is_an_error_with_its_remedy(machine: Any) -> None:
    machine(kernels=False)
    with pytest.raises(MissingDependencyError, match="backend is 'native', but the native kernels are not installed"):
        chosen(replace(CPU, backend="native"))
    assert chosen(replace(CPU, backend="torch")).name is BackendName.TORCH


def test_without_any_backend_both_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as refused:
        chosen(CPU)
    for remedy in (native.INSTALL_KERNELS, torch.PIP_TORCH):
        assert remedy in str(refused.value)
    assert str(refused.value).count("Install") == 1


def test_a_second_best_backend_is_a_warning_and_kernels_that_nobody_installed_are_not(
    machine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load_backend", lambda checkpoint, **settings: settings)

    def said(options: EngineOptions) -> list[tuple[int, str]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="giveway"):
            load_backend(options, tiny_checkpoint())
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    machine()
    ((level, text),) = said(replace(CPU, block_size=8))
    assert level == logging.WARNING
    assert text.startswith("PyTorch computes, not the native kernels: the block size is 8; ")
    assert said(replace(CPU, block_size=8, backend="torch")) == []
    machine(kernels=False)
    assert said(CPU) == [(logging.INFO, f"PyTorch computes, not the native kernels: {ABSENT}")]


def test_an_unknown_backend_is_refused() -> None:
    from giveway.build import build_engine

    with pytest.raises(ConfigError, match="backend is 'cuda'; it must be one of auto, native, torch"):
        build_engine(EngineOptions(backend="cuda"))


def test_the_driver_of_a_gpu_is_looked_for_before_pytorch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("giveway.runtime.torch.settings.has_cuda", lambda: True)
    monkeypatch.setattr(torch, "_DRIVERS", (str(tmp_path / "absent"),))
    assert not torch.finds_cuda()
    monkeypatch.setattr(torch, "_DRIVERS", (str(tmp_path / "absent"), str(tmp_path)))
    assert torch.finds_cuda()
    monkeypatch.setattr(torch, "is_installed", lambda: False)
    assert not torch.finds_cuda()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_kernels_that_cannot_be_loaded_are_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "giveway_kernels").mkdir()
    (tmp_path / "giveway_kernels" / "__init__.py").write_text("raise ImportError('libgomp.so.1 is missing')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from giveway.runtime import native; print(native.is_installed(), native.missing_reason())"
    )
    assert run(code).stdout.startswith(
        "True the native kernels are installed but cannot be loaded (libgomp.so.1 is missing). Install them with `pip"
    )


@needs_kernels
def test_an_instruction_set_that_cannot_run_here_is_told_as_such() -> None:
    code = "from giveway.runtime import native; print(native.missing_reason())"
    assert run(code, GIVEWAY_KERNELS_ISA="none").stdout.startswith("GIVEWAY_KERNELS_ISA names what cannot run here: ")
    for name in ("scalar", "Scalar", ""):
        assert run(code, GIVEWAY_KERNELS_ISA=name).stdout == "None\n"


@needs_kernels
def test_a_forced_instruction_set_that_cannot_run_here_does_not_move_the_model_to_pytorch() -> None:
    code = "from giveway.cli.__main__ import main; raise SystemExit(main(['generate', '-m', 'tiny', 'Hello']))"
    done = run(code, GIVEWAY_KERNELS_ISA="sse")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: GIVEWAY_KERNELS_ISA names what cannot run here: no instruction set is called")
    assert done.stderr.endswith("Or set --backend torch.\n")


def test_without_the_kernels_a_forced_instruction_set_stops_nobody(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Goal: the same environment serves machines with a compiler and without.
    monkeypatch.setenv("GIVEWAY_KERNELS_ISA", "avx2")
    machine(kernels=False)
    assert chosen(CPU).name is BackendName.TORCH


@needs_kernels
def test_the_native_backend_is_loaded_with_its_settings() -> None:
    for dtype in ("float32", "bfloat16"):
        backend = load_backend(replace(CPU, dtype=dtype, num_threads=1, exact=False), tiny_checkpoint())
        assert backend.description.startswith(f"cpu, {dtype}, native ")
        assert backend.is_exact  # whatever was asked for
        backend.close()
    with pytest.raises(ConfigError, match="num_threads is 0; it must be from 1 to 1024"):
        load_backend(replace(CPU, num_threads=0), tiny_checkpoint())
    with pytest.raises(ConfigError, match="dtype is 'float16'; the native kernels compute in"):
        native.choose_dtype("float16")
