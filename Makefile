# make run | test | slow | check | fix | bench | tables | wheel | clean: each does its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

PROMPT ?= class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):\n

.PHONY: run test slow check fix bench tables wheel clean

run: $(STAMP)
	@printf '$(PROMPT)' | tee /dev/stderr | $(BIN)/soloist run etude --prompt - --max-tokens 128

# Tests that read a clock closely have the cores to themselves. 5: PYTEST_ARGS selects none of that part.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not timed" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m timed $(PYTEST_ARGS) || [ $$? -eq 5 ]

# Tests that take minutes each: before a release.
slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "slow and not timed" $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "slow and timed" $(PYTEST_ARGS) || [ $$? -eq 5 ]

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/soloist bench decode etude --against transformers

# The tables and figures of all documents, from result files.
tables: $(STAMP)
	$(BIN)/python benchmarks/tables.py

# dist/soloist-VERSION-py3-none-any.whl
wheel: $(STAMP)
	$(BIN)/python -m hatchling build --target wheel

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# requirements.txt pins every package, so that two machines run the same code.
$(STAMP): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Soloist needs Python 3.11 or newer")'
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m pip install --quiet --target $(VENV)-bootstrap virtualenv && \
		PYTHONPATH=$(VENV)-bootstrap $(PYTHON) -m virtualenv --quiet $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(STAMP)
