# Everything starts here: `make demo` and `make test` set themselves up. `make help` lists the rest.

# Python 3.11 where it is there, else the newest in docs/versions.md, else another. A name on the PATH may be a stub, so each is run.
suitable = $(1) -c 'import sys, venv, ensurepip; sys.version_info >= (3, 11) and print(sys.executable)' 2>/dev/null
PYTHON ?= $(shell for p in python3.11 python3.13 python3.12 python3.14 python3; do $(call suitable,$$p); done | head -n 1)
new_venv = if [ -n "$$($(call suitable,"$(PYTHON)"))" ]; then "$(PYTHON)" -m venv $(1); \
	elif [ "$(origin PYTHON)" = file ] && command -v uv >/dev/null; then \
	uv venv --quiet --seed --allow-existing --python '>=3.11' $(1); \
	else echo "sngm needs Python 3.11 or newer, with venv: install it, or run make PYTHON=/path/to/python3.11"; exit 1; fi
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := build/tools
STACKS := build/integrations
DOCS := build/docs
# one file stays on one worker, which shares its fixtures; the same drawn examples in each run, unlike a bare pytest
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile --hypothesis-profile=ci
# slow tests often wait for processes that they start, so they get a worker more than there are cores
SLOW := $(PYTEST) -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# let pytest keep the tests whose assertions it has rewritten: to rewrite all of them takes seconds in each worker
export PYTHONDONTWRITEBYTECODE :=
# torch's wheels are large, and some proxies take longer to send the first byte than pip waits for (15 seconds)
export PIP_DEFAULT_TIMEOUT ?= 120
QUICK := tests/test_registry.py tests/test_torch_internals.py tests/test_data.py

.PHONY: help setup demo test test-quick test-slow test-nightly test-integrations lint campaign bench docs dist fresh matrix \
	resolve clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## create .venv and install what constraints.txt pins

$(READY): pyproject.toml constraints.txt
	@echo "==> creating $(VENV) and installing sngm (a minute or two, once)"
	@$(call new_venv,$(VENV))
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## compare MSGD, LARS and SNGM on scikit-learn's digits, small batch against large (one to two minutes)
	@echo "==> sngm compare: which method keeps its accuracy at a large batch?"
	@$(BIN)/sngm compare $(COMPARE)

test: $(READY) lint  ## lint, types and the tests that are not slow
	@echo "==> tests"
	@$(PYTEST) -m 'not slow'

test-quick: $(READY)  ## the part of the tests that a set-up could break
	@echo "==> quick tests"
	@$(PYTEST) -m 'not slow' $(QUICK)

test-slow: $(READY)  ## the slow tests, except the nightly ones
	@echo "==> slow tests"
	@$(SLOW) -m 'slow and not nightly'

$(VENV)/.nightly: $(READY)
	@echo "==> installing Ray, submitit, W&B and MLflow"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,slurm,wandb,mlflow]'
	@touch $@

test-nightly: $(VENV)/.nightly test-integrations  ## the longest tests: fault injection, other libraries, whole studies
	@echo "==> nightly tests"
	@$(SLOW) -m nightly

$(STACKS)/.ready: tests/integrations/requirements.txt constraints.txt
	@echo "==> creating $(STACKS) and installing the training frameworks"
	@$(call new_venv,$(STACKS))
	@DS_BUILD_OPS=0 $(STACKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e . pytest pytest-xdist hypothesis -r tests/integrations/requirements.txt
	@$(STACKS)/bin/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0
	@touch $@

test-integrations: $(STACKS)/.ready  ## steps inside Accelerate, Hugging Face, Lightning, timm, DeepSpeed and torchtitan
	@echo "==> tests with training frameworks"
	@$(STACKS)/bin/python -m pytest -q -m nightly tests/test_integrations.py tests/test_docs.py

lint: $(READY)  ## ruff, mypy --strict, and whether the faults of tools/mutations.py still fit the source
	@echo "==> ruff and mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/mutations.py check

MINUTES ?= 10
SEED ?= 0
campaign: $(READY)  ## inject faults into runs for MINUTES=10, with SEED=0: kills, broken files, hostile arguments, full disks
	@echo "==> fault injection for $(MINUTES) minutes"
	@PYTHONPATH=tests $(BIN)/python -m campaign --minutes $(MINUTES) --seed $(SEED)

bench: $(READY)  ## time one optimizer step against torch and pytorch_optimizer
	@$(BIN)/python benchmarks/optim_step.py

$(TOOLS)/.ready: Makefile
	@$(call new_venv,$(TOOLS))
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0 uv==0.13.7
	@touch $@

$(DOCS)/.ready: Makefile pyproject.toml constraints.txt
	@$(call new_venv,$(DOCS))
	@$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]' mkdocs==1.6.1 \
		mkdocs-material==9.8.1 'mkdocstrings[python]==1.0.8' mkdocs-jupyter==0.26.3 ipykernel==7.4.0
	@touch $@

docs: $(DOCS)/.ready  ## build the site into build/site: pages, API reference, executed notebooks; a broken link is an error
	@$(DOCS)/bin/python tools/docs.py
	@cd build && NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 docs/bin/mkdocs build --quiet --strict -f ../mkdocs.yml
	@echo "==> build/site/index.html"

dist: $(TOOLS)/.ready  ## build sdist and wheel, and try each in an empty environment
	@tools/dist.sh $(TOOLS)/bin/python

fresh:  ## set up a fresh clone with a bare environment, and run demo and test-quick there
	@tools/fresh.sh test-quick $(if $(filter file,$(origin PYTHON)),,"$(PYTHON)")

matrix:  ## test the oldest and the newest torch, on every Python found (half an hour)
	@"$(PYTHON)" tools/matrix.py

resolve: $(TOOLS)/.ready  ## resolve constraints.txt from PyPI for every platform and Python
	@tools/resolve.sh $(TOOLS)/bin/uv

clean:  ## remove everything make created
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
