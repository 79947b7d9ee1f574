# Two commands: `make demo` shows answers of a real model, `make test` runs all checks. Both need Python 3.11+ and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test lint format cases chaos clean

help:
	@echo "make demo    install, fetch the default model, answer examples/prompts.jsonl"
	@echo "make test    install with the development tools, run linters, type checks and tests"
	@echo "make lint    linters and type checks alone"
	@echo "make format  rewrite the code as the linters want it"
	@echo "make cases   run the folder of cases that BATCHINFER_CASES names"
	@echo "make chaos   disturb 300 jobs in every way (half an hour; JOBS=n for fewer)"
	@echo "make clean   remove the virtual environment and caches"

demo: $(VENV)/.installed
	$(BIN)/batchinfer run examples/prompts.jsonl -o examples/prompts.out.jsonl --overwrite
	$(BIN)/python examples/show_answers.py examples/prompts.out.jsonl 16

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

cases: $(VENV)/.installed-dev
	$(BIN)/python -m tests.cases

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.job.chaos $(or $(JOBS),300)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp is older than what decides the installation exactly when the installation is out of date.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "batchinfer needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say which: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' cannot make virtual environments: install its venv package (Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
