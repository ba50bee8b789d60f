"""Length policies against each other, by replay under a step-cost model.

What a draft token costs is what it was measured to cost vLLM on two cores with as many requests:
little beside the weights for one, a good part of a step of its own for many.
"""

from __future__ import annotations

import numpy as np
import pytest

from specplug.replay.records import Record
from specplug.replay.run import Candidate, replay

TOKEN_COSTS = {1: 0.0115, 4: 0.03, 16: 0.067, 32: 0.08}
"""By requests at a time; as a share of a step that computes no tokens."""
LENGTHS = (2, 4, 8)


def served(num_requests):
    """Return how many requests there are, so that places in the batch are taken over."""
    return max(8, 2 * num_requests)


def copies(chance, count):
    """Answers that repeat the question, a word of thirty changed."""
    for i in range(count):
        prompt = chance.integers(100, 5000, 128)
        output = np.where(chance.random(96) < 1 / 30, chance.integers(100, 5000, 96), prompt[:96])
        yield Record(f"copy {i}", np.append(prompt, output).astype(np.int32), len(prompt))


def free_text(chance, count):
    """Answers of a few frequent words and many rare ones, so that drafts are found, but wrong."""
    for i in range(count):
        words = np.minimum(chance.zipf(1.3, 160), 4999)
        yield Record(f"free {i}", words.astype(np.int32), 64)


def speed(records, num_requests, policy, k):
    result = replay(
        records, Candidate("suffix", {"cache_bytes": 0}), k, concurrency=num_requests,
        length_policy=policy, token_cost=TOKEN_COSTS[num_requests],
    )  # fmt: skip
    assert result.counters.num_faults == 0
    return result.speed


def speeds(records, num_requests):
    """Return the best fixed length's, and that of ``adaptive``."""
    fixed = max(speed(records, num_requests, "fixed", k) for k in LENGTHS)
    return fixed, speed(records, num_requests, "adaptive", max(LENGTHS))


@pytest.mark.parametrize("num_requests", TOKEN_COSTS)
def test_copies_are_as_fast_as_with_the_best_fixed_length(num_requests):
    records = list(copies(np.random.default_rng(1), served(num_requests)))
    fixed, adaptive = speeds(records, num_requests)
    assert fixed > 1.1
    assert adaptive > 0.97 * fixed


@pytest.mark.parametrize("num_requests", TOKEN_COSTS)
def test_free_text_is_as_fast_as_without_speculation(num_requests):
    records = list(free_text(np.random.default_rng(2), served(num_requests)))
    assert speed(records, num_requests, "adaptive", max(LENGTHS)) > 0.98


@pytest.mark.parametrize("num_requests", [n for n in TOKEN_COSTS if n > 1])
def test_a_mixed_batch_is_faster_than_with_any_fixed_length(num_requests):
    chance, each = np.random.default_rng(3), served(num_requests)
    pairs = zip(copies(chance, each), free_text(chance, each), strict=True)
    fixed, adaptive = speeds([record for pair in pairs for record in pair], num_requests)
    assert adaptive > fixed
