# Everything a developer or a new user needs; works with only Python >= 3.11 and make.
#   make demo     set up, fetch the embedded model, answer a few prompts
#   make test     set up, run all tests
#   make check    lint, types and tests, as CI does
#   make bench    the CPU benchmarks of the docs, as JSON in benchmarks/results (ONLY="host_cost overlap" for some)
#   make gpu-test, make gpu-bench   tests and benchmarks that need a CUDA GPU
#   make gpu-bench-tp   benchmarks of two GPUs against one
#   make soak     the scheduler's property tests for long (EXAMPLES=100000)
# PYTHON=python3.12 chooses the interpreter, PIP_FLAGS="..." is passed to pip (for example the index of CPU-only torch).

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n 2
BIN := $(VENV)/bin
USE_STAMP := $(VENV)/.stretto-installed
DEV_STAMP := $(VENV)/.stretto-dev-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test soak lint format types check bench clean gpu-test gpu-bench gpu-bench-tp

help:
	@sed -n 's/^#   //p' Makefile

setup: $(USE_STAMP)
setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Stretto needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)." >&2; \
	  echo "Name another interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(USE_STAMP): pyproject.toml | $(BIN)/python
	@echo "== installing Stretto and what it needs (torch is large; this takes minutes the first time)"
	@$(PIP) install $(PIP_FLAGS) -e .
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "== installing Stretto with its test tools (torch is large; this takes minutes the first time)"
	@$(PIP) install $(PIP_FLAGS) -e '.[dev]'
	@touch $(USE_STAMP) $@

demo: $(USE_STAMP)
	@$(BIN)/stretto generate --model smollm2-135m --chat --max-tokens 64 --stats \
	  "What is the capital of France?" \
	  "Write one sentence about the sea." \
	  "Tell me a fun fact about octopuses." \
	  "Why is the sky blue?"

test: $(DEV_STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

EXAMPLES ?= 100000
soak: $(DEV_STAMP)
	@OMP_NUM_THREADS=1 STRETTO_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -v tests/test_scheduler_properties.py tests/test_turns.py

lint: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(DEV_STAMP)
	@$(BIN)/mypy

check: lint types test

gpu-test: $(DEV_STAMP)
	@PYTHON=$(BIN)/python scripts/gpu_test.sh

gpu-bench: $(DEV_STAMP)
	@PYTHON=$(BIN)/python scripts/gpu_bench.sh

gpu-bench-tp: $(DEV_STAMP)
	@PYTHON=$(BIN)/python scripts/gpu_bench_tp.sh

bench: $(DEV_STAMP)
	@PYTHON=$(BIN)/python scripts/bench.sh $(ONLY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
