# Each target installs what it needs into .venv, once, and does its job.
#   make demo     tensors from a process to another, beside a socket; then the sample media through a server, with tables of what happened
#   make test     style, types, tests, and a check that nothing is left behind
#   make bench-quick  transports side by side in about five minutes
#   make bench-all what a release claims, measured again and stored, and docs/benchmarks.md from it; 40 minutes on two idle cores
#   make test-all what make test leaves out: coverage of the core, a minute of chaos, tests that start servers and benchmarks, and more
#                 random examples of each property; SEED=2 for others
#   make test-pythons the fast tests with each Python from 3.11 to 3.14 that is at hand, each in an environment of its own
#   make test-gpu the tests that need a GPU, which make test skips where there is none
#   make gpu-hour all that is to be known of a GPU that is at hand for some minutes: builds, tests, measures, in at most eight minutes; one
#                 JSON, JSON=gpu-hour.json. ENVIRONMENT=none takes the Python that is there (PYTHON=python3), and fetches nothing
#   make test-vllm the plug-in for vLLM with the real thing: makes .venv-vllm, once (3 minutes, 3.5 GB), and tests in it
#   make test-sglang the plug-in for SGLang with the real thing on the CPU: makes .venv-sglang, once (3 minutes, 2 GB), and tests in it
#   make test-ray the engine in a Ray cluster of two nodes on this machine: makes .venv-ray, once (2 minutes, 1.5 GB), and tests in it
#   make test-clients the clients that people call such a server with, of Python and, if there is npm, of JavaScript: makes .venv-clients, once
#   make demo-vllm starts vLLM with the plug-in, asks about a picture, and prints what went through the slab
#   make chaos    MINUTES=10 SEED=1: processes killed, stopped and hung up under load; a table of what must be zero
#   make night    MINUTES=10 SEED=1: a server under mixed load, whose processes are killed and stopped, and whose log stalls
#   make soak     MINUTES=60: the same load for hours; fails if memory or descriptors grow
#   make simulate STEPS=1000000 SEED=1: the product's own ends in one process, deterministically; EXHAUSTIVE=1 visits every state. Then each
#                 call of the asyncio interface is cancelled at each of its suspensions, on both loops
#   make instructions counts the instructions of a message, beside an earlier commit, and compares times (apt install valgrind); three minutes
#   make verify   has spin search the protocols of sleeping and waking for lost wake-ups (apt install spin); three minutes
#   make sanitize the compiled core's tests under the compiler's sanitizers: addresses, undefined behaviour, threads
#   make guards   takes each guard of a guarantee away, and looks whether the check that is named for it notices: who does, and how long
#                 that takes
#   make mutants  the same with the other faults of the table in tests/mutants/: of all kinds, in the compiled core and the Python around it
#   make fuzz     everything that takes bytes from others, a minute each (FUZZ_SECONDS=60), with atheris; then the compiled core under
#                 the compiler's sanitizers, a minute for each parser; 25 minutes in all
#   make wheel    a wheel for any Linux (manylinux) and an sdist, into dist/; ARCH=aarch64 compiles for another processor
#   make docs     the site: the pages of docs/ and a reference made from docstrings, with search, in site/
#   make core     the compiled core as it is edited, not optimised, in a quarter of the time; whatever is made next installs the real one again
#   make format   rewrites the sources in the project's style
#   make clean    removes .venv, .venv-3.*, .venv-vllm, .venv-sglang, .venv-ray, .venv-clients, .venv-docs and what the tools cached

