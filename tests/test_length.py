"""Length policies: the built-in ones, and the control that guards any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import (
    Drafts,
    LengthPolicy,
    LengthPolicySpec,
    Load,
    Outcome,
    PluginManager,
    Proposer,
    Request,
    Runtime,
    StepCosts,
)
from specplug.config import Settings
from specplug.errors import LengthPolicyConflictError, OptionError, UnknownLengthPolicyError
from specplug.length_control import LengthControl
from specplug.lengths.adaptive import worthwhile
from specplug.runtime import Arrival, Step

K = 8
FREE = StepCosts.line(1.0, 0.0)
CHEAP = StepCosts.line(1.0, 0.01)
BOUND = StepCosts.line(0.0, 1.0)
"""A step that costs what its tokens cost: nothing that may be rejected pays."""


def load(n=1, costs=CHEAP, most=10_000, running=None):
    return Load(n if running is None else running, n, most, costs)


def drafts(lengths, scores=None):
    n = len(lengths)
    return Drafts(
        np.zeros((n, K), np.int32),
        np.array(lengths, np.int32),
        None if scores is None else np.array(scores, np.float32),
    )


def outcome(slots, matched, judged):
    def column(values):
        return np.array(values, np.int32)

    return Outcome(
        [f"r{slot}" for slot in slots],
        column(slots), column([K] * len(slots)), column([0] * len(slots)),
        column(matched), column(judged),
    )  # fmt: skip


class Policy:
    """A policy with requests r0, r1, ... in slots 0, 1, ..."""

    def __init__(self, make_engine, make_batch, name, n=1, **options):
        self.policy = PluginManager().create_length_policy(name, options)
        self.policy.prepare(make_engine(num_speculative_tokens=K))
        for slot in range(n):
            self.policy.begin(Request(f"r{slot}", slot, [1], 100, K))
        self.batch = make_batch([[1, 2]] * n, [K] * n)

    def choose(self, lengths, costs=CHEAP, scores=None, **more):
        of = load(len(lengths), costs, **more)
        return self.policy.choose(self.batch, drafts(lengths, scores), of).tolist()


@pytest.fixture
def make(make_engine, make_batch):
    return lambda name, n=1, **options: Policy(make_engine, make_batch, name, n, **options)


# -- fixed and match_scaled -----------------------------------------------------------------


def test_fixed_takes_all(make):
    assert make("fixed", 3).choose([0, 3, K], BOUND) == [0, 3, K]


def test_match_scaled_follows_the_product_of_the_scores(make):
    scores = [[0.9] * K, [0.5] * K, [0.1] * K]
    assert make("match_scaled", 3, min_probability=0.25).choose([K, K, K], scores=scores) == [
        K, 2, 0,
    ]  # fmt: skip
    assert make("match_scaled", 2).choose([3, K]) == [3, K]  # no scores


# -- adaptive -------------------------------------------------------------------------------


def test_the_first_draft_is_taken_where_tokens_are_cheap(make):
    assert make("adaptive").choose([K], StepCosts.line(1.0, 0.001)) == [K]
    sure = [[1.0] * K]
    assert make("adaptive").choose([K], StepCosts.line(1.0, 0.004), scores=sure) == [K]
    assert make("adaptive").choose([K], BOUND, scores=sure) == [0]


def test_what_a_position_taught_counts_for_the_others_until_they_are_judged(make):
    many = make("adaptive", 16)
    costs = StepCosts.line(1.0, 0.06)
    first = many.choose([K] * 16, costs)
    many.policy.observe(outcome(range(16), [1] * 16, [1] * 16))  # only first tokens, all right
    assert sum(many.choose([K] * 16, costs)) > sum(first)
    for _ in range(2):
        many.policy.observe(outcome(range(16), [0] * 16, [1] * 16))
    assert sum(many.choose([K] * 16, costs)) == 0


def test_it_falls_fast_on_text_that_repeats_nothing_and_rises_fast_on_a_copy(make):
    one = make("adaptive")
    costs = StepCosts.line(1.0, 0.05)
    first = one.choose([K], costs)[0]
    lengths = []
    for _ in range(6):  # the first token is wrong, six times in a row
        one.policy.observe(outcome([0], [0], [1]))
        lengths.append(one.choose([K], costs)[0])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= 1 < first
    for _ in range(2):  # two whole drafts come true
        one.policy.observe(outcome([0], [K], [K]))
        lengths.append(one.choose([K], costs)[0])
    assert lengths[-1] == K


def test_it_rises_from_nothing_though_nothing_was_verified(make):
    """What was cut is judged by the token that came instead."""
    one = make("adaptive")
    costs = StepCosts.line(1.0, 0.3)
    for _ in range(30):
        one.choose([K], costs)
        one.policy.observe(outcome([0], [0], [1]))
    assert one.choose([K], costs) == [0]
    steps = 0
    while one.choose([K], costs) == [0]:
        one.policy.observe(outcome([0], [1], [1]))
        steps += 1
    assert steps <= 6


def test_one_step_tells_that_all_requests_stopped_copying(make):
    many = make("adaptive", 16)
    costs, sure = StepCosts.line(1.0, 0.06), [[1.0] * K] * 16
    for _ in range(20):
        many.choose([K] * 16, costs, sure)
        many.policy.observe(outcome(range(16), [K] * 16, [K] * 16))
    assert sum(many.choose([K] * 16, costs, sure)) == 16 * K
    for slot in range(16):  # new requests, of which nothing is known
        many.policy.begin(Request(f"r{slot}", slot, [1], 100, K))
    many.choose([K] * 16, costs, sure)
    many.policy.observe(outcome(range(16), [0] * 16, [1] * 16))
    assert sum(many.choose([K] * 16, costs, sure)) == 0
    for _ in range(2):
        many.policy.observe(outcome(range(16), [K] * 16, [K] * 16))
    assert sum(many.choose([K] * 16, costs, sure)) == 16 * K


def test_one_wrong_token_after_many_right_ones_changes_little(make):
    one = make("adaptive")
    costs, sure = StepCosts.line(1.0, 0.06), [[1.0] * K]
    for _ in range(20):
        one.choose([K], costs, sure)
        one.policy.observe(outcome([0], [K], [K]))
    one.policy.observe(outcome([0], [0], [1]))
    assert one.choose([K], costs, sure) == [K]


def test_requests_differ_and_the_budget_goes_where_it_pays(make):
    two = make("adaptive", 2)
    costs = StepCosts.line(1.0, 0.1)
    for _ in range(10):
        two.choose([K, K], costs)
        two.policy.observe(outcome([0, 1], [K, 0], [K, 1]))
    copying, free = two.choose([K, K], costs)
    assert copying == K
    assert free <= 1
    assert two.choose([K, K], costs, most=3) == [3, 0]


def test_scores_are_believed_at_first_and_corrected_by_what_comes_true(make):
    costs = StepCosts.line(1.0, 0.15)
    likely, unlikely = [[0.95] * K], [[0.05] * K]
    one = make("adaptive")
    assert one.choose([K], costs, likely)[0] > one.choose([K], costs, unlikely)[0] == 0
    for slot in range(60):  # other requests, so that only the table learns
        one.policy.begin(Request(f"r{slot}", slot, [1], 100, K))
        one.choose([K], costs, unlikely)
        one.policy.observe(outcome([0], [K], [K]))
    one.policy.begin(Request("r0", 0, [1], 100, K))
    assert one.choose([K], costs, unlikely)[0] > 2


def test_a_slow_drafter_is_asked_less_and_less_and_a_fast_one_always(make):
    one = make("adaptive")
    slow, fast = StepCosts.line(1.0, 0.01, 2.0), StepCosts.line(1.0, 0.01, 1e-5)
    asked = [int(one.policy.ask(one.batch, load(costs=slow))[0]) for _ in range(200)]
    assert set(asked) == {0, 1}
    assert sum(asked[100:]) <= 4 < sum(asked)
    assert one.policy.ask(one.batch, load(costs=fast)).tolist() == [K]


def test_a_request_that_ends_leaves_nothing(make):
    one = make("adaptive")
    for _ in range(10):
        one.choose([K])
        one.policy.observe(outcome([0], [0], [1]))
    one.policy.ask(one.batch, load(costs=StepCosts.line(1.0, 0.01, 2.0)))
    one.policy.end("r0")
    assert not one.policy._pauses
    assert not one.policy._slots


@given(
    st.lists(st.lists(st.floats(0.01, 0.98), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 2), min_size=4, max_size=4),
    st.data(),
)
def test_no_other_lengths_bring_more_tokens_per_second(chances, seconds, data):
    """Whatever steps cost, also where more tokens take less time than fewer."""
    n = len(chances)
    most = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    costs = StepCosts(tuple(n * extra for extra in range(1, 5)), tuple(seconds))
    found = worthwhile(np.array(chances), most, load(n, costs), 0.0)

    def goodput(lengths):
        gains = np.cumprod(np.array(chances), axis=1)
        expected = n + sum(gains[i, :length].sum() for i, length in enumerate(lengths))
        return expected / costs.of_steps(n + sum(lengths))

    assert (found <= most).all()
    best = max(goodput(lengths) for lengths in np.ndindex(*(most + 1)))
    assert goodput(found.tolist()) == pytest.approx(best)


# -- the control ----------------------------------------------------------------------------


class Told(LengthPolicy):
    """Does what it is told."""

    def __init__(self, does):
        self.does, self.calls = does, []

    def choose(self, batch, drafts, load):
        self.calls.append(load)
        self.drafts = drafts
        return self.does(drafts.lengths)


@pytest.fixture
def control(make_engine):
    def make(does=lambda lengths: lengths, engine=None, **settings):
        plugins = PluginManager(discover=False)
        plugins.add(LengthPolicySpec("told", factory=lambda _: Told(does)))
        settings = Settings(length_policy="told", max_consecutive_faults=3, **settings)
        return LengthControl(make_engine(**engine or {}), settings, plugins)

    return make


def chosen(control, batch, lengths, of=None):
    made = control.choose(batch, drafts(lengths), of or control.load(len(lengths), len(lengths)))
    return made.lengths.tolist()


@pytest.mark.parametrize(
    "wrong",
    [None, [1, 1], np.zeros(3, np.int32), np.zeros(2), np.zeros((2, 1), np.int32), "ab"],
    ids=["none", "list", "too many", "floats", "matrix", "text"],
)
def test_what_is_no_lengths_is_a_fault_and_cuts_nothing(control, make_batch, wrong, caplog):
    one = control(lambda lengths: wrong)
    assert chosen(one, make_batch([[1]] * 2), [2, 3]) == [2, 3]
    if wrong is not None:
        assert one.num_faults == 1
        assert "length policy 'told': choose returned no lengths" in caplog.text


def test_lengths_outside_the_draft_are_cut_to_it(control, make_batch):
    batch = make_batch([[1]] * 2)
    assert chosen(control(lambda lengths: lengths + 5), batch, [2, 3]) == [2, 3]
    assert chosen(control(lambda lengths: lengths - 9), batch, [2, 3]) == [0, 0]


def test_a_policy_that_only_fails_is_switched_off_and_drafting_goes_on(control, make_batch, caplog):
    one = control(lambda lengths: 1 / 0)
    for _ in range(5):
        assert chosen(one, make_batch([[1]]), [3]) == [3]
    assert one.num_faults == 3
    assert len(one.policy.calls) == 3
    assert caplog.text.count("choose raised ZeroDivisionError") == 1
    assert caplog.text.count("switched off") == 1
    assert not one.learns


def test_the_most_draft_tokens_of_a_step_are_the_first_of_all_drafts(control, make_batch):
    one = control(max_draft_tokens_per_step=5)
    assert chosen(one, make_batch([[1]] * 3), [4, 1, 3]) == [2, 1, 2]


def test_the_most_requests_are_those_with_the_longest_drafts(control, make_batch):
    one = control(max_speculating_requests=2)
    assert chosen(one, make_batch([[1]] * 4), [1, 4, 3, 4]) == [0, 4, 0, 4]


@pytest.mark.parametrize(
    ("settings", "does", "expected"),
    [
        ({}, lambda lengths: lengths, [1, 4, 3, 0]),
        ({}, lambda lengths: lengths - 2, [1, 2, 2, 0]),
        ({"max_speculating_requests": 2}, lambda lengths: lengths, [1, 4, 0, 0]),
        ({"max_draft_tokens_per_step": 5}, lambda lengths: lengths, [1, 2, 1, 0]),
    ],
    ids=["whole", "policy", "most requests", "most tokens"],
)
def test_sampled_drafts_are_cut_without_a_look_at_them(
    control, make_batch, settings, does, expected
):
    seen = []

    def watch(lengths):
        seen.append(lengths.tolist())
        return does(lengths)

    one, batch = control(watch, **settings), make_batch([[1]] * 4)
    lengths = np.array([1, 4, 3, 0], np.int32)
    sampled = Drafts(
        np.full((4, 4), 7, np.int32), lengths, np.ones((4, 4)), np.full((4, 4, 8), 1 / 8)
    )
    made = one.choose(batch, sampled, one.load(4, 4))
    assert seen == [[4, 4, 4, 0]]
    assert not one.policy.drafts.token_ids.any()
    assert one.policy.drafts.scores is None
    assert made.lengths.tolist() == expected
    assert made.probabilities is sampled.probabilities
    assert made.token_ids is sampled.token_ids


def test_above_so_many_running_requests_nothing_is_asked_for(control, make_batch):
    one, batch = control(off_above_running=2), make_batch([[1]] * 2)
    assert one.ask(batch, one.load(2, 2))[0].tolist() == [0, 1]
    assert one.ask(batch, one.load(3, 2))[0].tolist() == []


def test_long_contexts_are_left_out(control, make_batch):
    one, batch = control(off_above_context=3), make_batch([[1] * 3, [1] * 4])
    kept, most = one.ask(batch, one.load(2, 2))
    assert (kept.tolist(), most.tolist()) == ([0], [4])


def test_names_and_options(make_engine):
    plugins = PluginManager()
    with pytest.raises(UnknownLengthPolicyError, match="Did you mean 'adaptive'"):
        plugins.create_length_policy("adaptiv", {})
    with pytest.raises(OptionError, match="min_gain"):
        plugins.create_length_policy("adaptive", {"min_gain": -1})
    with pytest.raises(OptionError, match="cannot be the name of a length policy"):
        LengthPolicySpec("Two words", factory=Told)
    plugins.add(LengthPolicySpec("fixed", factory=Told))
    with pytest.raises(LengthPolicyConflictError, match="specplug"):
        plugins.create_length_policy("fixed", {})


# -- in the runtime -------------------------------------------------------------------------


class Watching(LengthPolicy):
    """Verifies two tokens of each draft and keeps what it is told."""

    def __init__(self, _options):
        self.outcomes, self.loads = [], []

    def choose(self, batch, drafts, load):
        self.loads.append(load)
        return np.minimum(drafts.lengths, 2)

    def observe(self, outcome):
        self.outcomes.append(outcome)


class Counting(Proposer):
    """Drafts 1, 2, 3, 4."""

    def __init__(self):
        self.asked = []

    def propose(self, batch):
        self.asked.append(batch.request_ids)
        return [[1, 2, 3, 4]] * len(batch)


@pytest.fixture
def served(make_runtime):
    """Serve one request: called with what a step brought, it returns the next draft."""
    spec = LengthPolicySpec("watching", factory=Watching)
    proposer = Counting()
    runtime = make_runtime(proposer, spec, settings={"length_policy": "watching"})
    runtime.begin(Arrival("a", [9], 60))
    text, draft = [9], []

    def step(new):
        nonlocal draft
        text.extend(new)
        matrix = np.zeros((1, 64), np.int32)
        matrix[0, : len(text)] = text
        verified = {"a": draft} if draft else {}
        of = Step(["a"], matrix, np.zeros(1, np.int32), [len(text)], [True], verified)
        [draft] = runtime.step(of).to_lists()
        return draft

    yield step, runtime.length.policy, runtime
    runtime.close()


@pytest.mark.parametrize(
    ("new", "matched", "judged"),
    [
        ([5], 0, 1),  # the first is wrong
        ([1, 5], 1, 2),
        ([1, 2, 5], 2, 3),  # all verified ones are right, the one behind them is judged too
        ([1, 2, 3], 3, 3),  # and right: of the fourth nothing is known
    ],
)
def test_a_policy_is_told_how_far_the_whole_draft_was_right(served, new, matched, judged):
    step, policy, runtime = served
    assert step([7]) == [1, 2]
    assert not policy.outcomes
    step(new)
    [told] = policy.outcomes
    assert told.request_ids == ["a"]
    assert (told.num_proposed, told.num_verified) == ([4], [2])
    assert (told.num_matched, told.num_judged) == ([matched], [judged])
    assert runtime.counters.num_proposed_tokens == 8
    assert runtime.counters.num_draft_tokens == 2


def test_a_policy_hears_of_the_load(served):
    step, policy, _ = served
    step([7])
    assert (policy.loads[0].num_running, policy.loads[0].num_tokens) == (1, 1)


def test_a_request_that_is_not_asked_for_is_not_shown_and_catches_up(make_runtime, monkeypatch):
    proposer = Counting()
    runtime = make_runtime(proposer)
    runtime.begin(Arrival("a", [9], 60))
    matrix = np.ones((1, 64), np.int32)
    new = []
    propose = proposer.propose
    proposer.propose = lambda batch: (new.extend(batch.num_new_tokens.tolist()), propose(batch))[1]
    for size, asks in ((2, 4), (3, 0), (4, 0), (5, 4)):
        monkeypatch.setattr(
            runtime.length.policy, "ask", lambda batch, load, asks=asks: np.full(1, asks)
        )
        runtime.step(Step(["a"], matrix, np.zeros(1, np.int32), [size], [True], {}))
    assert new == [2, 3]
    runtime.close()


def test_the_same_clock_teaches_costs_and_prompts_teach_nothing(make_engine):
    """The engine's own time only, without specplug's, and without steps that prefill."""
    now = [0.0]
    settings = Settings(length_policy="fixed")
    runtime = Runtime("ngram", make_engine(), settings, clock=lambda: now[0])
    matrix = np.zeros((2, 64), np.int32)
    for i, request_id in enumerate("ab"):
        runtime.begin(Arrival(request_id, [i, i], 60))
    rows = np.arange(2, dtype=np.int32)
    for sizes, sampled in (([3, 2], [True, False]), ([4, 3], [True, True])):
        now[0] += 10.0  # one is in prefill
        runtime.step(Step(["a", "b"], matrix, rows, sizes, sampled, {}))
    assert not runtime.length.costs.learnt().steps
    for size in range(5, 30):
        now[0] += 0.5
        runtime.step(Step(["a", "b"], matrix, rows, [size, size - 1], [True, True], {}))
    assert runtime.length.costs.learnt().steps[2][0] == pytest.approx(0.5, rel=0.01)
    runtime.close()
