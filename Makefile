# Start with `make demo` and `make test`. Every command sets up .venv first.
SHELL := /bin/bash
VENV ?= $(or $(PENSTOCK_VENV),.venv)
PYTHON_SOURCES := penstock rollout_server learner services tools tests bench examples docs helm deploy
BENCHES := codec replay weights checkpoints rollout gateway agents scale simulate
export PENSTOCK_VENV := $(VENV)
# A test run starts hundreds of processes. Without compiled modules each would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

.PHONY: help demo test test-forking test-others test-ordinary demo-ordinary tests-ordinary lint lint-types lint-style unit integration bench bench-against bench-check bench-async chaos soak test-long setup setup-dev proto images chart clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: setup  ## train a tiny model on this machine, start to finish (ARGS="--learner.lr 1e-4")
	@$(VENV)/bin/penstock demo $(ARGS)

# These tests start vLLM, which forks from the test process. That process must not have threads yet. The last ones need its import only.
FORKING_TESTS := $(addprefix tests/integration/engines/,test_engine_conformance.py test_engine_load.py test_constrained_output.py test_vllm_flips.py test_vllm_models.py) \
	tests/unit/rollout/test_vllm_constraints.py

# Tests wait for processes and deadlines for a large part of their time, so two cores are busy with four workers.
WORKERS ?= 4

test: setup-dev  ## lint, and at least one case of every feature (what CI checks; as root AS_BOTH_USERS=1 adds test-ordinary)
	@$(MAKE) --no-print-directory -j 3 lint-types test-forking test-others lint-style $(if $(AS_BOTH_USERS),tests-ordinary demo-ordinary)

# No permission stops root, so CI, which is often root, also runs these tests as an ordinary user: private files, folders that cannot be
# written, the sandbox, and the demo. Attacks are not among them: that test starts its servers as both users.
# AS_BOTH_USERS=1 does so within `make test`, while root's tests wait for processes. Nothing in the demo and ORDINARY_ONLY is special to
# root, so root then leaves them out.
DEMO_TEST := tests/integration/runs/test_demo.py
ORDINARY_ONLY := tests/integration/runs/test_doctor.py tests/unit/learner/checkpoints/test_checkpoint_store.py \
	tests/unit/weights/test_cluster_key.py $(addprefix tests/unit/test_,private_redis.py logs.py init.py open_files.py samples.py)
ORDINARY_TESTS := $(ORDINARY_ONLY) tests/unit/learner/checkpoints/test_damaged_checkpoints.py \
	$(addprefix tests/unit/rewards/test_,code_reward.py sandbox.py sandbox_folders.py system_call_numbers.py reward_process.py) \
	tests/unit/rewards/test_scorer.py::test_ending_a_code_reward_ends_its_programs \
	$(addprefix tests/unit/test_,compiled_code.py disk_space.py) \
	--deselect=tests/unit/test_compiled_code.py::test_a_rank_compiles_into_the_folder
AS_ORDINARY_USER := OMP_NUM_THREADS=1 .ci/as-ordinary-user $(VENV)/bin/python

test-ordinary: setup-dev  ## the tests for which the user matters, as an ordinary user (for root)
	@$(MAKE) --no-print-directory -j 2 demo-ordinary tests-ordinary

demo-ordinary:
	$(AS_ORDINARY_USER) $(VENV)/bin/python -m pytest -p no:cacheprovider $(DEMO_TEST) $(ARGS)

tests-ordinary:
	$(AS_ORDINARY_USER) $(VENV)/bin/python -m pytest -n $(if $(AS_BOTH_USERS),0,2) -p no:cacheprovider $(ORDINARY_TESTS) $(ARGS)

test-forking:
	$(VENV)/bin/python -m pytest $(FORKING_TESTS) $(ARGS)

test-others:
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(addprefix --ignore=,$(FORKING_TESTS) $(if $(AS_BOTH_USERS),$(DEMO_TEST) $(ORDINARY_ONLY))) $(ARGS)

