# HyperParallel: every command of a working day. `make help` lists them.

# Python for the environment: 3.11 is what the pins in constraints.txt are tested with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# MindSpore has an environment of its own: it is large (2.8 GB) and most commands do not need it.
MINDSPORE_VENV := .venv-mindspore

# What is in the two environments: extras of pyproject.toml. PyTorch is in the second one too, so that the tests can
# compare the frameworks and start ranks with torchrun.
EXTRAS ?= torch,dev
MINDSPORE_EXTRAS ?= mindspore,torch,dev
# make test PLATFORM=torch TESTS=tests/platform/test_collectives.py; without PLATFORM both frameworks, side by side
PLATFORM ?= torch mindspore
TESTS ?= tests
# Processes that share the tests of PyTorch, a file at a time; of a part of them one, in the order of the files
JOBS ?= $(if $(filter-out tests,$(TESTS)),0,2)
# Extra arguments: make test ARGS="-k all_reduce --world-size 4", make demo ARGS="--steps 200"
ARGS ?=

STAMP := $(VENV)/.installed-$(EXTRAS)
MINDSPORE_STAMP := $(MINDSPORE_VENV)/.installed-$(MINDSPORE_EXTRAS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test sweep bench lint format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(if $(filter torch,$(PLATFORM)),$(STAMP)) $(if $(filter mindspore,$(PLATFORM)),$(MINDSPORE_STAMP)) ## make .venv and .venv-mindspore with the pinned versions (PLATFORM=torch: only .venv)
	@:

# $(1): environment, $(2): extras. The stamp is written last, so an interrupted setup starts again. setuptools comes
# first and is used without build isolation: pip applies constraints to the environment, but not to the temporary ones
# it builds in.
define make_environment
	@$(PYTHON) -c 'import sys; sys.exit("make setup needs Python 3.11 or newer for the versions of constraints.txt and " \
		+ "got " + sys.version.split()[0] + "; name another one: make setup PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@test -x $(1)/bin/python || { echo "creating $(1) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(1); }
	@echo "installing hyper-parallel[$(2)] into $(1) with the versions of constraints.txt"
	@$(1)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt setuptools
	@$(1)/bin/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt \
		--no-build-isolation --editable '.[$(2)]'
	@touch '$@'
endef

$(STAMP): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),$(EXTRAS))

$(MINDSPORE_STAMP): pyproject.toml constraints.txt
	$(call make_environment,$(MINDSPORE_VENV),$(MINDSPORE_EXTRAS))

demo: $(STAMP) ## one training under three layouts, stopped, killed and resumed: equal losses
	@$(BIN)/python examples/demo.py $(ARGS)

# The frameworks are tested side by side: the first one's output is shown as it comes, the others' in one piece behind
# it. All are tested even when one fails; the status is that of the worst.
test: setup ## run the tests on both frameworks (PLATFORM=torch or mindspore: one, TESTS=path, ARGS="-k name")
	@run() { \
		bin=$(BIN); jobs=$(JOBS); test $$1 != mindspore || { bin=$(MINDSPORE_VENV)/bin; jobs=0; }; \
		exec $$bin/python -m pytest $(TESTS) --platform=$$1 --numprocesses=$$jobs --dist=loadfile --durations=10 $(ARGS); \
	}; \
	set -- $(PLATFORM); first=$$1; shift; failed=0; others=; logs=$$(mktemp -d); \
	trap 'for other in $$others; do kill $${other%:*} 2>/dev/null; done; rm -rf "$$logs"' EXIT; trap 'exit 130' INT TERM; \
	for platform in "$$@"; do \
		(run $$platform) > $$logs/$$platform 2>&1 & others="$$others $$!:$$platform"; \
	done; \
	(run $$first) || failed=1; \
	for other in $$others; do \
		wait $${other%:*} || failed=1; cat $$logs/$${other#*:}; \
	done; \
	others=; exit $$failed

sweep: ## run all that is too long for every change, with everything tried (TESTS, PLATFORM and ARGS as above)
	@$(MAKE) --no-print-directory test JOBS=0 ARGS="--sweep $(ARGS)"

bench: $(STAMP) ## run every benchmark, or one: make bench BENCH=benchmarks/collectives.py
	@set -e; for benchmark in $(BENCH); do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

BENCH ?= $(sort $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

lint: $(STAMP) ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove the environment, caches and builds
	@rm -rf $(VENV) $(MINDSPORE_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
