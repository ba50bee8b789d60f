"""Sampled text has the target's own distribution, and the test would notice if it had not.

A model with four tokens, temperature 1, thousands of short samples: the joint distribution of
the first four tokens has 256 cells, three of the four positions are drafted. On the V2 runner,
which is interpreted here, hundreds of samples of three tokens: 64 cells.
"""

from collections import Counter

import pytest
from harness import RUNNER, thorough_on_v2
from scipy.stats import chi2_contingency
from testproposers import Coin, Switch

pytestmark = thorough_on_v2

VOCABULARY = 4
SAMPLES, LENGTH = (6000, 4) if RUNNER == "v1" else (512, 3)
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


def accept_everything(draft_token_ids, num_draft_tokens, max_spec_len, *arguments, **more):
    """A verifier that is wrong on purpose: every draft counts as accepted."""
    import torch

    bonus_token_ids = arguments[3]
    output = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
    for row, drafted in enumerate(draft_token_ids.split(num_draft_tokens)):
        output[row, : len(drafted)] = drafted
        output[row, len(drafted)] = bonus_token_ids[row, 0]
    return output


def accept_everything_v2(logits, _, token_ids, cu_num_logits, *arguments, **more):
    """The same for the V2 runner: for each request its last token, then its drafts."""
    import torch

    counts = cu_num_logits.diff()
    output = torch.zeros(len(counts), K + 1, dtype=torch.int64)
    for row, count in enumerate(counts.tolist()):
        begin, end = cu_num_logits[row], cu_num_logits[row + 1]
        output[row, : count - 1] = token_ids[begin + 1 : end]
        output[row, count - 1] = logits[end - 1].argmax()
    return output, counts.int()


def test_random_drafts_leave_the_distribution_as_it_is(run, monkeypatch):
    _, plain = run()
    engine, drafted = run("switch")
    counters = engine.runtime.counters
    assert counters.num_drafts > SAMPLES
    first = counters.num_accepted_tokens_per_pos[0] / counters.num_drafts
    # A uniform guess is right that often; five standard deviations.
    assert first == pytest.approx(1 / VOCABULARY, abs=2.2 / SAMPLES**0.5)
    assert p_value(plain, drafted) > ALPHA

    # The same test must fail when a verifier accepts whatever it is given.
    if RUNNER == "v1":
        from vllm.v1.sample import rejection_sampler

        monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_everything)
    else:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_everything_v2)
    assert p_value(plain, counts(engine)) < ALPHA / 100


@pytest.mark.skipif(RUNNER != "v1", reason="V2 does not use what is repaired")
def test_the_repair_of_vllms_sampling_on_a_cpu_is_still_needed_and_right(run, monkeypatch):
    """When this fails because vLLM was mended, the repair in v1.py can go."""
    import torch
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    from specplug.backends.vllm import v1

    def stock(x, cumulated, num_tokens, *replace):
        expanded = torch.zeros(num_tokens, dtype=x.dtype)
        cpu_triton_utils._expand_kernel_impl(expanded, x, cumulated, *replace)
        return expanded

    assert not v1.expands_floats(stock)
    run("switch")
    assert v1.expands_floats(rejection_sampler.expand_batch_to_tokens)
    x, cumulated = torch.tensor([5, 0, 7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert v1.expand_batch_to_tokens(x, cumulated, 5, 0, 1).tolist() == [5, 5, 7, 7, 7]
