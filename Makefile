# Every target does its own set-up; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test lint types bench-start bench-idle clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/shmoffload demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# CPU seconds (user + system) of `shmoffload status`, best of 5; fails at 0.3 s.
bench-start: $(INSTALLED)
	$(BIN)/python tools/bench/start.py

# CPU of a whole resting session over 60 s, after a replay; fails at 1 % of a core.
bench-idle: $(INSTALLED)
	$(BIN)/python tools/bench/idle.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shmoffload tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
