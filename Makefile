# Each target sets up all that it needs, from nothing: `make demo`, `make test`, `make bench`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := .

.PHONY: demo test bench venv lint format clean

demo: venv
	$(BIN)/python integrations/train_pytorch.py

test: lint
	$(BIN)/python -m pytest

bench: venv
	$(BIN)/python benchmarks/step_time.py

venv: $(VENV)/.done

# Torch first and by its exact version: a constraint alone would let pip weigh other builds of it.
$(VENV)/.done: pyproject.toml constraints.txt setup.py
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,demo]"
	touch $@

lint: venv
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/* tests/csrc/*

format: venv
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i csrc/* tests/csrc/*

clean:
	rm -rf $(VENV) build dist runs *.egg-info
