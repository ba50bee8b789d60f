"""A KV cache so small that requests are preempted and resumed, and LoRA beside base requests."""

import pytest
from harness import (
    ALL_PROMPTS,
    PROMPTS,
    RUNNER,
    STRATEGIES,
    assert_counters_agree,
    sampling,
    strategy_for,
    thorough_on_v2,
)
from testproposers import Random, Switch
from tinymodel import make_adapter

SMALL = {"num_gpu_blocks_override": 10, "block_size": 32, "enable_prefix_caching": False}
# Room for one adapter more than there is: on a CPU, vLLM 0.32 gives requests without one, in a
# batch with others, that in the last slot.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


PARAMS = {"max_tokens": 80, "ignore_eos": True}
SHORT_PROMPTS = [prompt for prompt in ALL_PROMPTS if len(prompt) < 200]


@pytest.fixture(scope="module")
def answers(start, tiny_model):
    return start(tiny_model).generate(SHORT_PROMPTS, sampling(PARAMS))


@pytest.fixture(scope="module")
def starved(answers, start, tiny_model):
    return start(tiny_model, "switch", 4, {"max_consecutive_faults": 10**9}, **SMALL)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("suffix", "oracle") else thorough_on_v2)
        for name in STRATEGIES
    ],
)
def test_preempted_requests_go_on_where_they_were(starved, answers, name):
    proposer = Switch.to(strategy_for(name, answers))
    starved.reset_counters()

    outputs = starved.generate(SHORT_PROMPTS, sampling(PARAMS))

    assert starved.engine_counts()["num_preemptions"] > 0
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert proposer.usage().num_requests == starved.runtime.num_requests == 0
    assert starved.runtime.counters.num_requests == len(SHORT_PROMPTS), "a resume is not a begin"
    assert_counters_agree(starved)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_model):
    return make_adapter(tmp_path_factory.mktemp("lora"), tiny_model)


@thorough_on_v2
def test_lora_requests_beside_base_requests(start, tiny_model, adapter, monkeypatch):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.request import LoRARequest

    if RUNNER != "v1":
        # vLLM 0.32's V2 runner tells which adapter is whose per request. Its CPU kernel for the
        # logits, of which a draft has several, fails; this adapter changes none of them.
        monkeypatch.setattr(PunicaWrapperCPU, "add_lora_logits", lambda *_, **__: None)
    lora = [LoRARequest("made up", 1, str(adapter)) if i % 2 else None for i in range(len(PROMPTS))]
    params = sampling({"max_tokens": 60, "ignore_eos": True})
    baseline = start(tiny_model, **LORA)
    answers = baseline.generate(PROMPTS, params, lora_request=lora)
    plain = baseline.generate(PROMPTS, params)
    assert [a.tokens == p.tokens for a, p in zip(answers, plain, strict=True)] == [
        request is None for request in lora
    ]

    engine = start(tiny_model, "switch", 4, **LORA)
    for strategy in ("ngram", "prompt_lookup", Random):
        proposer = Switch.to(strategy)
        outputs = engine.generate(PROMPTS, params, lora_request=lora)
        assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
        assert proposer.usage().num_requests == engine.runtime.num_requests == 0
    assert engine.runtime.counters.num_draft_tokens > 0
