# Needs python3 (3.10 or newer) and make; everything else is installed into .venv on the first use.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
# e.g. make lab EXTRAS="lab gpu"
EXTRAS ?= lab
# pytest's workers; 0 runs everything in one process
WORKERS ?= 2
# passed on to pytest, e.g. make test ARGS="-k recorder"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help lab test lint notebooks bench environment

help:
	@echo "make lab        open the chapters in JupyterLab"
	@echo "make test       lint, types, tests, browser tests and every notebook"
	@echo "make lint       ruff and mypy only"
	@echo "make notebooks  re-execute the chapters without a GPU and store their outputs"
	@echo "make bench      the benchmarks"

lab:
	@$(PYTHON) tools/environment.py --venv $(VENV) $(EXTRAS)
	@$(PY) -m flashviz lab

environment:
	@$(PYTHON) tools/environment.py --venv $(VENV) dev

lint: environment
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# One run, so that it closes with one summary: the tests, the browser tests and nbval on every notebook.
test: lint
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not slow" --nbval --nbval-current-env \
	    --nbval-sanitize-with tests/notebooks/sanitize.cfg --nbval-cell-timeout 60 tests notebooks $(ARGS)

notebooks: environment
	$(PY) tools/notebooks.py

bench: environment
	@for file in benchmarks/*.py; do echo "== $$file"; $(PY) "$$file" || exit 1; done
