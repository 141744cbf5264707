"""Who may import whom: the five rules of the design as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "giveway"

# Each file of the core imports only files to its left.
# fmt: off
CORE_ORDER = [
    "ids", "errors", "strict_json", "sampling", "constraint", "config", "request", "commands", "limits",
    "block_pool", "prefix_index", "kv_cache", "kv_draft",
    "plan", "isolation", "events", "executor", "tokenizing", "policy", "cost_profile", "cost_learner",
    "cost_model", "state", "budget",
    "displacement", "planner",
    "invariants", "transitions", "scheduler",
]
# fmt: on

# What each package may import of GiveWay, besides itself. Everything that is not listed is forbidden.
MAY_IMPORT = {
    "core": set[str](),
    "engine": {"core"},
    "runtime": {"core"},
    "sim": {"core", "engine"},
    "server": {"core", "engine"},
}

PURE = ("core", "engine", "sim")  # standard library only


def files_of(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, also inside functions; relative imports are resolved."""
    package = path.relative_to(SRC).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            if module in ("giveway", "giveway.core"):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def test_the_core_imports_the_standard_library_and_itself_in_the_order_of_its_files() -> None:
    # Goal: a reader who goes through the files in this order never meets an unknown name.
    names = [path.stem for path in files_of("core") if path.stem != "__init__"]
    assert sorted(names) == sorted(CORE_ORDER), "a file is new or gone: give it its place in the order"
    for path in files_of("core"):
        place = CORE_ORDER.index(path.stem) if path.stem in CORE_ORDER else 0
        for module in imports_of(path):
            if module.startswith("giveway."):
                assert module.split(".")[:2] == ["giveway", "core"], f"{path.name} imports {module}"
                assert module.split(".")[2] in CORE_ORDER[:place], f"{path.name} imports {module}, which comes later"
            else:
                assert is_standard(module), f"{path.name} imports {module}"


def test_the_core_has_no_clock_no_randomness_and_no_input_or_output() -> None:
    forbidden = {"time", "datetime", "random", "secrets", "os", "io", "pathlib", "socket", "threading", "asyncio"}
    for path in files_of("core"):
        found = {module.split(".")[0] for module in imports_of(path)} & forbidden
        assert not found, f"{path.name} imports {found}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in files_of(package):
        for module in imports_of(path):
            if module.startswith("giveway."):
                assert module.split(".")[1] in allowed, f"{path.relative_to(SRC)} imports {module}"


@pytest.mark.parametrize("package", PURE)
def test_scheduling_the_loop_and_the_simulator_need_nothing_but_the_standard_library(package: str) -> None:
    for path in files_of(package):
        for module in imports_of(path):
            assert module.split(".")[0] == "giveway" or is_standard(module), f"{path.relative_to(SRC)} imports {module}"


def test_torch_is_imported_in_its_own_subpackage_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "runtime" / "torch" not in path.parents:
            modules = {module.split(".")[0] for module in imports_of(path)}
            assert not modules & {"torch", "torchvision", "triton"}, f"{path.relative_to(SRC)} imports torch"


def test_transformers_is_imported_nowhere() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert "transformers" not in {module.split(".")[0] for module in imports_of(path)}, path


def test_nothing_imports_the_composition_root_from_below() -> None:
    for package in (*MAY_IMPORT, "server"):
        for path in files_of(package):
            tops = {module.split(".")[1] for module in imports_of(path) if module.startswith("giveway.")}
            assert not tops & {"build", "build_server", "llm", "cli", "demo", "verify", "bench"}, (
                f"{path.relative_to(SRC)} imports {tops}"
            )


def run_bare(code: str) -> str:
    """Run code in an interpreter that sees the source tree and the standard library, and nothing installed."""
    setup = f"import sys; sys.path.insert(0, {str(SRC)!r})\n"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", setup + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


THIRD_PARTY = """
strangers = sorted(
    name for name in {module.split(".")[0] for module in sys.modules}
    if name not in sys.stdlib_module_names and name not in ("__main__", "giveway")
)
print(strangers)
"""


def test_importing_the_package_needs_only_the_standard_library_also_from_a_bare_source_tree() -> None:
    assert run_bare("import giveway; assert giveway.__version__" + THIRD_PARTY) == "[]\n"


DRY_RUN = """
sys.modules["torch"] = None  # importing it fails
from giveway.core.config import CacheConfig, SchedulerConfig
from giveway.core.request import RequestSpec
from giveway.core.sampling import SamplingParams
from giveway.core.commands import Submit
from giveway.core.scheduler import Scheduler
from giveway.runtime.dry.dry_backend import DryBackend
from giveway.runtime.model_executor import ModelExecutor

scheduler = Scheduler(SchedulerConfig(check_invariants=True), CacheConfig(4, 4, 4))
backend = DryBackend()
backend.allocate(num_device_blocks=4, num_host_blocks=4, block_size=4)
executor = ModelExecutor(backend, lambda: 0.0)
greedy = SamplingParams(temperature=0.0)
scheduler.accept([Submit(RequestSpec(f"r{n}", (n + 1, 2, 3), 9, sampling=greedy)) for n in range(3)], 0.0)
steps = 0
while scheduler.has_work:
    plan = scheduler.plan()
    scheduler.commit(plan, executor.execute(plan, scheduler.requests))
    steps += 1
print(steps)
del sys.modules["torch"]
"""


def test_the_dry_run_schedules_and_executes_without_torch_or_anything_else_installed() -> None:
    output = run_bare(DRY_RUN + THIRD_PARTY).splitlines()
    assert int(output[0]) >= 9
    assert output[1] == "[]"
