.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?=
# More than the two cores of a usual machine: many tests wait for a process, a lease or a timeout.
TEST_WORKERS ?= 3
DEMO = .cache/demo/config.json
# The last of its four checkpoints that is written.
AGENT = .cache/agent/mistral/config.json
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest
# With --dist loadfile, xdist hangs after it has replaced a crashed worker.
PYTEST_ON_ALL_CORES = $(PYTEST) -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
KUBERNETES_TESTS = tests/operator/cluster tests/chart
NOT_IN_TEST = $(addprefix --ignore ,tests/gpu $(KUBERNETES_TESTS))
# Clusters beside the demo's. Scenarios mostly wait for pods, so three of them run at a time, each on a cluster of its own:
# some kill operators or nodes.
E2E_CLUSTERS = --dist load --maxschedchunk 1 --max-worker-restart 0 $(foreach n,1 2 3,--tx popen//env:MINISGL_CLUSTER=minisgl-e2e-$(n))
# Some images and shells set it; then each of hundreds of processes would compile its libraries again.
export PYTHONDONTWRITEBYTECODE =
# Of all clones: mypy compares the contents of files, and a first run takes minutes.
export MYPY_CACHE_DIR ?= $(or $(BUILD_CACHE),$(HOME)/.cache/minisgl)/mypy

.PHONY: help demo demo-down run chromium minilm prometheus test test-kubernetes e2e e2e-full e2e-long images images-push image-engine lint machine cluster-tools bench bench-operator bench-gateway test-processors test-drafts test-gpu lock lock-base clean install

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install $(DEMO)  ## start a Kubernetes cluster with a model on this machine and ask it a question; 10 to 20 minutes the first time
	@PYTHONPATH=e2e .venv/bin/python -m harness.demo

demo-down: install  ## stop and remove what `make demo` started; build results stay
	@PYTHONPATH=e2e .venv/bin/python -m harness.demo down

run: install $(DEMO)  ## install dependencies, train and serve a demo model, ask it a question; Ctrl-C stops it (ONCE=1: stop after the answer)
	@.venv/bin/python docs/quickstart.py $(if $(ONCE),--once)

test: install chromium minilm  ## install dependencies, check style and types, and run the tests with coverage
	@$(MAKE) --no-print-directory -j2 $(DEMO) $(AGENT) lint
	@rm -f .coverage .coverage.*
	COVERAGE_NOTE_LINES='$(CURDIR)/.coverage' $(PYTEST_ON_ALL_CORES) $(TEST_ARGS) $(NOT_IN_TEST)
	@.venv/bin/python -m coverage combine -q
	@.venv/bin/python -m coverage report --skip-covered
	@for part in minisgl/{scheduler,wire,frontend,tokenizer,router,replica}/\*:90 minisgl_operator/\*:95; do \
		.venv/bin/python -m coverage report --include="*/$${part%:*}" --fail-under=$${part#*:} >/dev/null || \
		{ echo "error: less than $${part#*:} % of the lines of $${part%:*} are covered" >&2; exit 1; }; \
	done

test-kubernetes: cluster-tools prometheus  ## test operator and chart on a real API server and with helm; builds both the first time, in 5 to 10 minutes
	$(PYTEST_ON_ALL_CORES) $(TEST_ARGS) $(KUBERNETES_TESTS)

e2e: install prometheus $(DEMO)  ## run the scenarios on clusters with nodes (E2E_KEEP=1: keep the clusters for inspection)
	$(PYTEST) $(E2E_CLUSTERS) -m 'not soak' --timeout 900 $(E2E_ARGS) e2e/scenarios

e2e-full: e2e e2e-long  ## run all scenarios, the long ones included, in two to three hours

# One cluster: they measure pauses.
e2e-long: install prometheus $(DEMO)  ## run the scenarios that e2e leaves out because each takes minutes, and those of IPv6
	MINISGL_CLUSTER=minisgl-e2e $(PYTEST) -m soak --timeout 3600 $(E2E_ARGS) e2e/scenarios
	MINISGL_CLUSTER=minisgl-e2e-ipv6 MINISGL_IP_FAMILY=6 $(PYTEST) --timeout 3600 e2e/ipv6

images: install  ## build the images of operator, frontend and engine (for CPUs), without Docker
	@PYTHONPATH=e2e .venv/bin/python -m image_builder

images-push:  ## build all images and push them to REGISTRY, with docker, podman or buildah (IMAGES='operator frontend': these only)
	@images/push '$(REGISTRY)'

image-engine: install  ## build the engine image with the CUDA libraries and import torch in it
	@PYTHONPATH=e2e .venv/bin/python -m image_builder check-engine

lint: install  ## run ruff, mypy --strict and the import rules
	.venv/bin/ruff check runtime operator benchmarks tests docs e2e
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

machine: install chromium minilm prometheus image-engine $(DEMO) $(AGENT)  ## build and install all that tests need once on a machine, in half an hour
	@PYTHONPATH=e2e .venv/bin/python -m harness.prepare

cluster-tools: install
	@PYTHONPATH=tests:e2e .venv/bin/python -m support.cluster.cluster_tools

# Trained again when its sources have changed.
$(DEMO): $(wildcard runtime/minisgl/toy/demo*) $(addprefix runtime/minisgl/toy/,tiny_tokenizer.py training.py) | install
	@.ci/trained demo $(@D) $^

$(AGENT): $(wildcard runtime/minisgl/toy/agent*) $(addprefix runtime/minisgl/toy/,tiny_tokenizer.py training.py muon.py) | install
	@.ci/trained agent .cache/agent $^

chromium:
	@.ci/chromium

minilm: install
	@.ci/minilm

prometheus:
	@.ci/prometheus

bench: install $(DEMO)  ## measure scheduler and frontend CPU time and the demo model's speed on this machine
	.venv/bin/python benchmarks/scheduler.py
	.venv/bin/python benchmarks/frontend.py
	.venv/bin/minisgl bench offline --model .cache/demo --num-requests 16 --input-len 20 200 --output-len 20 60

bench-operator: cluster-tools  ## measure the operator with 1,000 models on a separate API server
	@PYTHONPATH=runtime:operator:tests:e2e .venv/bin/python benchmarks/operator/bench.py

bench-gateway: cluster-tools  ## measure a gateway in front of 1,000 models, 990 of them at zero, on a separate API server
	@PYTHONPATH=runtime:operator:tests:e2e .venv/bin/python benchmarks/operator/many_models.py

test-processors: install chromium  ## train both models under three instruction sets with five seeds each, and test each result; two hours
	@.ci/processors

test-drafts: install  ## compare answers with and without drafts in 500 random runs each, of texts and of a draft head; an hour
	DRAFT_EXAMPLES=500 OMP_NUM_THREADS=1 .venv/bin/python -m pytest --no-cov -q --timeout 7200 tests/runtime/engine/test_drafts.py tests/runtime/engine/test_draft_head.py

test-gpu: install  ## run the tests that need a CUDA device
	$(PYTEST) -m gpu tests

lock: install  ## update the lock files from the dependencies in pyproject.toml
	.venv/bin/uv pip compile pyproject.toml -q --upgrade --universal --python-version 3.11 --generate-hashes \
		--extra frontend --extra engine --extra operator --extra dev --custom-compile-command 'make lock' -o requirements.lock
	.venv/bin/uv pip compile pyproject.toml -q --upgrade --python-platform x86_64-manylinux_2_31 --python-version 3.11 \
		--generate-hashes --extra frontend --extra engine --extra operator --extra dev --extra cuda -c requirements.lock \
		--custom-compile-command 'make lock' -o requirements-cuda.lock
	for image in operator frontend; do \
		.venv/bin/uv pip compile pyproject.toml -q --universal --python-version 3.11 --generate-hashes --extra $$image \
			-c requirements.lock --custom-compile-command 'make lock' -o images/$$image/requirements.lock; done
	# uv finds no universal solution with torch unless it begins with one.
	cp requirements.lock images/serve/requirements.lock
	.venv/bin/uv pip compile pyproject.toml -q --universal --python-version 3.11 --generate-hashes --extra serve \
		--custom-compile-command 'make lock' -o images/serve/requirements.lock
	.venv/bin/uv pip compile pyproject.toml -q --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
		--generate-hashes --extra engine --extra cuda -c requirements-cuda.lock \
		--custom-compile-command 'make lock' -o images/engine/requirements.lock
	.venv/bin/uv pip compile images/engine/compiler.in -q --upgrade --python-platform x86_64-manylinux_2_28 --no-deps \
		--python-version 3.11 --generate-hashes --custom-compile-command 'make lock' -o images/engine/compiler.lock

lock-base:  ## update the digest of the images' base, with docker buildx, crane or skopeo
	@images/lock-base

clean:  ## remove everything that was built, installed or cached in this directory
	rm -rf .venv .cache dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find runtime tests -name __pycache__ -type d -prune -exec rm -rf {} +

install:  ## install the locked packages, and minisgl itself in editable form, into .venv (PYTHON=…: the interpreter)
	@PYTHON='$(PYTHON)' .ci/install
