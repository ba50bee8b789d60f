"""The built-in proposers by their own names, with a real model on realistic prompts."""

import pytest
from harness import assert_counters_agree, sampling

from specplug.demo.prompts import PROMPTS

K = 6
REAL = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**30,
}


@pytest.fixture(scope="module")
def conversations():
    return [[{"role": "user", "content": prompt.text}] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def answers(start, smollm2, conversations):
    return chat(start(smollm2, **REAL), conversations)


def chat(engine, conversations):
    outputs = engine.llm.chat(conversations, sampling({"max_tokens": 80}), use_tqdm=False)
    engine.settle()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("proposer", ["ngram", "prompt_lookup"])
def test_text_is_the_same_and_drafts_are_accepted(start, smollm2, conversations, answers, proposer):
    engine = start(smollm2, proposer, K, **REAL)

    assert chat(engine, conversations) == answers

    counters = engine.runtime.counters
    assert counters.acceptance_rate > 0.2
    assert counters.tokens_per_step > 1.05
    assert counters.num_faults == 0
    assert engine.runtime.num_requests == engine.runtime.proposer.usage().num_requests == 0
    assert engine.runtime.proposer.usage().num_bytes == 0
    assert_counters_agree(engine)
