# Needs make and Python 3.11 or newer; everything else is put into .venv here.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# What make test installs, and what make test-all installs besides: PyTorch brings CUDA where the index has no CPU build.
EXTRAS  ?= dev,jax,ortools,traces,onnx,tf
BESIDES := torch,exports
ALL     := $(VENV)/.installed-all
CORPUS_VENV := .venv-corpus
CORPUS  := $(CORPUS_VENV)/.installed
# The first of these that runs and is new enough.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
# Processes that run tests side by side, and what else to tell pytest: make test ARGS="-k search"
JOBS   ?= 2
ARGS   ?=
# Which programs of the corpus: make test-corpus PROGRAMS="'nnx.*' 'haiku.*'"; all of them if empty.
PROGRAMS ?=
# Where recorded traces, profiles and contest instances lie.
PASE_DATA ?= ../shared/data
# Everything runs from .venv, which is ours to write to. Without bytecode (uv leaves none), each of the suite's hundreds of
# processes compiles what it imports again: 2 s for JAX, 1 s for pase.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-release test-corpus test-root test-data test-maxtext test-gpu-compiler test-wheel lint format netlab docs screenshots clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install pase in it (done by the others where needed)

demo: $(STAMP) ## compile GPT-2 for 32 devices, write layout.json, run one sharded step of it, reduced
	$(BIN)/pase compile zoo:gpt2 --devices 32 -o layout.json
	$(BIN)/pase run layout.json --reduced --devices 8

test: $(STAMP) ## run all tests, lint and types included; says at the end what was skipped and how to run it
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-all: $(ALL) ## besides: install PyTorch too, and run the tests that need it or start programs as users do
	$(BIN)/python -m pytest -n $(JOBS) -m "torch or minutes" $(ARGS)

test-release: $(ALL) ## before a release: the same tests on more models, every bench in its smallest setting, every page
	$(BIN)/python -m pytest -n $(JOBS) -m release $(ARGS)

test-corpus: $(CORPUS) ## before a release: the programs of other libraries, in an environment of their own (two CPU hours)
	$(CORPUS_VENV)/bin/python -m pytest -n $(JOBS) -m corpus $(ARGS)
	$(CORPUS_VENV)/bin/python -m bench programs $(PROGRAMS)

test-root: $(STAMP) ## the tests that need root and iproute2: networks of namespaces, taken down again
	$(BIN)/python -m pytest -m root $(ARGS)

test-data: $(STAMP) ## the tests on recorded data: make test-data PASE_DATA=FOLDER (docs/how-to/replay.md, docs/explanation/search.md)
	PASE_DATA=$(PASE_DATA) $(BIN)/python -m pytest -n $(JOBS) -m "data or data and minutes" $(ARGS)

test-maxtext: $(STAMP) ## what is written for MaxText, read by it: make test-maxtext PASE_MAXTEXT=PYTHON, one that has MaxText
	PASE_MAXTEXT=$(PASE_MAXTEXT) $(BIN)/python -m pytest -m maxtext $(ARGS)

test-gpu-compiler: $(STAMP) ## the tests with XLA's compiler for CUDA, in an environment of their own (450 MB; no GPU needed)
	$(PYTHON) -m venv .venv-gpu-compiler
	.venv-gpu-compiler/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,jax,verify-cuda]'
	.venv-gpu-compiler/bin/python -m pytest -m gpu_compiler $(ARGS)

test-wheel: $(STAMP) ## wheel and sdist installed on each Python here, nothing pinned, and tried (minutes)
	$(BIN)/python tests/wheel.py $(ARGS)

lint: $(STAMP) ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

netlab: $(STAMP) ## measure strategies and bucket plans on real, slow networks (a few minutes; root, iproute2)
	$(BIN)/python -m bench netlab quick

docs: $(STAMP) ## docs/ as a site in build/site, with search; every link is checked
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

screenshots: $(STAMP) ## every page in a browser, checked and pictured (playwright, and a Chromium of the system)
	$(BIN)/python -m pip install -q --disable-pip-version-check playwright
	$(BIN)/python -m bench pages.screenshots

clean: ## remove .venv and all that was built
	rm -rf $(VENV) $(CORPUS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp is touched last: an install that broke off is done again. uv is quicker than pip, but not everywhere to be had.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || command -v "$(PYTHON)" >/dev/null || { echo "no Python 3.11 or newer found; install one, or say make PYTHON=/path/to/python3" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; say make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) -m venv failed; on Debian and Ubuntu, install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@echo "installing into $(VENV) from constraints.txt"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools uv 2>/dev/null \
	  && $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]' \
	  || { $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools \
	    && $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'; }
	@touch $@

# Pins of its own: libraries of the corpus want older ones than the tests (transformers 4, the last that has Flax).
$(CORPUS): pyproject.toml constraints-corpus.txt
	@test -x $(CORPUS_VENV)/bin/python || $(PYTHON) -m venv $(CORPUS_VENV)
	@echo "installing into $(CORPUS_VENV) from constraints-corpus.txt"
	@$(CORPUS_VENV)/bin/python -m pip install -q --disable-pip-version-check setuptools uv
	@$(CORPUS_VENV)/bin/uv pip install -q --python $(CORPUS_VENV)/bin/python -c constraints-corpus.txt -e '.[jax,dev,corpus]'
	@$(CORPUS_VENV)/bin/uv pip install -q --python $(CORPUS_VENV)/bin/python --no-deps recurrentgemma==1.0.1  # wants an older numpy
	@touch $@

# PyTorch by pip alone, which knows its own configuration: an index of CPU builds may be named there.
$(ALL): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[$(EXTRAS),$(BESIDES)]'
	@touch $@
