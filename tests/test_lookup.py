"""``ngram`` and ``prompt_lookup`` against a slow and obvious search."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import PluginManager, Request
from specplug.errors import OptionError
from specplug.runtime import Arrival, Step

MANAGER = PluginManager()
SHORT, LONG = 2, 5  # the defaults of ngram
DEFAULT_BYTES_PER_TOKEN = 100


def reference(text, source_end, limit, *, min_n=SHORT, max_n=LONG, recent=True, wraps=True):
    """What must be drafted for ``text`` from its first ``source_end`` tokens."""
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        wanted = text[len(text) - n :]
        starts = [i for i in range(n, source_end) if text[i - n : i] == wanted]
        if starts:
            start = starts[-1] if recent else starts[0]
            break
    else:
        return []
    grown = text[:source_end]
    for i in range(start, start + limit):
        if i == len(grown):
            if not wraps:
                break
            grown.append(grown[i - (len(text) - start)])
    return grown[start : start + limit]


def test_the_reference_itself():
    text = [1, 2, 3, 4, 1, 2]
    assert reference(text, 6, 3) == [3, 4, 1]
    assert reference(text, 6, 6) == [3, 4, 1, 2, 3, 4]
    assert reference(text, 4, 6, wraps=False) == [3, 4]
    assert reference(text, 6, 3, min_n=3) == []
    assert reference([1, 2, 7, 3, 1, 2, 8, 1, 2], 9, 1) == [8]
    assert reference([1, 2, 7, 3, 1, 2, 8, 1, 2], 9, 1, recent=False) == [7]
    assert reference([5, 5, 5], 3, 4) == [5] * 4
    assert reference([5], 1, 4) == []


class Lookup:
    """A lookup proposer that is asked directly, and what the reference says."""

    def __init__(self, make_engine, make_batch, name="ngram", **options):
        self.options = {"min_n": SHORT, "max_n": LONG} | options
        self.on_prompt = name == "prompt_lookup"
        self.make_batch = make_batch
        self.proposer, _ = MANAGER.create(name, options, frozenset())
        self.proposer.prepare(make_engine(max_model_len=200_000))

    def begin(self, *slots):
        for slot in slots:
            self.proposer.begin(Request(f"r{slot}", slot, [], 200_000, 8))

    def end(self, *slots):
        for slot in slots:
            self.proposer.end(f"r{slot}")

    def ask(self, texts, limits, prompts=None, *, rows=None):
        """Return the drafts for texts by slot."""
        batch = self.make_batch(
            list(texts.values()),
            limits,
            slots=list(texts),
            rows=rows,
            prompts=None if prompts is None else [prompts[slot] for slot in texts],
        )
        return self.proposer.propose(batch).to_lists()

    def expected(self, text, limit, prompt=0):
        return reference(
            text,
            prompt if self.on_prompt else len(text),
            limit,
            min_n=self.options["min_n"],
            max_n=self.options["max_n"],
            recent=self.options.get("prefer", "recent") == "recent",
            wraps=not self.on_prompt,
        )

    @property
    def indexed(self):
        return self.proposer._index._indexed

    @property
    def capacities(self):
        return self.proposer._index._capacities


@pytest.fixture(scope="session")
def lookup(make_engine, make_batch):
    def make(name="ngram", **options):
        return Lookup(make_engine, make_batch, name, **options)

    return make


def random_text(size, vocab=50, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, size).tolist()


# -- what it drafts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1, 2]),
        ([7, 3, 5, 1, 2, 3, 6, 2, 3], [6, 2, 3, 6]),  # the longer match wins
        ([1, 2, 7, 3, 1, 2, 8, 4, 1, 2], [8, 4, 1, 2]),  # of equal ones the most recent
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # the repetition goes on
        ([5, 5, 5], [5, 5, 5, 5]),
        ([5, 5], []),
        ([5], []),
        ([1, 2, 3], []),
        ([1, 2, 3, 4, 3], []),  # one token is no match with min_n=2
    ],
)
def test_ngram_by_example(lookup, text, draft):
    ngram = lookup()
    ngram.begin(0)
    assert ngram.ask({0: text}, [4]) == [draft]
    assert ngram.expected(text, 4) == draft


@pytest.mark.parametrize(
    ("prompt", "output", "draft"),
    [
        ([1, 2, 3, 4], [9, 1, 2], [3, 4]),  # stops where the prompt ends
        ([1, 2, 3, 4], [2], []),
        ([8, 1], [2, 3, 1, 2], []),  # never from the output
        ([4, 1, 2], [4, 1], [2]),
        ([1, 2], [9, 1, 2], []),  # nothing follows it in the prompt
        ([1, 2], [3, 1, 2], []),  # what follows it is output
        ([1], [1], []),
    ],
)
def test_prompt_lookup_by_example(lookup, prompt, output, draft):
    proposer = lookup("prompt_lookup", min_n=2)
    proposer.begin(0)
    assert proposer.ask({0: prompt + output}, [4], {0: len(prompt)}) == [draft]
    assert proposer.expected(prompt + output, 4, len(prompt)) == draft


def test_prefer_earliest(lookup):
    ngram = lookup(prefer="earliest")
    ngram.begin(0)
    assert ngram.ask({0: [1, 2, 7, 3, 1, 2, 8, 4, 1, 2]}, [2]) == [[7, 3]]


@st.composite
def texts_of(draw, *, at_least=1, at_most=200):
    letters = st.integers(0, draw(st.sampled_from([1, 2, 3, 10, 90])) - 1)
    return draw(st.lists(letters, min_size=at_least, max_size=at_most))


@st.composite
def options_of(draw, name):
    min_n = draw(st.integers(1, 4))
    options = {"min_n": min_n, "max_n": draw(st.integers(min_n, 7))}
    if name == "ngram":
        options["prefer"] = draw(st.sampled_from(["recent", "earliest"]))
    return options


@given(st.data(), st.sampled_from(["ngram", "prompt_lookup"]), st.integers(1, 9))
def test_one_shot_equals_the_reference(lookup, data, name, limit):
    proposer = lookup(name, **data.draw(options_of(name)))
    text = data.draw(texts_of(at_least=2 if proposer.on_prompt else 1))
    prompt = data.draw(st.integers(1, max(1, len(text) - 1)))
    proposer.begin(0)
    assert proposer.ask({0: text}, [limit], {0: prompt}) == [proposer.expected(text, limit, prompt)]


@given(st.data(), st.sampled_from(["ngram", "prompt_lookup"]))
def test_growing_in_any_chunks_and_any_batches_equals_the_reference(lookup, data, name):
    proposer = lookup(name, **data.draw(options_of(name)))
    slots = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=4, unique=True))
    texts = {slot: data.draw(texts_of(at_least=2)) for slot in slots}
    prompts = {slot: data.draw(st.integers(1, len(texts[slot]) - 1)) for slot in slots}
    sizes = dict(prompts)
    proposer.begin(*slots)
    while True:
        growing = [slot for slot in slots if sizes[slot] < len(texts[slot])]
        if not growing:
            break
        order = data.draw(st.permutations(growing))
        order = order[: data.draw(st.integers(1, len(order)))]
        for slot in order:
            sizes[slot] += data.draw(st.integers(1, max(1, len(texts[slot]) - sizes[slot])))
        shown = {slot: texts[slot][: sizes[slot]] for slot in order}
        limits = data.draw(st.lists(st.integers(1, 8), min_size=len(order), max_size=len(order)))
        rows = data.draw(st.permutations(range(len(order) + 2)))[: len(order)]
        assert proposer.ask(shown, limits, prompts, rows=rows) == [
            proposer.expected(shown[slot], limit, prompts[slot])
            for slot, limit in zip(order, limits, strict=True)
        ]
    proposer.end(*slots)
    assert proposer.proposer.usage() == (0, 0)


@pytest.mark.parametrize("prefer", ["recent", "earliest"])
@pytest.mark.parametrize("vocab", [2, 30])
def test_growing_tables_keep_the_results_right(lookup, vocab, prefer):
    ngram = lookup(prefer=prefer)
    text = random_text(3000, vocab)
    ngram.begin(0)
    capacities = set()
    for size in range(1, len(text), 61):
        assert ngram.ask({0: text[:size]}, [4]) == [ngram.expected(text[:size], 4)]
        capacities.add(int(ngram.capacities[0]))
    assert len(capacities) > 2


@pytest.mark.parametrize("prefer", ["recent", "earliest"])
def test_one_token_ten_thousand_times(lookup, prefer):
    ngram = lookup(prefer=prefer)
    ngram.begin(0, 1)
    assert ngram.ask({0: [7] * 10_000}, [8]) == [[7] * 8]
    for size in range(1, 10_000, 97):
        assert ngram.ask({1: [7] * size}, [8]) == [[7] * 8 if size > SHORT else []]


def test_through_the_runtime(make_runtime):
    """A text that repeats itself, decoded with K = 4 by a target that always agrees."""
    text = [*range(20)] * 3
    proposer, _ = MANAGER.create("ngram", {}, frozenset())
    runtime = make_runtime(proposer)
    runtime.begin(Arrival("a", text[:22], len(text)))
    size, steps, draft = 23, 0, []
    while size < len(text):
        step = Step(
            ["a"],
            np.array([text], np.int32),
            np.zeros(1, np.int32),
            [size],
            [True],
            {"a": draft},
        )
        draft = runtime.step(step).to_lists()[0]
        assert draft == text[size : size + len(draft)]
        size = min(size + len(draft) + 1, len(text))
        steps += 1
    assert steps == math.ceil((60 - 23) / 5)
    runtime.close()
    assert proposer.usage() == (0, 0)


# -- one request does not see another -------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "prompt_lookup"])
def test_nothing_is_drafted_from_the_request_before_in_the_same_slot_and_row(lookup, name):
    """llama.cpp #27852; the row still holds what is left of the longer text."""
    proposer = lookup(name)
    long = random_text(2000, vocab=90)
    short = [95, 96, 97, *long[1000:1005]]
    proposer.begin(0)
    proposer.ask({0: long}, [4], {0: 1900})
    proposer.end(0)
    proposer.begin(0)
    batch = proposer.make_batch([short], [4], prompts=[6])
    stale = np.array([short + long[len(short) :]], np.int32)
    drafts = proposer.proposer.propose(replace(batch, token_ids=stale))
    assert drafts.to_lists() == [[]]