lint: setup-dev  ## ruff, mypy (strict), import-linter
	@$(MAKE) --no-print-directory -j 2 lint-types lint-style

lint-types:
	$(VENV)/bin/mypy

lint-style:
	$(VENV)/bin/ruff check $(PYTHON_SOURCES)
	$(VENV)/bin/ruff format --check $(PYTHON_SOURCES)
	$(VENV)/bin/lint-imports --no-cache

unit: setup-dev  ## fast tests only
	$(VENV)/bin/python -m pytest tests/unit $(ARGS)

integration: setup-dev  ## tests that start real components
	$(VENV)/bin/python -m pytest tests/integration tests/faults $(ARGS)

soak: setup-dev  ## an hour of training while all parts are killed, with what it cost (ARGS="--minutes 8")
	$(VENV)/bin/python bench/soak.py $(ARGS)

chaos: setup-dev  ## every row of the fault matrix, and docs/faults.md from it (up to 40 minutes; ARGS="-n 8")
	$(if $(ARGS),,rm -f tests/faults/results.json)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/faults tests/integration tests/unit/learner -m "chaos or fault_row" -n 2 --durations=60 \
		--fault-results tests/faults/results.json $(ARGS); status=$$?; $(VENV)/bin/python docs/make_faults.py; exit $$status

test-long: setup-dev  ## the cases that `make test` skips for time, and property tests with new examples
	$(VENV)/bin/python -m pytest -m long $(ARGS)
	$(VENV)/bin/python -m pytest -m hypothesis --hypothesis-profile new $(ARGS)

proto: setup-dev  ## regenerate penstock/v1 from proto/
	$(VENV)/bin/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/penstock/v1/*.proto

bench: $(addprefix bench-,$(BENCHES))  ## codec, replay, weights, checkpoints, rollout, gateway, agents, scale, simulate (bench-codec runs one)

bench-async: setup-dev  ## asynchronous against synchronous training (25 minutes; ARGS="--seeds 1 --staleness 0,2")
	$(VENV)/bin/python bench/async_sync.py $(ARGS)

bench-against: setup-dev  ## this tree against another commit, part by part (25 minutes; BASE=<commit>, ARGS="--parts demo")
	$(VENV)/bin/python bench/against.py $(BASE) $(ARGS)

bench-check: setup-dev  ## every CPU benchmark in short form against the last commit (10 to 20 minutes; BASE=<commit>, ARGS="--parts queue")
	$(VENV)/bin/python bench/against.py --check $(BASE) $(ARGS)

bench-%: setup-dev
	$(VENV)/bin/python bench/$*.py $(ARGS)

setup:  ## install the packages, CUDA's if nvidia-smi finds a GPU (GPU=cuda, GPU=cpu)
	@deploy/python/setup.sh run

setup-dev:
	@deploy/python/setup.sh dev

# Without PUSH, images are for this machine and are loaded into its docker. Attestations need a registry.
IMAGES ?= default
REGISTRY ?= penstock
TAG ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' penstock/__init__.py)
HERE := $(if $(filter aarch64 arm64,$(shell uname -m)),linux/arm64,linux/amd64)

images:  ## build the images; PUSH=1 REGISTRY=ghcr.io/me/penstock pushes them for amd64 and arm64 (IMAGES="default cpu")
	mkdir -p dist
	REGISTRY=$(REGISTRY) TAG=$(TAG) docker buildx bake --file deploy/docker/bake.json --metadata-file dist/images.json \
		$(if $(PUSH),--push,--load --set '*.platform=$(HERE)' --set '*.attest=') $(IMAGES)

chart:  ## package the chart into dist/ (TAG=1.2.3)
	mkdir -p dist
	PATH="$(VENV)/bin:$$PATH" helm package helm/penstock --version $(TAG) --app-version $(TAG) --destination dist

clean:  ## remove the virtual environment, caches and runs
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
