"""What a request may bring along: a prediction, a namespace of the cache."""

from __future__ import annotations

import pytest
from harness import PROMPTS, assert_counters_agree, sampling

K = 4
PARAMS = {"max_tokens": 41, "ignore_eos": True}


@pytest.fixture(scope="module")
def answers(start, tiny_model):
    return start(tiny_model).generate(PROMPTS, sampling(PARAMS))


@pytest.fixture(scope="module")
def engine(answers, start, tiny_model):
    settings = {"options": {"fallback_options": {"cache_prompts": True}}}
    return start(tiny_model, "prediction", K, settings)


def served(engine, answers, extra_args):
    """Serve with these arguments, one mapping per prompt; check the text, return the counters."""
    engine.reset_counters()
    params = [sampling({**PARAMS, "extra_args": extra}) for extra in extra_args]
    outputs = engine.generate(PROMPTS, params)
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert engine.runtime.num_requests == engine.runtime.proposer.usage().num_requests == 0
    assert engine.runtime.counters.num_faults == 0
    assert_counters_agree(engine)
    return engine.runtime.counters


def test_a_right_prediction_is_accepted_whole(engine, answers):
    counters = served(
        engine, answers, [{"specplug_prediction_token_ids": a.tokens} for a in answers]
    )
    assert counters.acceptance_rate == 1.0
    assert counters.mean_acceptance_length == K + 1


def test_a_prediction_may_be_text(engine, answers):
    counters = served(engine, answers, [{"specplug_prediction": answer.text} for answer in answers])
    # Text of made-up tokens is not always cut into the same tokens again.
    assert counters.num_accepted_tokens > 5 * len(PROMPTS)


def test_after_an_edit_a_prediction_goes_on(engine, answers):
    edited = [[*a.tokens[:10], 5, 6, *a.tokens[12:20], *a.tokens[23:]] for a in answers]
    counters = served(engine, answers, [{"specplug_prediction_token_ids": ids} for ids in edited])
    assert counters.num_accepted_tokens > 20 * len(PROMPTS)


@pytest.mark.parametrize(
    "bad",
    [
        {"specplug_prediction_token_ids": [10**6]},
        {"specplug_prediction_token_ids": "x"},
        {"specplug_prediction_token_ids": [1] * 200_000},
        {"specplug_prediction": 3},
    ],
)
def test_a_bad_prediction_costs_nothing_but_itself(engine, answers, bad, caplog):
    served(engine, answers, [bad] * len(PROMPTS))


def test_requests_draft_from_earlier_ones_of_their_namespace_only(engine, answers):
    def accepted(namespace):
        extra = {"specplug_cache_namespace": namespace}
        return served(engine, answers, [extra] * len(PROMPTS)).num_accepted_tokens

    first = accepted("tenant a")
    again = accepted("tenant a")
    other = accepted("tenant b")
    assert again > 30 * len(PROMPTS)
    assert first < again and other < again