def test_requests_of_one_batch_do_not_see_each_other(lookup):
    ngram = lookup()
    ngram.begin(0, 1)
    assert ngram.ask({0: [1, 2, 3, 4], 1: [9, 1, 2, 3]}, [4, 4]) == [[], []]


def test_usage_is_zero_after_the_ends(lookup):
    ngram = lookup()
    ngram.begin(*range(100))
    assert ngram.proposer.usage() == (100, 0)
    ngram.ask({slot: [1] * 50 for slot in range(100)}, [4] * 100)
    used = ngram.proposer.usage()
    assert used.num_requests == 100
    assert used.num_bytes > 0
    ngram.end(*range(50))
    assert ngram.proposer.usage() == (50, used.num_bytes // 2)
    ngram.end(*range(50, 100))
    assert ngram.proposer.usage() == (0, 0)


@pytest.mark.parametrize("prompt", [[], [1]])
@pytest.mark.parametrize("name", ["ngram", "prompt_lookup"])
def test_the_shortest_prompts(run_python, name, prompt):
    """In a process of its own: a wrong address would end it."""
    printed = run_python(
        f"""
import numpy as np
from specplug import EngineInfo, Runtime
from specplug.runtime import Arrival, Step
from specplug.config import Settings
settings = Settings(length_policy="fixed")
runtime = Runtime("{name}", EngineInfo("test", 100, 64, 4, 4), settings)
runtime.begin(Arrival("a", {prompt}, 64))
row, draft = np.zeros((4, 64), np.int32), None
for size in range({len(prompt)} + 1, 9):
    step = Step(["a"], row, np.zeros(1, np.int32), [size], [True], {{}})
    draft = runtime.step(step).to_lists()[0]
print(draft, runtime.counters.num_faults)
"""
    )
    assert printed == ("[0, 0, 0, 0] 0" if name == "ngram" else "[] 0")


# -- what it costs --------------------------------------------------------------------------


def test_a_step_indexes_what_is_new_and_nothing_else(lookup):
    ngram = lookup()
    text = random_text(9000)
    ngram.begin(0)
    size, growths = 4000, 0
    ngram.ask({0: text[:size]}, [4])
    capacity = ngram.capacities[0]
    while size + 3 < len(text):
        size += 1 + size % 3
        ngram.ask({0: text[:size]}, [4])
        assert ngram.indexed[0] == size - 1
        growths += ngram.capacities[0] != capacity
        capacity = ngram.capacities[0]
    assert growths <= math.log2(9000 / 4000) + 1


@pytest.mark.parametrize("size", [342, 513, 2000, 5462, 43_000, 131_000])
@pytest.mark.parametrize("name", ["ngram", "prompt_lookup"])
def test_bytes_per_token(lookup, name, size):
    proposer = lookup(name)
    proposer.begin(0)
    proposer.ask({0: [1] * (size + 1)}, [4], {0: size})
    assert 0 < proposer.proposer.usage().num_bytes < DEFAULT_BYTES_PER_TOKEN * (size + 1)


def test_a_long_prompt_is_spread_over_several_steps(lookup):
    from specplug.proposers._ngram_index import INDEXED_PER_CALL

    ngram = lookup()
    size = 131_072
    text = random_text(size, vocab=2000)
    text[-3:] = text[120_000:120_003]
    ngram.begin(0)
    steps = math.ceil((size - 1) / INDEXED_PER_CALL)
    assert steps > 2
    for step in range(1, steps + 1):
        draft = ngram.ask({0: text}, [8])[0]
        assert ngram.indexed[0] == min(step * INDEXED_PER_CALL, size - 1)
    expected = ngram.expected(text, 8)
    assert expected == text[120_003:120_011]
    assert draft == expected
    text += draft[:2]
    assert ngram.ask({0: text}, [8]) == [ngram.expected(text, 8)]


def test_long_prompts_that_come_together_share_the_budget(lookup):
    from specplug.proposers._ngram_index import INDEXED_PER_CALL

    ngram = lookup()
    texts = {slot: random_text(15_000, vocab=9, seed=slot) for slot in range(5)}
    ngram.begin(*texts)
    before, steps = 0, 0
    while before < 5 * 14_999:
        drafts = ngram.ask(texts, [4] * 5)
        now = int(ngram.indexed[:5].sum())
        assert before < now <= before + INDEXED_PER_CALL
        before, steps = now, steps + 1
    assert steps == math.ceil(5 * 14_999 / INDEXED_PER_CALL)
    assert drafts == [ngram.expected(text, 4) for text in texts.values()]


def test_while_a_long_prompt_is_indexed_others_draft_on(lookup):
    ngram = lookup()
    ngram.begin(0, 1)
    long, short = random_text(100_000), [1, 2, 3, 1, 2]
    assert ngram.ask({1: short}, [2]) == [[3, 1]]
    assert ngram.ask({0: long, 1: short}, [2, 2])[1] == [3, 1]


# -- options --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "prompt_lookup"])
def test_one_option_alone(lookup, name):
    with pytest.raises(OptionError, match=r"min_n \(7\).*max_n \(5\)"):
        lookup(name, min_n=7)
    with pytest.raises(OptionError, match=r"min_n \([23]\).*max_n \(1\)"):
        lookup(name, max_n=1)
    proposer = lookup(name, max_n=9)
    proposer.begin(0)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 60, 3, 4, 5, 6, 7, 8, 9, 70, *range(1, 10)]
    assert proposer.ask({0: text}, [1], {0: 20}) == [[60]]


def test_prefer_is_an_option_of_ngram_only(lookup):
    with pytest.raises(OptionError, match="unknown option 'prefer'"):
        lookup("prompt_lookup", prefer="recent")