PYTHON ?= python3
VENV := .venv
# All processes of a run inherit it, so that tests/leftovers.py knows them.
export TEST_RUN_OF_SHMRING := $(or $(TEST_RUN_OF_SHMRING),$(shell date +%s%N)-$(shell echo $$PPID))
# A worker more than there are cores; who is idle takes tests of the others.
PARALLEL := -n auto --dist worksteal
BIN := $(VENV)/bin
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
SEED ?= 1
COMPILED := core_interface.py $(wildcard shmring/core/*.pyx shmring/core/*.h shmring/memory/*.[ch] tests/model/*.pyx)

# Tests start hundreds of processes, and without kept bytecode each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-pythons test-gpu gpu-hour test-vllm test-sglang test-ray test-clients demo-vllm lint types unit chaos night soak simulate bench-quick bench-all instructions verify sanitize guards mutants \
	fuzz wheel docs format clean install core

demo: $(RUNNABLE)
	$(BIN)/shmring demo

# Style and types take a core for some seconds while the tests begin on both.
test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=3 lint types unit
	$(BIN)/python -m tests.leftovers

lint: $(INSTALLED)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu'

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) tests/core --cov --cov-report=term-missing:skip-covered
	$(BIN)/python -m tests.chaos --minutes 1 --seed $(SEED)
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=thorough --hypothesis-seed=$(SEED) -m 'slow or hypothesis'
	$(BIN)/python -m tests.leftovers

test-pythons:
	$(PYTHON) tests/pythons.py

chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),1) --seed $(SEED)

night: $(INSTALLED)
	$(BIN)/python -m tests.night --minutes $(or $(MINUTES),10) --seed $(SEED)

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --seed $(SEED)

simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(if $(EXHAUSTIVE),--exhaustive,--steps $(or $(STEPS),1000000) --seed $(SEED))
	$(BIN)/python -m tests.suspensions

# A transport that can't be installed here is left out, and the tables say so.
bench-quick bench-all: $(INSTALLED)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["peers"], sep="\n")' \
	| while read -r peer; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$peer" || echo "$$peer can't be installed"; \
	done
	$(BIN)/python -m bench $(@:bench-%=%)

# It exits with 77 if it can't measure, which make says is an error.
instructions: $(INSTALLED)
	$(BIN)/python -m tests.instructions $(if $(BESIDE),--beside $(BESIDE))

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/bench/test_gpu.py

gpu-hour: export PYTHONPATH = $(CURDIR)
gpu-hour: GPU_PYTHON = $(if $(filter none,$(ENVIRONMENT)),$(PYTHON),$(BIN)/python)
gpu-hour: $(if $(filter none,$(ENVIRONMENT)),,$(INSTALLED))
	timeout -k 5 150 $(GPU_PYTHON) setup.py --quiet build_ext --inplace
	status=0; \
	timeout -k 5 170 $(GPU_PYTHON) -X faulthandler -m pytest -q -m gpu tests/gpu tests/bench/test_gpu.py || status=1; \
	timeout -k 5 150 $(GPU_PYTHON) -m bench gpu --json $(or $(JSON),gpu-hour.json) || status=1; \
	exit $$status

# vLLM needs other versions of some packages, so it has an environment of its own.
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed

test-vllm: $(VLLM_INSTALLED)
	$(VLLM)/bin/python -m pytest tests/vllm tests/omni tests/plug_ins
	$(VLLM)/bin/python -m tests.leftovers

demo-vllm: $(VLLM_INSTALLED)
	$(VLLM)/bin/python -m tests.vllm.demo

$(VLLM_INSTALLED): pyproject.toml constraints.txt setup.py tests/installing_servers.py tests/byte_tokenizer.py tests/vllm/tiny_model.py $(COMPILED)
	@echo 'Installing into $(VLLM), once; this takes about three minutes and 3.5 GB.'
	@$(PYTHON) -m tests.installing_servers vllm $(VLLM)
	@touch $@
	@echo '  installed'

# So has SGLang.
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed

test-sglang: $(SGLANG_INSTALLED)
	$(SGLANG)/bin/python -m pytest tests/sglang tests/plug_ins
	$(SGLANG)/bin/python tests/leftovers.py

$(SGLANG_INSTALLED): pyproject.toml constraints.txt setup.py tests/installing_servers.py tests/byte_tokenizer.py \
	tests/sglang/kernels_stand_in.py tests/sglang/tiny_model.py $(COMPILED)
	@echo 'Installing into $(SGLANG), once; this takes about three minutes and 2 GB.'
	@$(PYTHON) -m tests.installing_servers sglang $(SGLANG)
	@touch $@
	@echo '  installed'

# Ray starts many processes, and what it brings nobody else here needs.
RAY := .venv-ray
RAY_INSTALLED := $(RAY)/.installed

test-ray: $(RAY_INSTALLED)
	$(RAY)/bin/python -m pytest tests/ray
	$(RAY)/bin/python tests/leftovers.py

$(RAY_INSTALLED): pyproject.toml constraints.txt setup.py tests/installing_servers.py $(COMPILED)
	@echo 'Installing into $(RAY), once; this takes about two minutes and 1.5 GB.'
	@$(PYTHON) -m tests.installing_servers ray $(RAY)
	@touch $@
	@echo '  installed'

# Clients bring many packages, which the server must do without.
CLIENTS := .venv-clients

test-clients: $(INSTALLED) $(CLIENTS)/.installed
	$(BIN)/python -m tests.clients $(CLIENTS)

$(CLIENTS)/.installed: Makefile tests/clients/package.json
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check 'openai>=1.60' langchain-openai instructor litellm anthropic \
		openai-agents 'pydantic-ai-slim[openai]' llama-index-llms-openai-like
	@cp tests/clients/package.json $(CLIENTS)/
	@if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --silent --no-audit --no-fund; fi
	@touch $@

verify: $(INSTALLED)
	$(BIN)/python tests/model/verify.py

sanitize: $(INSTALLED)
	$(BIN)/python -m tests.sanitize

guards: $(INSTALLED)
	$(BIN)/python -m tests.mutants --guards

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants --no-guards

FUZZ_SECONDS ?= 60

fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.sanitize --fuzz $(FUZZ_SECONDS)

# The wheel is built from the sdist, in an empty directory. auditwheel refuses one that needs what not every Linux has, or a newer
# processor, and names it for the oldest Linux that it fits.
ARCH ?= $(shell uname -m)

wheel: $(INSTALLED)
	rm -rf build/wheel
	$(CROSS) $(BIN)/python -m build --no-isolation --outdir build/wheel > /dev/null
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist/

# For another processor: Debian's cross compiler (apt install gcc-aarch64-linux-gnu), and the names that belong to it. The headers are
# this Python's own. Only pyconfig.h is made for one processor, and what it says to extensions (sizes, alignments) is the same for all
# little-endian ones with words of 64 bits. Debian's Python refuses that, and wants its own for the other processor: dpkg
# --add-architecture arm64; apt update; apt install libpython3-dev:arm64.
ifneq ($(ARCH),$(shell uname -m))
CROSS = CC=$(ARCH)-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-$(ARCH) \
	SETUPTOOLS_EXT_SUFFIX=$(subst $(shell uname -m),$(ARCH),$(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'))
endif

# What makes the site reads the sources and runs nothing of them, so it needs neither torch nor a compiler. The core's docstrings are in its
# stub. (An older pip knows no groups. With --quiet, mkdocs would not count warnings.)
DOCS := .venv-docs

docs: $(DOCS)/.installed
	$(DOCS)/bin/python core_interface.py
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=docs $(DOCS)/bin/mkdocs build --strict
	@echo 'The site is in site/. To look at it: $(PYTHON) -m http.server --directory site'

$(DOCS)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	@touch $@

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)

# What runs: shmring and what its server and the demonstration need. Where no C compiler is, one comes from the package index: Zig's,
# which setup.py looks for when it finds no other.
$(RUNNABLE): pyproject.toml constraints.txt setup.py $(COMPILED)
	$(call installing,demo)

# The core as it is edited, to try something: not optimised. Whatever is made afterwards installs the real one again.
core: | $(if $(wildcard $(INSTALLED)),,$(INSTALLED))
	@$(BIN)/python setup.py --quiet build_ext --inplace --quick
	@touch -d @0 $(INSTALLED) $(RUNNABLE)

# What tests and benchmarks need, too.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(COMPILED)
	$(call installing,test)
	@touch $(RUNNABLE)

define installing
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shmring needs Python 3.11 or later: make PYTHON=python3.11")'
	@echo 'Installing into $(VENV), once; this takes about a minute, and longer where torch brings CUDA (some 3 GB).'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tests/installing.py $(1)
	@touch $@
	@echo '  installed'
endef

clean:
	rm -rf $(VENV) .venv-3.* $(VLLM) $(SGLANG) $(RAY) $(CLIENTS) $(DOCS) site .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
