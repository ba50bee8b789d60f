PYTHON ?= python3
BIN := .venv/bin
TEXTS ?= .cache/benchmark
# Runs a command with the environment variables that engines need.
ENGINE := $(BIN)/python -m specplug.demo.environment
# Without the advertisement for its successor. Not with --quiet: it would see no warnings to be strict about.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# vLLM's V2 model runner is interpreted on a CPU, and slow: a part of its tests will do every time.
V2_TESTS := $(addprefix tests/engine/test_vllm_, text.py device.py requests.py lookahead.py \
	memory.py sampling.py startup.py recording.py ranks.py overhead.py draft_model.py)
V2_MARK ?= not thorough

.PHONY: demo docs test test-llamacpp test-v2 test-v2-sync test-v2-async test-matrix lint unit bench bench-data bench-free-text \
	bench-draft-model bench-length-policies bench-overhead soak check-releases clean setup-dev

demo:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(BIN)/specplug demo

test: lint
	@$(MAKE) --no-print-directory --jobs 2 --output-sync test-v2-sync test-v2-async
	@$(ENGINE) $(BIN)/pytest

# All tests of the V2 runner, which takes an hour.
test-v2: setup-dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync test-v2-sync test-v2-async V2_MARK=engine

test-v2-sync:
	@SPECPLUG_TEST_RUNNER=v2 $(ENGINE) $(BIN)/pytest -m "$(V2_MARK)" $(V2_TESTS)

test-v2-async:
	@SPECPLUG_TEST_RUNNER=v2-async $(ENGINE) $(BIN)/pytest -m "$(V2_MARK)" $(V2_TESTS)

# llama.cpp, built from source: about ten minutes the first time.
test-llamacpp:
	@$(PYTHON) scripts/setup_env.py --extras benchmark,dev,demo,llamacpp
	@$(BIN)/pytest tests/engine/test_llamacpp.py

# The documentation as a site, into site/.
docs:
	@$(PYTHON) scripts/setup_env.py --extras docs
	@$(MKDOCS)

unit: setup-dev
	@$(BIN)/pytest -m "not engine"

# The engine tests on older releases of vLLM too, in .venv-RELEASE: MATRIX='0.30.0' for others.
test-matrix:
	@$(PYTHON) scripts/test_matrix.py $(MATRIX)

lint: setup-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MKDOCS)

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

# What a draft model costs by batch size.
bench-draft-model:
	@$(PYTHON) scripts/setup_env.py --extras demo,draft-model,replay
	@$(BIN)/python -m benchmarks.draft_model --figure docs/explanation/draft_model_batch.svg

# Speed by length policy and batch size, in the real engine: an hour. POLICIES='--batches 1 16 --rounds 1' for less.
bench-length-policies:
	@$(PYTHON) scripts/setup_env.py --extras demo,replay
	@$(ENGINE) $(BIN)/python -m benchmarks.length_policies $(POLICIES)

# What speculation costs in the real engine when nothing is drafted.
bench-overhead:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(ENGINE) $(BIN)/python -m benchmarks.overhead

# vLLM's server under mixed traffic for ten minutes; SOAK='--proposer ngram --minutes 2' for others.
soak:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(ENGINE) $(BIN)/python scripts/soak.py $(SOAK)

# What is expected of vLLM, against the source of every supported release, and its table in the docs:
# RELEASES=--check compares, RELEASES=--write rewrites. .cache/releases keeps what was downloaded.
check-releases:
	@$(PYTHON) scripts/setup_env.py --extras demo
	@$(BIN)/python scripts/check_releases.py $(RELEASES)

setup-dev:
	@$(PYTHON) scripts/setup_env.py --extras benchmark,dev,demo

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
