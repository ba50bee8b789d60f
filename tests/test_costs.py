"""What steps cost, learnt from made-up steps."""

from math import isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.costs import StepClock


def taught(level, per_token, sizes=(1,), steps=200, noise=0.1, k=8, seed=0):
    """Return a clock that has seen steps of ``level + per_token * extra tokens`` seconds."""
    clock, chance = StepClock("cpu"), np.random.default_rng(seed)
    for _ in range(steps):
        n = int(chance.choice(sizes))
        extra = int(chance.integers(0, k * n + 1))
        seconds = (level + per_token * extra) * chance.lognormal(0, noise)
        clock.count_step(n, n + extra, seconds)
    return clock


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_a_line_is_found_through_noise(share, n):
    costs = taught(0.04, share * 0.04 / n, sizes=(n,)).costs(n)
    full = costs.base + costs.per_token * 9 * n
    none = costs.base + costs.per_token * n
    assert full / none == pytest.approx(1 + 8 * share, rel=0.2)


def test_the_slope_stays_where_nothing_is_drafted():
    clock = taught(0.04, 0.02)
    before = clock.costs(1).per_token
    for _ in range(5000):
        clock.count_step(1, 1, 0.04)
    assert clock.costs(1).per_token == pytest.approx(before, rel=0.1)


def test_a_pause_of_the_machine_is_no_cost():
    clock = taught(0.04, 0.001)
    clock.count_step(1, 9, 5.0)
    costs = clock.costs(1)
    assert costs.base + costs.per_token == pytest.approx(0.04, rel=0.2)


def test_it_follows_an_engine_that_gets_slower():
    clock = taught(0.04, 0.001)
    for i in range(200):
        clock.count_step(1, 1 + i % 9, 0.2)
    costs = clock.costs(1)
    assert costs.base + costs.per_token == pytest.approx(0.2, rel=0.1)


def test_a_batch_of_another_size_is_guessed_from_the_nearest():
    """Twice the requests: each draft token per request is twice the tokens."""
    clock = taught(0.04, 0.004)
    small, large = clock.costs(1), clock.costs(8)
    assert large.per_token * 8 / (large.base + large.per_token * 8) > (
        small.per_token / (small.base + small.per_token)
    )
    assert large.base >= 0


def test_before_anything_is_known_a_token_is_cheaper_on_a_gpu():
    on_cpu, on_gpu = (StepClock(device).costs(1) for device in ("cpu", "cuda:0"))
    assert 0 < on_gpu.per_token / on_gpu.base < on_cpu.per_token / on_cpu.base < 0.1


def test_a_rank_decides_by_what_it_was_told_only():
    """Whatever it measures itself, which differs from rank to rank."""
    ranks = [StepClock("cpu", learns=False) for _ in range(2)]
    for rank, seconds in zip(ranks, (0.01, 7.0), strict=True):
        rank.count_step(2, 6, seconds)
        for _ in range(8):
            rank.count_draft(4, seconds)
    assert ranks[0].costs(2) == ranks[1].costs(2)
    told = ranks[0].learnt()
    for rank in ranks:
        rank.adopt(told)
    assert ranks[0].costs(2) == ranks[1].costs(2)
    assert drafting(ranks[0], 4) == pytest.approx(0.01)


def drafting(clock, num_tokens):
    costs = clock.costs(2)
    return costs.per_draft + num_tokens * costs.per_draft_token


def test_what_drafting_costs_is_followed_and_one_long_call_counts_little():
    clock = StepClock("cpu")
    clock.count_draft(8, 3.0)  # the first call makes ready
    for _ in range(100):
        assert drafting(clock, 8) <= 8.1e-6
        clock.count_draft(8, 8e-6)
    assert drafting(clock, 8) == pytest.approx(8e-6)
    clock.count_draft(8, 1.0)
    assert drafting(clock, 8) < 12e-6


@pytest.mark.parametrize(("per_draft", "per_token"), [(4e-4, 1e-6), (1e-6, 1e-3)])
def test_calls_for_few_tokens_make_those_for_many_no_dearer(per_draft, per_token):
    """A lookup takes as long for one token as for many, a draft model by the token."""
    clock = StepClock("cpu")
    for _ in range(20):
        clock.count_draft(128, per_draft + 128 * per_token)
    for _ in range(60):
        clock.count_draft(4, per_draft + 4 * per_token)
    for num_tokens in (4, 128):
        assert drafting(clock, num_tokens) == pytest.approx(
            per_draft + num_tokens * per_token, rel=0.25
        )


steps = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 20), st.floats(1e-9, 1e4)), max_size=60
)


@given(steps)
def test_any_steps_leave_costs_that_can_be_used(taken):
    clock = StepClock("cpu")
    for n, extra, seconds in taken:
        clock.count_step(n, n * (1 + extra), seconds)
        costs = clock.costs(n)
        assert isfinite(costs.base) and costs.base >= 0
        assert isfinite(costs.per_token) and costs.per_token >= 0
        assert costs.base + costs.per_token * n > 0
    for n in (1, 7, 300):
        costs = clock.costs(n)
        assert costs.base + costs.per_token * n > 0
