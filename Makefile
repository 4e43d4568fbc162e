# Everything starts here: `make demo` and `make test` set themselves up. `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the same drawn examples in each run; a bare pytest draws new ones
PYTEST_ARGS := -n auto --maxprocesses 8 --hypothesis-profile=ci

.PHONY: help setup demo test test-slow lint bench wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## create .venv and install what constraints.txt pins

$(READY): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) with $(PYTHON) and installing sngm (a minute or two, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sngm needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## compare MSGD, LARS and SNGM on scikit-learn's digits, small batch against large (one to two minutes)
	@echo "==> sngm compare: which method keeps its accuracy at a large batch?"
	@$(BIN)/sngm compare

test: $(READY) lint  ## lint, types and the test suite
	@echo "==> tests"
	@$(BIN)/python -m pytest -q -m 'not slow' $(PYTEST_ARGS)

test-slow: $(READY) wheel  ## the wheel in an empty environment, and the tests that take long
	@echo "==> slow tests"
	@$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

lint: $(READY)  ## ruff and mypy --strict
	@echo "==> ruff and mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)  ## time one optimizer step against torch and pytorch_optimizer
	@$(BIN)/python benchmarks/optim_step.py

wheel: $(READY)  ## build the wheel, install it into an empty environment and try it there
	@echo "==> building the wheel and trying it in an empty environment"
	@rm -rf dist build/smoke && $(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null
	@$(PYTHON) -m venv build/smoke
	@build/smoke/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	@cd build && smoke/bin/python -I ../tests/smoke.py  # -I: nothing but what that environment holds

clean:  ## remove everything make created
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
