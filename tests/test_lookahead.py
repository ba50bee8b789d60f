"""``lookahead`` with target models that are functions, and against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from suffix_reference import expected

from specplug import Capability, PluginManager, Request, Runtime
from specplug.config import Settings
from specplug.proposer import Acceptance
from specplug.runtime import Arrival, Step

MANAGER = PluginManager()
GIVEN = frozenset({Capability.TARGET_TOKENS})


def markov(seed, vocab, order=2):
    """A target model: what comes next is a fixed, random function of the last tokens."""

    def next_token(tokens):
        key = [seed, *tokens[-order:]]
        return int(np.random.default_rng(key).integers(0, vocab))

    return next_token


class Served:
    """Requests that a target model answers, through the runtime."""

    def __init__(self, make_engine, model, k, provides=GIVEN, **options):
        engine = make_engine(
            num_speculative_tokens=k, max_model_len=20_000, vocab_size=1000, provides=provides
        )
        self.model, self.k = model, k
        self.runtime = Runtime(
            "lookahead", engine, Settings(options=options, length_policy="fixed"), MANAGER
        )
        self.drafts = []

    def answer(self, prompt, num_tokens, request_id="r"):
        """Return the output, and in how many steps behind the prefill's it came."""
        runtime, text, steps = self.runtime, [*prompt, self.model(prompt)], 0
        runtime.begin(Arrival(request_id, prompt, 20_000))
        draft, targets = [], []
        while True:
            matrix = np.array([text], np.int32)
            step = Step(
                [request_id], matrix, np.zeros(1, np.int32), [len(text)], [True],
                {request_id: draft} if draft else {},
                {request_id: targets} if draft and Capability.TARGET_TOKENS in
                runtime.engine.provides else None,
            )  # fmt: skip
            draft = runtime.step(step).to_lists()[0]
            self.drafts.append((list(text), draft))
            if len(text) >= len(prompt) + num_tokens:
                break
            targets = [self.model(text + draft[:i]) for i in range(len(draft) + 1)]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == targets[accepted]:
                accepted += 1
            text += targets[: accepted + 1]
            steps += 1
        runtime.end(request_id)
        assert runtime.counters.num_faults == 0
        return text[len(prompt) : len(prompt) + num_tokens], steps


def alone(model, prompt, num_tokens):
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(model(text))
    return text[len(prompt) :]


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    k=st.integers(1, 8),
    seed=st.integers(0, 9),
    vocab=st.sampled_from([1, 2, 7]),
    provides=st.sampled_from([GIVEN, frozenset()]),
)
def test_the_text_is_the_targets_own_and_is_the_same_each_time(
    make_engine, prompt, k, seed, vocab, provides
):
    model = markov(seed, vocab)
    first, second = (Served(make_engine, model, k, provides) for _ in range(2))
    output, steps = first.answer(prompt, 40)
    assert output == alone(model, prompt, 40)
    assert steps <= 39
    assert second.answer(prompt, 40) == (output, steps)
    assert first.drafts == second.drafts
    assert all(len(draft) <= k for _, draft in first.drafts)


def test_the_targets_tokens_at_rejected_positions_help(make_engine):
    rule = markov(3, vocab=30, order=1)

    def model(tokens):  # every fourth token is out of the rule, so that the text never cycles
        return rule(tokens if len(tokens) % 4 else [len(tokens)])

    steps = {
        provides: sum(
            Served(make_engine, model, 6, provides).answer([start, 1], 100)[1] for start in range(8)
        )
        for provides in (GIVEN, frozenset())
    }
    assert steps[GIVEN] < 0.9 * steps[frozenset()] < 8 * 99


def test_a_guess_is_taken_where_nothing_repeats(make_engine):
    """Jacobi iteration alone: each token depends on its position, and none comes twice."""
    served = Served(make_engine, len, 4)
    assert served.answer([0], 61) == (list(range(1, 62)), 2 * 60 / 6)
    blind = Served(make_engine, len, 4, frozenset())
    assert blind.answer([0], 61)[1] == 60


# -- against the reference --------------------------------------------------------------------


class Reference:
    """What must be drafted, worked out anew from everything that happened to one request."""

    def __init__(self, k):
        self.k, self.ngrams, self.guess = k, [], []

    def learn(self, last, draft, targets, accepted):
        seen = [last, *draft]
        new = [[*seen[i - 1 : i + 1], targets[i]] for i in range(accepted + 1, len(targets))]
        self.ngrams += new
        self.guess = targets[accepted + 1 :]

    def draft(self, text):
        pooled, _ = expected(text, self.ngrams, limit=self.k, weight_of_others=1.0)
        recent = text[-self.k :]
        recent += recent[-1:] * (self.k - len(recent))
        fill = [*self.guess, *recent[len(self.guess) :]]
        return pooled + fill[len(pooled) : self.k]


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    k=st.integers(1, 6),
    seed=st.integers(0, 99),
    vocab=st.integers(2, 5),
)
def test_it_drafts_what_the_reference_says(make_engine, prompt, k, seed, vocab):
    model = markov(seed, vocab)
    served, reference = Served(make_engine, model, k), Reference(k)
    served.answer(prompt, 30)
    for (text, draft), (longer, _) in zip(served.drafts, served.drafts[1:], strict=False):
        assert draft == reference.draft(text)
        targets = [model(text + draft[:i]) for i in range(len(draft) + 1)]
        reference.learn(text[-1], draft, targets, len(longer) - len(text) - 1)


# -- bounds -----------------------------------------------------------------------------------


def test_the_pool_is_bounded_and_requests_leave_nothing(make_engine):
    served = Served(make_engine, markov(1, 900), 8, pool_bytes=20_000)
    for i in range(3):
        served.answer([i, 1], 200, request_id=str(i))
        num_requests, num_bytes = served.runtime.proposer.usage()
        assert num_requests == 0
        assert 0 < num_bytes <= 20_000


def test_requests_do_not_see_each_others_guesses(make_engine, make_batch):
    proposer, _ = MANAGER.create("lookahead", {}, frozenset())
    proposer.prepare(make_engine(provides=GIVEN))
    for slot in (0, 1):
        proposer.begin(Request(f"r{slot}", slot, [], 64, 4))
    none = np.zeros(1, np.int32)
    first = Acceptance(["r0"], none, [[]], none, [[20]], [[]])
    proposer.observe(first)
    proposer.observe(Acceptance(["r0"], none, [[21, 22]], none, [[30]], [[30, 31, 32]]))
    batch = make_batch([[10, 20, 21], [10, 20, 21]])
    assert proposer.propose(batch).to_lists() == [[31, 32, 21, 21], [10, 20, 21, 21]]


@pytest.mark.parametrize("size", [1, 10_000])
def test_one_token_repeated(make_engine, size):
    served = Served(make_engine, lambda _: 7, 4)
    assert served.answer([7] * size, 21) == ([7] * 21, 4)


def test_without_the_targets_tokens_it_says_so(make_engine, caplog):
    Served(make_engine, markov(1, 5), 4, frozenset())
    assert "learns from accepted tokens only" in caplog.text
    caplog.clear()
    Served(make_engine, markov(1, 5), 4)
    assert not caplog.records
