"""The benchmark's baselines against an obvious search, and against the engines' own code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines import BASELINES, earliest_match
from specplug import PluginManager

SIZES = [(5, 5), (2, 4), (1, 2), (3, 3)]
MANAGER = PluginManager(discover=False)
for baseline in BASELINES:
    MANAGER.add(baseline)

texts = st.sampled_from([2, 4, 30]).flatmap(
    lambda alphabet: st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=60)
)
limits = st.integers(1, 9)


def obvious(text, limit, min_n, max_n):
    for n in range(max_n, min_n - 1, -1):
        for end in range(n, len(text)):
            if text[end - n : end] == text[-n:]:
                return text[end : end + limit]
    return []


@pytest.fixture(scope="module")
def draft(make_batch):
    def draft(name, options, text, limit):
        proposer, _ = MANAGER.create(name, options, frozenset())
        return proposer.propose(make_batch([text], [limit]))[0]

    return draft


@pytest.mark.parametrize(("min_n", "max_n"), SIZES)
@given(text=texts, limit=limits)
def test_the_vllm_baseline_equals_the_obvious_search(draft, min_n, max_n, text, limit):
    options = {"min_n": min_n, "max_n": max_n}
    drafted = draft("baseline_vllm_ngram", options, text, limit)
    assert drafted == obvious(text, limit, min_n, max_n)


@given(text=texts, limit=limits)
def test_without_options_the_baselines_are_the_engines_defaults(draft, text, limit):
    assert draft("baseline_vllm_ngram", {}, text, limit) == obvious(text, limit, 5, 5)
    assert draft("baseline_hf_prompt_lookup", {}, text, limit) == obvious(text, limit, 1, 2)


def test_one_token_ten_thousand_times():
    tokens = np.zeros(10_000, np.int32)
    assert earliest_match(tokens, 8, min_n=5, max_n=5) == [0] * 8


@pytest.mark.parametrize(("min_n", "max_n"), SIZES)
@given(text=texts, limit=limits)
def test_the_vllm_baseline_equals_vllm(draft, min_n, max_n, text, limit):
    ngram = pytest.importorskip("vllm.v1.spec_decode.ngram_proposer", reason="needs vLLM")
    theirs = ngram._find_longest_matched_ngram_and_propose_tokens(
        np.array(text, np.int32), min_n, max_n, 1000, limit
    )
    options = {"min_n": min_n, "max_n": max_n}
    assert draft("baseline_vllm_ngram", options, text, limit) == theirs.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("eos", [None, 1])
@given(text=texts, limit=limits)
def test_the_hf_baseline_equals_transformers(draft, size, eos, text, limit):
    torch = pytest.importorskip("torch", reason="needs torch")
    candidates = pytest.importorskip(
        "transformers.generation.candidate_generator", reason="needs transformers"
    )
    generator = candidates.PromptLookupCandidateGenerator(
        eos_token_id=None if eos is None else torch.tensor([eos]),
        num_output_tokens=limit,
        max_matching_ngram_size=size,
        max_length=1000,
    )
    theirs, _ = generator.get_candidates(torch.tensor([text]))
    options = {"max_matching_ngram_size": size, "eos_token_id": eos}
    drafted = draft("baseline_hf_prompt_lookup", options, text, limit)
    assert text + drafted == theirs[0].tolist()
