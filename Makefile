# Needs make, bash and Python 3.11 or newer with venv and pip; everything else comes from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
UV_VERSION := 0.13.9
MEMBERS := onepen schemas processors streams sinks tests

.DEFAULT_GOAL := help
.PHONY: help run env test integration long bench format lint types lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: env ## start everything and play the founding story; ONCE=1 ends after the story
	@exec $(BIN)/onepen up --demo $(if $(filter-out 0,$(ONCE)),--once)

env: $(VENV)/.package ## the environment with the locked dependencies

# Stamps: nothing is asked of pip while the lock file and pyproject.toml stand as they were.
$(VENV)/.dependencies: requirements.lock
	@command -v "$(PYTHON)" >/dev/null || { echo "onepen needs Python 3.11 or newer, and '$(PYTHON)' was not found: name one with 'make PYTHON=/path/to/python3.11'." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "onepen needs Python 3.11 or newer, and '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1): name another with 'make PYTHON=/path/to/python3.11'." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' has no venv module: install it (on Debian and Ubuntu the package python3-venv) and run make again." >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@printf 'Installing %s locked packages into $(VENV) (a minute or two, only when the lock changes) ' "$$(grep -c '==' requirements.lock)"
	@set -o pipefail; $(PIP) install --progress-bar off --only-binary :all: --require-hashes -r requirements.lock \
		| awk '/^(Collecting|Requirement already)/ {printf "."; fflush()} END {print ""}'
	@touch $@

$(VENV)/.package: $(VENV)/.dependencies pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test: env ## what is quick enough for a person (about 4 minutes on two cores)
	@exec $(BIN)/python -m tests.side_by_side

integration: env ## only the tests on real Kafka and PostgreSQL
	$(BIN)/python -m pytest -m "not long" --session-timeout=600 tests/integration

long: env ## the longer suites
	$(BIN)/python -m pytest -m long --session-timeout=1700 tests

# One file a day; every line names the load and a calibration of the machine it was measured on.
bench: env ## how fast it is (a quarter of an hour): JSON lines in infra/bench/results/
	@out=infra/bench/results/$$(date -u +%F).jsonl; for part in core engine latency runs topology scale_out sessions recovery fairness timers takeover; do $(BIN)/python -m infra.bench.$$part --out $$out || exit 1; done

format: env ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

lint: env ## style, banned imports, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: env ## mypy, strict
	$(BIN)/mypy -p onepen

# One lock for Linux and macOS, Python 3.11 and newer, with hashes and without any address or path.
lock: ## resolve the newest versions again
	"$(PYTHON)" -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(VENV)-lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		--all-extras --group build pyproject.toml -o requirements.lock
	rm -rf $(VENV)-lock

clean: ## remove the environment, caches and builds (never the data of the stack: that is `onepen reset`)
	rm -rf $(VENV) $(VENV)-lock dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(MEMBERS) -name __pycache__ -type d -prune -exec rm -rf {} +
