# Every target makes its own virtual environment: nothing has to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
N ?= 10000
SEED ?= 1
TORCH ?= 2.11.0

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ZOO_STAMP := $(VENV)/.installed-zoo
BENCH_STAMP := $(VENV)/.installed-bench
OTHER := $(VENV)-torch-$(TORCH)
CRITEO := $(wildcard ../shared/data/criteo_sample.csv)

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch test-all fuzz bench lint clean

QUICK := -m "not zoo and not slow and not gpu" -n 2 --dist worksteal

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## shard a DLRM over 4 processes and train it beside one process
	$(PY) examples/dlrm.py --world-size 4 $(if $(CRITEO),--data $(CRITEO)) $(ARGS)

test: $(STAMP) ## run the tests, except those marked zoo, slow or gpu (ARGS="-k name" is passed on)
	$(PY) -m pytest -q tests $(QUICK) $(ARGS)

test-torch: ## run the same tests on another torch, with the Triton it asks for (TORCH=2.11.0)
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|triton|setuptools)==' requirements-dev.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install -q torch==$(TORCH) 'setuptools>=77' -r $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	$(OTHER)/bin/python -m pytest -q tests $(QUICK) $(ARGS)

test-all: $(ZOO_STAMP) ## run every test (ARGS is passed on)
	$(PY) -m pytest -q tests $(ARGS)

fuzz: $(STAMP) ## run N random cases against one process, from SEED on (N=10000 SEED=1)
	$(PY) -m pytest -q tests/fuzz --fuzz-cases $(N) --fuzz-seed $(SEED) $(ARGS)

bench: $(BENCH_STAMP) ## time a workload beside its peers and the floor (ARGS="--workload all --plot times.png")
	OMP_NUM_THREADS=1 $(PY) -m tests.benchmarks $(ARGS)

lint: $(STAMP) ## ruff (lint, format check) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) $(VENV)-torch-* build *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pinned torch comes first, so that installing the package finds its range satisfied.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements-dev.txt
	$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(BENCH_STAMP): $(STAMP) requirements-bench.txt requirements-bench-nodeps.txt
	$(PY) -m pip install -q -r requirements-bench.txt
	$(PY) -m pip install -q --no-deps -r requirements-bench-nodeps.txt
	touch $@

# deepctr-torch is the only one whose own requirements are not followed, so it stands in a file of its own.
$(ZOO_STAMP): $(STAMP) requirements-zoo.txt requirements-zoo-nodeps.txt
	$(PY) -m pip install -q -r requirements-zoo.txt
	$(PY) -m pip install -q --no-deps -r requirements-zoo-nodeps.txt
	touch $@
