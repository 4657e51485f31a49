# HyperParallel: every command of a working day. `make help` lists them.

# Python for the environment: 3.11 is what the pins in constraints.txt are tested with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# What `make setup` installs: extras of pyproject.toml. With MindSpore: make setup EXTRAS=torch,mindspore,dev
EXTRAS ?= torch,dev
# make test PLATFORM=torch TESTS=tests/platform/test_collectives.py
PLATFORM ?= torch
TESTS ?= tests
# Extra arguments: make test ARGS="-k all_reduce --world-size 4", make demo ARGS="--steps 200"
ARGS ?=

STAMP := $(VENV)/.installed-$(EXTRAS)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench lint format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the pinned versions (does nothing when nothing changed)
	@:

# The stamp is written last, so an interrupted setup starts again. setuptools comes first and is used without build
# isolation: pip applies constraints to the environment, but not to the temporary ones it builds in.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make setup needs Python 3.10 or newer and got " + sys.version.split()[0] \
		+ "; name another one: make setup PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing hyper-parallel[$(EXTRAS)] with the versions of constraints.txt"
	@$(PIP) install --quiet --quiet --constraint constraints.txt setuptools
	@$(PIP) install --quiet --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch '$(STAMP)'

demo: setup ## train a small MLP split over 4 local processes, next to one process
	@$(BIN)/python examples/mlp_demo.py $(ARGS)

test: setup ## run the tests (PLATFORM=torch, TESTS=path, ARGS="-k name")
	@$(BIN)/python -m pytest $(TESTS) --platform=$(PLATFORM) $(ARGS)

bench: setup ## run every benchmark, or one: make bench BENCH=benchmarks/collectives.py
	@set -e; for benchmark in $(BENCH); do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

BENCH ?= $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

lint: setup ## ruff (lint and format) and mypy over the public API
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment, caches and builds
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
