# Every target does its own set-up; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test lint types fuzz soak bench-start bench-idle bench-policies \
  bench-manager bench-adopt test-differential test-vllm clean

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

# Garbage into every queue, the daemon's socket and the session page, for about 60 s in
# all; another seed each time, which a failure shows. `make test` does 20 s of one seed.
fuzz: export SHMOFFLOAD_FUZZ_SEED := $(or $(SEED),$(shell date +%s))
fuzz: $(INSTALLED)
	@echo "repeat with: make fuzz SEED=$$SHMOFFLOAD_FUZZ_SEED"
	SHMOFFLOAD_FUZZ_SCALE=3 $(BIN)/python -m pytest $(wildcard tests/*/test_fuzz_*.py \
	  tests/*/*/test_fuzz_*.py)

# A live replay under random faults of every kind; prints where its JSON report is. Exit
# status 0 green, 1 not. Below MINUTES=2 not every kind gets its turn, and it says so.
MINUTES ?= 10
soak: $(INSTALLED)
	$(BIN)/python tools/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	  $(if $(MIN_FAULTS),--min-faults $(MIN_FAULTS))

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

# Adopting a kept region of 100,000 slots; fails above 1 s of CPU.
bench-adopt: $(INSTALLED)
	$(BIN)/python tools/bench/adopt.py

# auto beside lru, arc and the optimum: 16 cells; many minutes each on agentic traces.
TRACES ?= ../shared/data
bench-policies: $(INSTALLED)
	$(BIN)/python tools/bench/policies.py $(TRACES)

# Beside vLLM, in an environment of its own (3.5 GB, some minutes to make).
VLLM_PYTHON := .venv-vllm/bin/python
.venv-vllm/.installed: tools/vllm_env.sh
	tools/vllm_env.sh .venv-vllm

# Cost per key of our manager and of vLLM's, alternated in one process.
bench-manager: .venv-vllm/.installed
	$(VLLM_PYTHON) tools/bench/manager.py

# The same random trace through both managers: equal but where docs/decisions.md says.
test-differential: .venv-vllm/.installed
	$(VLLM_PYTHON) -m pytest -p no:cacheprovider tests/differential

# Real servers of vLLM 0.32 with a tiny model, its scheduler in a loop, its own tests of a
# manager; then what needs no server on 0.33 as well, and one server.
# faulthandler_timeout: a server takes longer to start than a usual test may hang.
VLLM_TREE := 0.33.0
VLLM_OVERLAY := .venv-vllm/vllm-$(VLLM_TREE)
VLLM_PYTEST := $(VLLM_PYTHON) -m pytest -p no:cacheprovider -o faulthandler_timeout=0 \
  --durations=10
$(VLLM_OVERLAY)/vllm/__init__.py: tools/vllm_env.sh
	VLLM_TREE=$(VLLM_TREE) tools/vllm_env.sh .venv-vllm
	@touch $@

test-vllm: .venv-vllm/.installed $(VLLM_OVERLAY)/vllm/__init__.py
	$(VLLM_PYTEST) tests/with_vllm
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/$(VLLM_OVERLAY) $(VLLM_PYTEST) $(VLLM_TESTS_033)

VLLM_TESTS_033 := $(addprefix tests/with_vllm/test_,$(addsuffix .py,spec manager_adapter metrics \
  kv_events workers shm_tier scheduler_loop scheduler_loop_groups server_phases))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shmoffload tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
