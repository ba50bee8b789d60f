"""``draft_model`` and ``layer_skip`` in the real engine, with drafts from the target itself."""

from __future__ import annotations

import pytest
from harness import PROMPTS, RUNNER, assert_counters_agree, sampling
from tinymodel import make_tiny_model

K = 5
PARAMS = {"max_tokens": 60, "ignore_eos": True}
# The V2 runner is interpreted here, and a proposer does not care which runner calls it.
pytestmark = pytest.mark.engine if RUNNER == "v1" else pytest.mark.thorough
CACHE = {"cache_bytes": 2**24}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)


@pytest.fixture(scope="module")
def answers(start, deep_model):
    return [output.tokens for output in start(deep_model).generate(PROMPTS, sampling(PARAMS))]


@pytest.fixture(scope="module")
def engine(start, deep_model, answers):  # vLLM has the metrics of its latest engine only
    return start(deep_model, "draft_model", K, {"options": {"model": str(deep_model), **CACHE}})


def generate(engine, params=PARAMS):
    engine.reset_counters()
    outputs = engine.generate(PROMPTS, sampling(params))
    counters = engine.runtime.counters
    assert counters.num_faults == 0
    assert engine.runtime.num_requests == engine.runtime.proposer.usage().num_requests == 0
    assert_counters_agree(engine)
    return [output.tokens for output in outputs], counters


def test_the_target_as_its_own_draft_has_everything_accepted(engine, answers):
    """More prompts than rows: requests wait, join, are read in chunks, and end."""
    empty = engine.runtime.proposer.usage()
    outputs, counters = generate(engine)
    assert outputs == answers
    assert counters.acceptance_rate == 1.0
    assert counters.tokens_per_step > K - 0.5
    assert engine.runtime.proposer.usage() == empty


def test_under_sampling_nothing_fails(engine):
    _, counters = generate(engine, {"max_tokens": 40, "temperature": 1.0})
    assert 0 < counters.acceptance_rate < 1


def test_preempted_requests_go_on_with_the_cache_that_they_had(start, deep_model, answers):
    engine = start(
        deep_model, "draft_model", K, {"options": {"model": str(deep_model), **CACHE}},
        kv_cache_memory_bytes=None, num_gpu_blocks_override=5, block_size=64, max_num_seqs=4,
    )  # fmt: skip
    outputs, counters = generate(engine)
    assert outputs == answers
    assert engine.engine_counts()["num_preemptions"] > 0
    assert counters.acceptance_rate == 1.0


def test_the_first_layers_have_a_rate_of_their_own(start, deep_model, answers):
    rates = []
    for count in (1, 2, 3):
        engine = start(
            deep_model, "layer_skip", K, {"options": {"num_layers": count, **CACHE}}
        )  # by default, of the model that is served
        outputs, counters = generate(engine)
        assert outputs == answers
        rates.append(counters.acceptance_rate)
    assert 0 < rates[0] < rates[2] < 1
    assert len(set(rates)) == 3


def test_layers_are_chosen_and_a_cascade_asks_for_what_lookup_has_not(start, deep_model, answers):
    options = {"parts": ["suffix", "layer_skip"], "part_options": {"layer_skip": CACHE}}
    engine = start(deep_model, "cascade", K, {"options": options})
    outputs, counters = generate(engine)
    assert outputs == answers
    # The layers are chosen by their time, and the V2 runner has one thread only here.
    assert counters.tokens_per_step > (1.2 if RUNNER == "v1" else 1.1)


def test_what_does_not_fit_is_refused_at_start_up(start, deep_model):
    with pytest.raises(Exception) as caught:
        start(
            deep_model, "draft_model", K, {"options": {"model": str(deep_model), "cache_bytes": 9}}
        )
    for word in ("bad-option", "for one request of 256 tokens", "cache_bytes is 9 bytes"):
        assert word in str(caught.value)


def test_another_tokenizer_is_translated_and_the_text_is_the_same(
    start, deep_model, answers, tmp_path
):
    from tinymodel import make_tokenizer
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(deep_model).save_pretrained(tmp_path)
    make_tokenizer(300, "parsers readers filed writers rewrite another").save_pretrained(tmp_path)
    engine = start(deep_model, "draft_model", K, {"options": {"model": str(tmp_path), **CACHE}})
    outputs, counters = generate(engine)
    assert outputs == answers
    assert counters.num_draft_tokens > 0
