"""Real llama.cpp on SmolLM2's own GGUF file; ``make test-llamacpp`` builds it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

import specplug.llamacpp
from specplug.demo.model import packaged_weights
from specplug.demo.prompts import PROMPTS
from specplug.testing import BackendConformance

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: make test-llamacpp"
)

K = 5
NUM_TOKENS = 32
NEAR = 0.25
"""Logits that differ by less are decided by rounding: the weights have four bits."""


def make(draft_model=None):
    return llama_cpp.Llama(
        str(packaged_weights()), n_ctx=1024, n_threads=2, n_threads_batch=2, logits_all=True,
        verbose=False, draft_model=draft_model,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    return make()


@pytest.fixture(scope="module")
def prompts(plain):
    """A text to copy, another to quote, and one to invent."""
    return [plain.tokenize(PROMPTS[i].text.encode()) for i in (0, 2, -1)]


@pytest.fixture(scope="module")
def expected(plain, prompts):
    return [answer(plain, prompt) for prompt in prompts]


def answer(llama, prompt, max_tokens=NUM_TOKENS):
    return list(islice(llama.generate(prompt, temp=0.0), max_tokens))


def assert_same_but_for_near_ties(plain, prompt, found, expected):
    """Where texts part, plain llama.cpp must itself be undecided between the two tokens."""
    parts = next((i for i, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]), None)  # noqa: B905
    if parts is None:
        assert len(found) == len(expected)
        return
    plain.reset()
    plain.eval([*prompt, *expected[:parts]])
    logits = plain.scores[plain.n_tokens - 1]
    assert abs(logits[found[parts]] - logits[expected[parts]]) < NEAR
    assert logits[expected[parts]] > np.sort(logits)[-2] - NEAR


class TestLlamaCpp(BackendConformance):
    prompts = tuple(PROMPTS[i].text for i in (0, 2, -1))
    max_tokens = NUM_TOKENS
    num_speculative_tokens = K

    @pytest.fixture(autouse=True)
    def llama(self, plain):
        self._plain = plain

    def plain(self, prompts, max_tokens):
        return self._answers(self._plain, prompts, max_tokens)

    def with_proposer(self, name, settings, num_speculative_tokens, prompts, max_tokens):
        self._drafter = specplug.llamacpp.draft(
            name, num_speculative_tokens=num_speculative_tokens, settings=settings
        )
        found = self._answers(make(self._drafter), prompts, max_tokens)
        self._drafter.end()  # nothing else tells that the last request has ended
        return found

    def check_same(self, prompt, own, answer):
        assert_same_but_for_near_ties(self._plain, self._tokens(prompt), answer, own)

    def _answers(self, llama, prompts, max_tokens):
        return [answer(llama, self._tokens(prompt), max_tokens) for prompt in prompts]

    def _tokens(self, prompt):
        return self._plain.tokenize(prompt.encode())


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "lookahead", "cascade"])
def test_text_is_the_engines_own(plain, prompts, expected, proposer):
    drafter = specplug.llamacpp.draft(proposer, num_speculative_tokens=K)
    llama = make(drafter)
    for prompt, own in zip(prompts, expected, strict=True):
        assert_same_but_for_near_ties(plain, prompt, answer(llama, prompt), own)
    counters = drafter.runtime.counters
    assert counters.num_requests == len(prompts)
    assert counters.num_faults == 0
    assert counters.num_accepted_tokens > 0
    drafter.end()
    assert drafter.runtime.num_requests == 0


def test_the_check_notices_another_text(plain, prompts, expected):
    wrong = [*expected[0][:3], expected[0][3] + 1, *expected[0][4:]]
    with pytest.raises(AssertionError):
        assert_same_but_for_near_ties(plain, prompts[0], wrong, expected[0])
