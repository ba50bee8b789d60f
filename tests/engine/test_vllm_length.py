"""Length policies in the real engine: the text is its own, what does not pay is not verified."""

import pytest
from harness import PROMPTS, assert_counters_agree, sampling, strategy_for, thorough_on_v2
from testproposers import Switch

pytestmark = thorough_on_v2
PARAMS = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def answers(start, tiny_model):
    return start(tiny_model).generate(PROMPTS, sampling(PARAMS))


@pytest.fixture(scope="module")
def engine(answers, start, tiny_model):
    return start(tiny_model, "switch", 8, {"length_policy": "adaptive"})


@pytest.mark.parametrize("name", ["suffix", "oracle", "random", "raising", "nonsense"])
def test_the_text_is_the_engines_own(engine, answers, name):
    Switch.to(strategy_for(name, answers))
    engine.reset_counters()
    outputs = engine.generate(PROMPTS, sampling(PARAMS))
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    counters = engine.runtime.counters
    assert counters.num_draft_tokens <= counters.num_proposed_tokens
    if name == "random":
        # Fixed lengths would verify nearly 8 at every step.
        assert counters.num_draft_tokens < 8 * counters.num_steps / 2
    if name == "oracle":
        assert counters.num_accepted_tokens > 0
    assert engine.runtime.length.num_faults == 0
    assert engine.runtime.length.costs.learnt().steps
    assert_counters_agree(engine)
