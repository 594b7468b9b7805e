# Each target sets up all that it needs, from nothing: `make demo`, `make test`, `make bench`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := .
C_SOURCES := csrc/* tests/csrc/*.cpp tests/csrc/host_cuda/*

OLDEST := .venv-oldest
CUDA := .venv-cuda

.PHONY: demo test test-oldest cuda-build bench bench-convergence venv venv-oldest lint format clean

demo: venv
	$(BIN)/python integrations/train_pytorch.py

test: lint
	$(BIN)/python -m pytest
	$(MAKE) test-oldest

# The oldest versions that adapters support, in an environment of their own. Left out of the suite: launches of scripts and
# DeepSpeed's newest, which the other environment covers, and FSDP2 by gloo, which adds up there and doesn't average.
APPLIES := $(addprefix tests/test_, $(addsuffix .py, accelerate checkpoint config norm optimizer optimizer_state \
	properties ranks rule rule_cases skip_cases transformers upstream))

test-oldest: venv-oldest
	$(OLDEST)/bin/python -m pytest tests/oldest $(APPLIES) \
		-k "not (test_ranks and (fsdp2 or mixed or plain_parameters_beside))"

# All of the extension with CUDA, compiled and linked; needs nvcc and no GPU. That torch is not imported, so that it does
# without the gigabytes that it depends on.
cuda-build: venv $(CUDA)/.done
	$(BIN)/python tests/build_cuda.py $(CUDA)/lib/python*/site-packages/torch

$(CUDA)/.done: constraints-cuda.txt
	test -d $(CUDA) || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --no-deps --requirement constraints-cuda.txt
	touch $@

bench: venv
	$(BIN)/python benchmarks/step_time.py

bench-convergence: venv
	$(BIN)/python benchmarks/convergence.py --quick

venv: $(VENV)/.done

# Torch first and by its exact version: a constraint alone would let pip weigh other builds of it.
$(VENV)/.done: pyproject.toml constraints.txt setup.py
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	touch $@

venv-oldest: $(OLDEST)/.done

$(OLDEST)/.done: pyproject.toml constraints-oldest.txt setup.py
	test -d $(OLDEST) || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints-oldest.txt)"
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt setuptools wheel numpy
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable . \
		accelerate catalogue deepspeed hypothesis matplotlib mosaicml pytest pytest-timeout rich torchvision transformers
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --no-deps llm-foundry zclip
	touch $@

lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)

format: venv
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(C_SOURCES)

clean:
	rm -rf $(VENV) $(OLDEST) $(CUDA) build dist runs *.egg-info
