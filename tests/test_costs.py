"""What steps cost, learnt from made-up steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.costs import StepClock
from specplug.length import Load
from specplug.lengths.adaptive import worthwhile

K = 8


def taught(seconds, sizes=(1,), extras=range(K + 1), steps=200, noise=0.1):
    """Return a clock that has seen steps of ``seconds(tokens)``."""
    clock, chance = StepClock("cpu", K), np.random.default_rng(0)
    for _ in range(steps):
        n = int(chance.choice(sizes))
        num_tokens = n + int(chance.choice([extra * n for extra in extras]))
        clock.count_step(n, num_tokens, seconds(num_tokens) * chance.lognormal(0, noise))
    return clock


def share(clock, n, extra=K):
    """Return how much longer a step takes with so many draft tokens per request."""
    none, some = clock.costs(n).of_steps([n, n * (1 + extra)])
    return some / none - 1


@pytest.mark.parametrize("added", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_a_line_is_found_through_noise(added, n):
    clock = taught(lambda num_tokens: 0.04 * (1 + added * (num_tokens / n - 1)), sizes=(n,))
    assert 1 + share(clock, n) == pytest.approx(1 + K * added, rel=0.15)


# One to nine tokens with a small model on two cores, as shares of one.
JUMPING = [1.0, 1.72, 2.06, 1.54, 1.4, 1.44, 1.82, 1.85, 1.9]


def jumping(num_tokens):
    return 0.06 * JUMPING[num_tokens - 1]


def test_a_cost_that_jumps_and_falls_again_is_found():
    clock = taught(jumping, steps=400)
    found = clock.costs(1).of_steps(range(1, K + 2)) / clock.costs(1).of_steps(1)
    assert found == pytest.approx(JUMPING, rel=0.1)


def test_one_dear_token_does_not_make_many_dearer_in_proportion():
    """Or they would never be tried: this is about text in which one draft token is likely."""
    clock = taught(jumping, extras=[0, 0, 0, 1])
    assert share(clock, 1, 1) == pytest.approx(0.72, abs=0.15)
    assert share(clock, 1) < 1.5


def test_long_drafts_are_tried_after_many_of_one_token():
    """Tried, they are seen to pay, and stay."""
    clock, likely = taught(jumping, extras=[0, 0, 0, 1]), np.full((1, K), 0.9)
    for step in range(50):
        load = Load(1, 1, K, clock.costs(1))
        (length,) = worthwhile(likely, np.array([K]), load, 0.02).tolist()
        assert length > 2, step
        clock.count_step(1, 1 + length, jumping(1 + length))


def test_lengths_between_those_seen_cost_what_is_between():
    clock = taught(jumping, extras=[0, 6])
    assert 0.1 < share(clock, 1, 1) < share(clock, 1, 3) < share(clock, 1, 6)


def test_the_shape_stays_where_nothing_is_drafted():
    clock = taught(lambda num_tokens: 0.02 * (1 + num_tokens))
    before = share(clock, 1)
    for _ in range(5000):
        clock.count_step(1, 1, 0.04)
    assert share(clock, 1) == pytest.approx(before, rel=0.1)


def test_a_pause_of_the_machine_is_no_cost():
    clock = taught(lambda num_tokens: 0.04 + 0.001 * num_tokens)
    clock.count_step(1, 9, 5.0)
    assert clock.costs(1).of_steps(1) == pytest.approx(0.041, rel=0.2)


def test_it_follows_an_engine_that_gets_slower():
    clock = taught(lambda num_tokens: 0.04 + 0.001 * num_tokens)
    for i in range(200):
        clock.count_step(1, 1 + i % 9, 0.2)
    assert clock.costs(1).of_steps([1, 9]) == pytest.approx([0.2, 0.2], rel=0.1)


def test_drafts_of_the_first_slow_steps_do_not_stay_dear():
    """An engine that warms up: were they, none would be verified again."""
    clock = StepClock("cpu", K)
    for extra in (0, 0, 2, 4, 0, 1):
        clock.count_step(4, 4 + extra, 0.011)
    for _ in range(50):
        clock.count_step(4, 4, 0.0016)
    assert share(clock, 4, 1) < 0.3


def test_a_batch_of_another_size_is_guessed_from_the_nearest():
    """Twice the requests: each draft token per request is twice the tokens."""
    clock = taught(lambda num_tokens: 0.04 + 0.004 * num_tokens)
    assert share(clock, 8) > share(clock, 1) > 0.5
    assert clock.costs(8).of_steps(0) >= 0


def test_a_jump_between_few_tokens_is_not_expected_of_large_batches():
    clock = taught(jumping)
    assert share(clock, 8, 1) < 0.72


def test_before_anything_is_known_a_token_is_cheaper_on_a_gpu():
    on_cpu, on_gpu = (StepClock(device, K) for device in ("cpu", "cuda:0"))
    assert 0 < share(on_gpu, 1, 1) < share(on_cpu, 1, 1) < 0.1


@pytest.mark.parametrize("k", [1, 2, 8, 9, 100, 256])
def test_any_number_of_draft_tokens_has_a_cost(k):
    clock = StepClock("cpu", k)
    for extra in np.random.default_rng(0).integers(0, 2 * k, 2000, endpoint=True).tolist():
        clock.count_step(2, 2 + extra, 0.1)
    costs = clock.costs(2)
    assert costs.num_tokens[0] == 2
    assert costs.num_tokens[-1] == 2 * (1 + k)
    assert costs.of_steps(range(2, 2 * k + 4)) == pytest.approx([0.1] * (2 * k + 2), rel=0.1)


def test_a_rank_decides_by_what_it_was_told_only():
    """Whatever it measures itself, which differs from rank to rank."""
    ranks = [StepClock("cpu", K, learns=False) for _ in range(2)]
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
    clock = StepClock("cpu", K)
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
    clock = StepClock("cpu", K)
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
    """Also steps with more draft tokens than there should be."""
    clock = StepClock("cpu", K)
    for n, extra, seconds in taken:
        clock.count_step(n, n * (1 + extra), seconds)
        assert_usable(clock.costs(n), n)
    for n in (1, 7, 300):
        assert_usable(clock.costs(n), n)


def assert_usable(costs, n):
    seconds = costs.of_steps(np.arange(n, n * (K + 4)))
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    assert list(costs.num_tokens) == sorted(set(costs.num_tokens))
