PYTHON ?= python3
BIN := .venv/bin
TEXTS ?= .cache/benchmark
# Runs a command with the environment variables that engines need.
ENGINE := $(BIN)/python -m specplug.demo.environment

.PHONY: demo test lint unit bench bench-data bench-free-text clean setup-dev

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

# The benchmark's texts as JSONL, into $(TEXTS).
bench-data:
	@$(PYTHON) scripts/setup_env.py --extras benchmark,demo
	@$(BIN)/python -m benchmarks.datasets $(TEXTS)

# Tokens per step on these texts, and what drafting costs.
bench: bench-data
	@$(BIN)/python -m benchmarks.acceptance $(TEXTS)
	@$(BIN)/python -m benchmarks.cost $(TEXTS)

# Tokens per step on free text, in the real engine.
bench-free-text:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(ENGINE) $(BIN)/python -m benchmarks.free_text

setup-dev:
	@$(PYTHON) scripts/setup_env.py --extras benchmark,dev,demo

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
