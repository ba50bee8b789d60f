"""A KV cache so small that requests are preempted and resumed, and LoRA beside base requests."""

import json

import pytest
from harness import PROMPTS, STRATEGIES, assert_counters_agree, sampling, strategy_for
from testproposers import Random, Switch

SMALL = {"num_gpu_blocks_override": 10, "block_size": 32, "enable_prefix_caching": False}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


@pytest.fixture(scope="module")
def starved(start, tiny_model):
    settings = {"max_consecutive_faults": 10**9}
    return start(tiny_model), start(tiny_model, "switch", 4, settings, **SMALL)


@pytest.mark.parametrize("name", STRATEGIES)
def test_preempted_requests_go_on_where_they_were(starved, name):
    baseline, engine = starved
    params = sampling({"max_tokens": 80, "ignore_eos": True})
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 200]
    answers = baseline.generate(prompts, params)
    proposer = Switch.to(strategy_for(name, answers))
    engine.reset_counters()

    outputs = engine.generate(prompts, params)

    assert engine.engine_counts()["num_preemptions"] > 0
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert proposer.usage().num_requests == engine.runtime.num_requests == 0
    assert engine.runtime.counters.num_requests == len(prompts), "a resume is not a begin"
    assert_counters_agree(engine)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_model):
    """A made-up LoRA adapter of rank 8 that changes the text."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("lora")
    torch.manual_seed(1)
    weights = {}
    for layer in range(2):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, 64)
            weights[f"{key}.lora_B.weight"] = torch.randn(width, 8) * 0.2
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(tiny_model),
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def first_difference(one, other):
    """Where two sequences part, and with which token the first goes on; None if they do not."""
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return i, a
    return None


def test_lora_requests_beside_base_requests(start, tiny_model, adapter):
    """vLLM 0.32 on a CPU computes some rows of such a batch otherwise once drafts are in it.

    Its own n-gram shows the same token in the same place, so that is what counts as right there.
    """
    from vllm.lora.request import LoRARequest

    baseline = start(tiny_model, **LORA)
    their_ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    theirs = start(
        tiny_model, speculative_config={**their_ngram, "num_speculative_tokens": 4}, **LORA
    )
    engine = start(tiny_model, "switch", 4, **LORA)
    lora = [LoRARequest("made up", 1, str(adapter)) if i % 2 else None for i in range(len(PROMPTS))]
    params = sampling({"max_tokens": 60, "ignore_eos": True})
    answers = baseline.generate(PROMPTS, params, lora_request=lora)
    plain = baseline.generate(PROMPTS, params)
    assert [a.tokens for a in answers[1::2]] != [p.tokens for p in plain[1::2]]
    known = [
        first_difference(output.tokens, answer.tokens)
        for output, answer in zip(
            theirs.generate(PROMPTS, params, lora_request=lora), answers, strict=True
        )
    ]
    assert known.count(None) >= len(PROMPTS) - 1

    for strategy in ("ngram", "prompt_lookup", Random):
        proposer = Switch.to(strategy)
        outputs = engine.generate(PROMPTS, params, lora_request=lora)
        for output, answer, excused in zip(outputs, answers, known, strict=True):
            assert first_difference(output.tokens, answer.tokens) in (None, excused)
        assert proposer.usage().num_requests == engine.runtime.num_requests == 0
    assert engine.runtime.counters.num_draft_tokens > 0
