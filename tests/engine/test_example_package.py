"""The third-party package under examples/, installed as a user would, is found and runs."""

from harness import PROMPTS, assert_counters_agree, sampling

from specplug import PluginManager

NAME, DISTRIBUTION = "pair_lookup", "specplug-pair-lookup"


def test_it_is_found_by_name_with_its_origin():
    registered = PluginManager().get(NAME)
    assert registered.origin.distribution == DISTRIBUTION
    assert registered.spec.summary.startswith("Continues as the text went on")


def test_it_runs_in_the_engine(start, tiny_model):
    params = sampling({"max_tokens": 60, "ignore_eos": True})
    baseline, engine = start(tiny_model), start(tiny_model, NAME)
    answers = [answer.tokens for answer in baseline.generate(PROMPTS, params)]

    assert [output.tokens for output in engine.generate(PROMPTS, params)] == answers
    assert engine.runtime.counters.num_accepted_tokens > 0
    assert engine.runtime.counters.num_faults == 0
    assert_counters_agree(engine)
