# Each target installs what it needs into .venv, once, and does its job.
#   make demo     an engine and two frontends, the sample pictures through HTTP, a table of what happened
#   make test     style, types, tests, and a check that nothing is left behind
#   make bench-quick  transports side by side in under 5 minutes; fails if a target that this measures is missed
#   make test-all what make test leaves out: coverage of the core, a minute of chaos, tests that start servers and benchmarks
#   make test-gpu the tests that need a GPU, which make test skips where there is none
#   make chaos    MINUTES=10 SEED=1: processes killed, stopped and hung up under load; a table of what must be zero
#   make soak     MINUTES=60: the same load for hours; fails if memory or descriptors grow
#   make simulate STEPS=1000000 SEED=1: the books of both ends, deterministically; EXHAUSTIVE=1 visits every state
#   make verify   has spin search the message ring's protocol for lost wake-ups (apt install spin); two minutes
#   make sanitize the compiled core's tests under AddressSanitizer and UndefinedBehaviourSanitizer
#   make guards   takes each guard away, and looks whether the test that is named for it notices
#   make fuzz     everything that takes bytes from others, a minute each (FUZZ_SECONDS=60), with atheris
#   make format   rewrites the sources in the project's style
#   make clean    removes .venv and what the tools cached

PYTHON ?= python3
VENV := .venv
# A worker for each core; who is idle takes tests of the other.
PARALLEL := -n auto --dist worksteal
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all test-gpu lint types unit chaos soak simulate bench-quick verify sanitize guards fuzz format clean \
	install

demo: $(INSTALLED)
	$(BIN)/shmring demo

# Style and types take a core for some seconds while the tests begin on both.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=3 lint types unit
	$(BIN)/python tests/leftovers.py

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu'

test-all: $(INSTALLED)
	$(BIN)/python -m pytest tests/core --cov --cov-report=term-missing:skip-covered
	$(BIN)/python -m tests.chaos --minutes 1 --seed 1
	$(BIN)/python -m pytest $(PARALLEL) -m slow
	$(BIN)/python tests/leftovers.py

SEED ?= 1

chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),1) --seed $(SEED)

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --seed $(SEED)

simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(if $(EXHAUSTIVE),--exhaustive,--steps $(or $(STEPS),1000000) --seed $(SEED))

bench-quick: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	$(BIN)/python -m bench quick

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/bench/test_gpu.py

verify: $(INSTALLED)
	$(BIN)/python tests/model/verify.py

sanitize: $(INSTALLED)
	$(BIN)/python tests/sanitize.py

guards: $(INSTALLED)
	$(BIN)/python tests/guards.py

FUZZ_SECONDS ?= 60

fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

# torch first and pinned: whatever else depends on it then takes this one.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard shmring/core/*.pyx shmring/core/*.pxd shmring/core/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shmring needs Python 3.11 or later: make PYTHON=python3.11")'
	@echo 'Installing into $(VENV), once; this takes a minute or two, and longer where torch brings CUDA (some 3 GB).'
	@$(PYTHON) -m venv $(VENV)
	@echo '  1 of 2: torch ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo '  2 of 2: shmring, and what serving, tests and benchmarks need ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
	@echo '  installed'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage build *.egg-info
