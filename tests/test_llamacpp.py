"""llama-cpp-python's draft-model interface: which calls are one request, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specplug.llamacpp
from specplug import SpecplugError
from specplug.errors import OptionError

TEXT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


@pytest.fixture
def drafter():
    return specplug.llamacpp.draft("ngram", num_speculative_tokens=3)


def call(drafter, tokens):
    """Call as ``Llama`` does: with a view of its own memory, which it goes on writing to."""
    memory = np.zeros(len(tokens) + 16, np.intc)
    memory[: len(tokens)] = tokens
    found = drafter(memory[: len(tokens)])
    assert found.dtype == np.intc
    assert found.ndim == 1
    return found.tolist()


def test_a_draft(drafter):
    assert call(drafter, TEXT) == [3, 4, 5]


def test_steps_of_one_request(drafter):
    call(drafter, TEXT)
    assert call(drafter, [*TEXT, 3, 4, 9]) == []
    assert call(drafter, [*TEXT, 3, 4, 9, 1]) == []
    assert call(drafter, [*TEXT, 3, 4, 9, 1, 2]) != []
    counters = drafter.runtime.counters
    assert counters.num_requests == 1
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (3, 2)


@pytest.mark.parametrize(
    "other",
    [
        [7, 8, 9],
        TEXT,  # the same prompt again
        [*TEXT, 3, 9, 9, 9],  # not what was drafted: a longer prompt that begins alike
        TEXT[:-3],
        [9, *TEXT[1:], 3],
    ],
)
def test_what_does_not_follow_from_the_draft_is_another_request(drafter, other):
    call(drafter, TEXT)
    call(drafter, other)
    assert drafter.runtime.counters.num_requests == 2
    assert drafter.runtime.num_requests == 1


def test_the_last_request_can_be_ended(drafter):
    call(drafter, TEXT)
    drafter.end()
    assert drafter.runtime.num_requests == 0
    drafter.end()
    assert call(drafter, TEXT) == [3, 4, 5]


def test_tokens_that_the_model_may_not_have_end_a_draft():
    """Nobody says how large the vocabulary is: what was seen is in it."""
    unknown = specplug.llamacpp.draft("suffix", num_speculative_tokens=4)
    unknown.runtime.proposer.propose = lambda batch: [[3, 40, 4]]
    assert call(unknown, TEXT) == [3]
    known = specplug.llamacpp.draft("suffix", num_speculative_tokens=4, vocab_size=50)
    known.runtime.proposer.propose = lambda batch: [[3, 40, 4]]
    assert call(known, TEXT) == [3, 40, 4]


def test_a_failing_proposer_drafts_nothing(drafter):
    def fail(batch):
        raise RuntimeError("on purpose")

    drafter.runtime.proposer.propose = fail
    assert call(drafter, TEXT) == []
    assert drafter.runtime.counters.num_faults == 1


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=8))
def test_any_calls(texts):
    drafter = specplug.llamacpp.draft("suffix", num_speculative_tokens=4)
    for text in texts:
        drafted = call(drafter, text)
        assert len(drafted) <= 4
        assert all(token <= 5 for token in drafted)
    assert drafter.runtime.num_requests == 1
    assert drafter.runtime.counters.num_faults == 0
    drafter.end()
    drafter.runtime.close()


@pytest.mark.parametrize("k", [0, -1, 2.0, None, True, 129])
def test_a_wrong_k(k):
    with pytest.raises(OptionError, match="num_speculative_tokens is"):
        specplug.llamacpp.draft("ngram", num_speculative_tokens=k)


def test_wrong_names():
    with pytest.raises(SpecplugError, match="Did you mean 'ngram'"):
        specplug.llamacpp.draft("ngrm")
    with pytest.raises(OptionError, match="unknown option 'n'"):
        specplug.llamacpp.draft("ngram", n=3)
    with pytest.raises(OptionError, match="unknown option 'runner'"):
        specplug.llamacpp.draft("ngram", settings={"runner": "v1"})
