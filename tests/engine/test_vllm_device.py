"""A proposer whose tokens and drafts stay on the device; on the V2 runner only."""

import pytest
from harness import PROMPTS, RUNNER, sampling
from testproposers import DeviceLookup
from traffic import SCHEMA

PARAMS = {"max_tokens": 40, "ignore_eos": True}
v2_only = pytest.mark.skipif(RUNNER == "v1", reason="the V1 runner keeps tokens on the host")


@pytest.fixture(scope="module")
def baseline(start, tiny_model):
    return start(tiny_model)


@pytest.fixture(scope="module")
def engine(baseline, start, tiny_model):
    return start(tiny_model, "device_lookup", 4, {"max_consecutive_faults": 10**9})


def same_text(engine, baseline, params, prompts=PROMPTS):
    answers = baseline.generate(prompts, sampling(params))
    engine.reset_counters()
    outputs = engine.generate(prompts, sampling(params))
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert DeviceLookup.known == set() and engine.runtime.num_requests == 0
    return engine.runtime.counters


@v2_only
@pytest.mark.parametrize(
    "params", [PARAMS, {"max_tokens": 32, "structured_outputs": SCHEMA}], ids=["text", "json"]
)
def test_text_is_the_engines_own(engine, baseline, params):
    counters = same_text(engine, baseline, params)
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_faults == 0
    # The last steps are counted with the steps that follow.
    theirs = engine.engine_counts()
    assert counters.num_accepted_tokens <= theirs["num_accepted_tokens"]


@v2_only
def test_a_request_may_lower_k_or_switch_off(engine, baseline):
    for limit in (0, 2):
        extra = {"specplug_num_speculative_tokens": limit}
        counters = same_text(engine, baseline, {**PARAMS, "extra_args": extra})
        left_over = 2 * len(PROMPTS) * 4  # the last steps of what was served before
        assert counters.num_draft_tokens <= limit * counters.num_steps + left_over
        assert counters.num_steps > 3 * left_over


@v2_only
@pytest.mark.parametrize("fault", ["raise", "floats", "nothing", "outside"])
def test_faults_change_no_text(engine, baseline, monkeypatch, fault):
    monkeypatch.setattr(DeviceLookup, "fault", fault)
    counters = same_text(engine, baseline, {"max_tokens": 8}, PROMPTS[:3])
    # What the tensor holds cannot be looked at: such tokens are left out on the device.
    assert (counters.num_faults > 0) is (fault != "outside")


@pytest.mark.skipif(RUNNER != "v1", reason="this is about the V1 runner")
def test_the_v1_runner_refuses_it(start, tiny_model):
    with pytest.raises(
        Exception, match=r"needs device_tensors, which this engine does not provide"
    ):
        start(tiny_model, "device_lookup")
