PYTHON ?= python3
BIN := .venv/bin
# Runs a command with the environment variables that engines need.
ENGINE := $(BIN)/python -m specplug.demo.environment

.PHONY: demo test lint unit clean setup-dev

demo:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(BIN)/specplug demo

test: lint
	@$(ENGINE) $(BIN)/pytest

unit: setup-dev
	@$(BIN)/pytest -m "not engine"

lint: setup-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

setup-dev:
	@$(PYTHON) scripts/setup_env.py --extras dev,demo

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
