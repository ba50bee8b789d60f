"""Sampled text has the target's own distribution, and the test would notice if it had not.

A model with four tokens, temperature 1, thousands of short samples: the joint distribution of
the first four tokens has 256 cells, three of the four positions are drafted.
"""

from collections import Counter

import pytest
from scipy.stats import chi2_contingency
from testproposers import Coin, Switch

VOCABULARY = 4
SAMPLES = 6000
LENGTH = 4
K = LENGTH - 1
ALPHA = 1e-4


@pytest.fixture(scope="module")
def four_tokens(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "four"
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
            initializer_range=0.15,
        )
    ).save_pretrained(path)  # fmt: skip
    return path


def counts(engine) -> Counter:
    from vllm import SamplingParams

    # One token more than is looked at: the last one is never drafted.
    params = SamplingParams(
        temperature=1.0, max_tokens=LENGTH + 1, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": [0, 1, 2, 3]}] * SAMPLES
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids[:LENGTH]) for output in outputs)


def p_value(one: Counter, other: Counter) -> float:
    """Two-sample chi-square; cells too thin for it are put together."""
    cells = [cell for cell in one | other if one[cell] + other[cell] >= 20]
    rest = [SAMPLES - sum(sample[cell] for cell in cells) for sample in (one, other)]
    rows = [[sample[cell] for cell in cells] for sample in (one, other)]
    if sum(rest) >= 20:
        rows = [[*row, left] for row, left in zip(rows, rest, strict=True)]
    return chi2_contingency(rows).pvalue


@pytest.fixture(scope="module")
def run(start, four_tokens):
    def sample(proposer=None, **speculative):
        arguments = {"speculative_config": speculative} if speculative else {}
        engine = start(
            four_tokens, proposer, K, max_model_len=32, max_num_seqs=256,
            max_num_batched_tokens=2048, skip_tokenizer_init=True, **arguments,
        )  # fmt: skip
        return engine, counts(engine)

    Switch.to(lambda: Coin(VOCABULARY))
    return sample


def test_random_drafts_leave_the_distribution_as_it_is(run):
    _, plain = run()
    engine, drafted = run("switch")
    counters = engine.runtime.counters
    assert counters.num_draft_tokens > SAMPLES and 0.1 < counters.acceptance_rate < 0.9
    assert p_value(plain, drafted) > ALPHA

    # The same test must fail when a verifier accepts whatever it is given.
    _, forced = run(
        "switch", rejection_sample_method="synthetic", synthetic_acceptance_rates=[1.0] * K
    )
    assert p_value(plain, forced) < ALPHA / 100
