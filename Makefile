# `make help` lists the targets.  Every target installs what it needs into .venv, once per change of the pins.
#
#   PYTHON=python3.12 make test       another interpreter (with a fresh .venv: make clean first)
#   make demo ARGS="--blocks 64"      arguments for the demo
#   make test PYTEST_ARGS="-k layout" arguments for pytest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
PROTO_VENV ?= .venv-proto
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=
# Processes for the tests that may share the machine; those that watch the clock run alone, in the end.
JOBS ?= auto
HYPOTHESIS_PROFILE ?= ci

PYTEST = HYPOTHESIS_PROFILE=$(HYPOTHESIS_PROFILE) $(BIN)/pytest
# pytest ends with 5 when PYTEST_ARGS leave one of the runs without a test.
NOTHING_SELECTED = [ $$? -eq 5 -a -n '$(subst ','\'',$(PYTEST_ARGS))' ]

PIP := -m pip --disable-pip-version-check --no-input install --quiet
PINNED := --constraint constraints.txt --build-constraint constraints.txt
VENV_READY := $(VENV)/.ready-venv
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev
PROTO_READY := $(PROTO_VENV)/.ready
PACKAGE_FILES := pyproject.toml constraints.txt
# vLLM, and all that its tests need.
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.ready
# What `make bench` adds to it.
BENCH_READY := $(ENGINES)/.ready-bench
# What the containers are made from: fetched once, by scripts/containers.sh.
CONTAINERS := .containers
CONTAINERS_READY := $(VENV)/.ready-containers
GET_PROMTOOL = scripts/get_promtool.sh $(BIN)/promtool || echo "Without promtool the tests of the alert rules are skipped"

.PHONY: help setup demo test lint format types proto proto-check proto-baseline promtool pytest containers engines docs wheel bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS=$$'\t' read -r target what; do printf '  make %-12s %s\n' "$$target" "$$what"; done

setup: $(DEV_READY) $(PROTO_READY) ## install kvxfer, NIXL and the developer tools into .venv

demo: $(RUN_READY) ## run the demo (ARGS="..." are passed on)
	$(BIN)/kvxfer demo $(ARGS)

test: lint types proto-check pytest ## everything: lint, format, types, protos, generated code, tests

promtool: $(VENV_READY) ## get promtool, which checks the alert rules (`make setup` has tried it)
	@$(GET_PROMTOOL)

pytest: $(DEV_READY) ## the tests alone (PYTEST_ARGS="...", HYPOTHESIS_PROFILE=dev|ci|soak)
	$(PYTEST) -m 'not nixl' -n $(JOBS) $(PYTEST_ARGS) || $(NOTHING_SELECTED)
	$(PYTEST) -m 'nixl and not alone' -n $(JOBS) --dist loadfile $(PYTEST_ARGS) || $(NOTHING_SELECTED)
	$(PYTEST) -m 'nixl and alone' $(PYTEST_ARGS) || $(NOTHING_SELECTED)

containers: $(CONTAINERS_READY) ## build the image, and test pods of it (Docker; or Podman and root)
	@echo "Container engine: $$(scripts/containers.sh engine)"
	KVXFER_CONTAINERS=$(CONTAINERS) $(BIN)/pytest tests/containers $(PYTEST_ARGS)

# A dozen processes import all of vLLM: it is to be compiled once.
engines: $(ENGINES_READY) ## real vLLM engines on the CPU, with kvxfer between them; installs vLLM into .venv-engines
	PYTHONDONTWRITEBYTECODE= KVXFER_ENGINES=1 $(ENGINES)/bin/python -m pytest tests/engines/vllm $(PYTEST_ARGS)

lint: $(DEV_READY) ## ruff and buf: style, format, breaking changes; nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/baseline.txtpb

format: $(DEV_READY) ## rewrite sources and protos in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

types: $(DEV_READY) ## mypy, strict
	$(BIN)/mypy

proto: $(PROTO_READY) ## regenerate kvxfer/pb from proto/
	$(PROTO_VENV)/bin/python scripts/gen_proto.py

proto-check: $(PROTO_READY) ## fail if kvxfer/pb is not what proto/ generates
	$(PROTO_VENV)/bin/python scripts/gen_proto.py --check

proto-baseline: $(DEV_READY) ## at a release: the contract is from now on what proto/ says (docs/versioning.md)
	$(BIN)/buf build --exclude-source-info --output proto/baseline.txtpb

docs: $(DEV_READY) ## the documentation as a site, in build/docs; warnings and broken links are errors
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --conf-dir docs . build/docs

wheel: $(DEV_READY) ## the distribution, in dist
	$(BIN)/python -m hatchling build --target wheel --target sdist

bench: $(BENCH_READY) ## measure: ReadBlocks against NIXL, Mooncake, gRPC, vLLM (ARGS="..." are passed on); ten minutes
	$(ENGINES)/bin/python -m benchmarks $(ARGS)

clean: ## remove the environments and everything else that make has made
	rm -rf $(VENV) $(PROTO_VENV) $(CONTAINERS) $(ENGINES) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV_READY):
	@$(PYTHON) -c 'import sys; sys.exit("kvxfer needs Python 3.10 or newer, this is " + sys.version if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade 'pip>=25.3'
	@touch $@

$(RUN_READY): $(VENV_READY) $(PACKAGE_FILES)
	@echo "Installing kvxfer and NIXL into $(VENV) (with torch, which NIXL needs: this may take a few minutes)"
	$(BIN)/python $(PIP) $(PINNED) --editable '.[nixl]'
	@touch $@

$(DEV_READY): $(VENV_READY) $(PACKAGE_FILES)
	@echo "Installing kvxfer, NIXL and the developer tools into $(VENV) (with torch, which NIXL needs: this may take a few minutes)"
	$(BIN)/python $(PIP) $(PINNED) --no-compile --editable '.[nixl]' --group dev
	@$(GET_PROMTOOL)
	@touch $(RUN_READY) $@

$(CONTAINERS_READY): $(DEV_READY) scripts/containers.sh
	scripts/containers.sh engine
	$(BIN)/python $(PIP) $(PINNED) --group containers
	scripts/containers.sh base $(CONTAINERS)
	scripts/containers.sh wheels $(CONTAINERS) $(BIN)/python -m pip
	@touch $@

$(ENGINES_READY): constraints-engines.txt scripts/engines.sh pyproject.toml
	@echo "Installing vLLM, NIXL and kvxfer into $(ENGINES) (some 2 GB: this may take a few minutes)"
	scripts/engines.sh $(ENGINES) $(PYTHON)
	@touch $@

$(BENCH_READY): $(ENGINES_READY) constraints-bench.txt scripts/bench.sh
	@echo "Installing what kvxfer is measured against into $(ENGINES)"
	scripts/bench.sh $(ENGINES)
	@touch $@

$(PROTO_READY): scripts/proto-requirements.txt
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python $(PIP) --requirement scripts/proto-requirements.txt
	@touch $@
