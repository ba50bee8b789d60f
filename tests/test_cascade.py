"""``cascade``: several proposers behind one name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import (
    Capability,
    Drafts,
    PluginManager,
    Proposer,
    ProposerSpec,
    RequestOptions,
    Runtime,
)
from specplug.config import Settings
from specplug.errors import CapabilityError, OptionError
from specplug.lengths.fixed import SPEC as FIXED
from specplug.proposer import Usage
from specplug.runtime import Arrival, Step

K = 4


class Fixed(Proposer):
    """Drafts what it is told to, by request."""

    def __init__(self, drafts, uses=()):
        self.drafts = drafts
        self.uses = frozenset(uses)
        self.calls = []

    def prepare(self, engine):
        self.calls.append("prepare")

    def begin(self, request):
        self.calls.append(f"begin {request.id} {request.options.model_dump(exclude_none=True)}")

    def propose(self, batch):
        if isinstance(self.drafts, Exception):
            raise self.drafts
        return [self.drafts.get(request_id, []) for request_id in batch.request_ids]

    def observe(self, acceptance):
        self.calls.append(f"observe {acceptance.new_token_ids}")

    def end(self, request_id):
        self.calls.append(f"end {request_id}")

    def close(self):
        self.calls.append("close")

    def usage(self):
        return Usage(1, 10)


class ColourOptions(RequestOptions):
    colour: str = "red"


def cascade(make_engine, proposers, **options):
    """Return a runtime with a cascade of parts by name, the first of which knows colours."""
    manager = PluginManager(discover=False)
    from specplug.proposers.cascade import SPEC

    manager.add(SPEC)
    manager.add(FIXED)
    for i, (name, part) in enumerate(proposers.items()):
        model = RequestOptions if i else ColourOptions
        manager.add(ProposerSpec(name, lambda _, part=part: part, request_options=model))
    options = {"parts": list(proposers)} | options
    engine = make_engine(provides=frozenset(Capability))
    settings = Settings(options=options, max_consecutive_faults=2, length_policy="fixed")
    return Runtime("cascade", engine, settings, manager)


def step(runtime, ids, tokens=((1, 2),), verified=None):
    matrix = np.array(list(tokens) * len(ids) if len(tokens) == 1 else tokens, np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    sizes = [matrix.shape[1]] * len(ids)
    return runtime.step(
        Step(ids, matrix, rows, sizes, [True] * len(ids), verified or {})
    ).to_lists()


drafts = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 99), max_size=K), max_size=3
)


@given(parts=st.lists(drafts, min_size=1, max_size=3))
def test_in_order_the_first_draft_is_taken(make_engine, parts):
    runtime = cascade(make_engine, {f"p{i}": Fixed(part) for i, part in enumerate(parts)})
    for request_id in "abc":
        runtime.begin(Arrival(request_id, [1], 60))
    first = [next((p[i] for p in parts if p.get(i)), []) for i in "abc"]
    assert step(runtime, ["a", "b", "c"]) == first
    assert runtime.counters.num_faults == 0


def test_every_part_lives_through_everything(make_engine):
    parts = {"p": Fixed({}), "q": Fixed({}, uses={Capability.TARGET_TOKENS})}
    runtime = cascade(make_engine, parts)
    assert runtime.uses(Capability.TARGET_TOKENS)
    assert not runtime.uses(Capability.LOGITS)
    runtime.begin(Arrival("a", [1], 60, arguments={"specplug_colour": "blue"}))
    step(runtime, ["a"])
    assert runtime.proposer.usage() == (1, 20)
    runtime.end("a")
    assert runtime.proposer.usage().num_requests == 0
    runtime.close()
    begin = "begin a {'colour': 'blue'}"
    for part in parts.values():
        assert part.calls == ["prepare", begin, "observe [[2]]", "end a", "close"]


def test_a_part_that_fails_is_left_out_and_the_others_go_on(make_engine, caplog):
    parts = {"bad": Fixed(ValueError("ouch")), "good": Fixed({"a": [5]})}
    runtime = cascade(make_engine, parts)
    runtime.begin(Arrival("a", [1], 60))
    assert step(runtime, ["a"]) == [[]]
    assert "The part 'bad' failed and is left out" in caplog.text
    for _ in range(5):
        assert step(runtime, ["a"]) == [[5]]
    assert runtime.counters.num_faults == 1
    runtime.end("a")
    assert "end a" not in parts["bad"].calls
    assert "end a" in parts["good"].calls


@pytest.mark.parametrize(
    "wrong",
    [[["x"]], [None], 3, [[1], [2]], Drafts(np.zeros((1, 2)), np.ones(1)), [[100]], [[-1]]],
)
def test_a_part_with_a_wrong_result_is_left_out(make_engine, wrong):
    class Wrong(Proposer):
        def propose(self, batch):
            return wrong

    runtime = cascade(make_engine, {"bad": Wrong(), "good": Fixed({"a": [5]})})
    runtime.begin(Arrival("a", [1], 60))
    assert [step(runtime, ["a"]) for _ in range(2)] == [[[]], [[5]]]
    assert runtime.counters.num_faults == 1


def test_with_all_parts_left_out_nothing_is_drafted(make_engine):
    runtime = cascade(make_engine, {"bad": Fixed(ValueError("ouch"))})
    runtime.begin(Arrival("a", [1], 60))
    assert [step(runtime, ["a"]) for _ in range(3)] == [[[]]] * 3
    assert runtime.counters.num_faults == 1


# -- by what is expected ----------------------------------------------------------------------


def say(runtime, output):
    """Let request ``a`` say an output, a token a step; return who drafted, told by length."""
    tokens = np.array([[1, *output]], np.int32)
    rows, taken = np.zeros(1, np.int32), []
    for n in range(2, len(output) + 2):
        taken.append(len(runtime.step(Step(["a"], tokens, rows, [n], [True], {})).to_lists()[0]))
    return taken


def test_the_part_that_is_right_more_often_is_taken(make_engine):
    class Next(Proposer):
        """Right whenever the output counts up."""

        def propose(self, batch):
            return [[int(batch.tokens(i)[-1]) + 1] for i in range(len(batch))]

    parts = {"wrong": Fixed({"a": [98, 98]}), "right": Next()}
    runtime = cascade(make_engine, parts, by="expected")
    runtime.begin(Arrival("a", [1], 60))
    assert say(runtime, [3, 4, 5, 6]) == [2, 1, 1, 1]  # equal at first: the first
    runtime.begin(Arrival("a", [1], 60))  # the worker's average holds for new requests
    assert say(runtime, [30, 31, 32]) == [1, 1, 1]
    assert say(runtime, [3, *[98] * 20])[-1] == 2  # and each request's own in the end


def test_expectations_end_with_their_request(make_engine):
    runtime = cascade(make_engine, {"p": Fixed({"a": [5]})}, by="expected")
    runtime.begin(Arrival("a", [1], 60))
    step(runtime, ["a"])
    runtime.end("a")
    expectations = runtime.proposer._expectations
    assert not expectations._open
    assert not expectations._sums


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[], ["p", "p"]])
def test_parts_must_be_some_and_different(make_engine, parts):
    with pytest.raises(OptionError, match="at least one part, and each only once"):
        cascade(make_engine, {"p": Fixed({})}, parts=parts)


def test_a_part_that_does_not_exist_is_refused(make_engine):
    with pytest.raises(LookupError, match="no proposer 'q'"):
        cascade(make_engine, {"p": Fixed({})}, parts=["p", "q"])


def test_a_part_that_cannot_do_without_probabilities_is_refused(make_engine):
    manager = PluginManager()
    needs = frozenset({Capability.DRAFT_PROBABILITIES})
    manager.add(ProposerSpec("needy", lambda _: Fixed({}), needs=needs))
    engine = make_engine(provides=frozenset(Capability))
    with pytest.raises(CapabilityError, match="draft_probabilities"):
        Runtime("cascade", engine, Settings(options={"parts": ["needy"]}), manager)


def test_the_options_of_a_part_reach_it(make_engine):
    with pytest.raises(OptionError, match=r"proposer 'p'.*'depth'"):
        cascade(make_engine, {"p": Fixed({})}, part_options={"p": {"depth": 3}})


def test_options_for_what_is_no_part_are_refused(make_engine):
    with pytest.raises(OptionError, match="'q'"):
        cascade(make_engine, {"p": Fixed({})}, part_options={"q": {}})


# -- who is asked -----------------------------------------------------------------------------


class Asked(Proposer):
    """Remembers for whom it was asked, and how much was new."""

    def __init__(self, drafts):
        self.drafts, self.asked = drafts, []

    def propose(self, batch):
        self.asked.append(dict(zip(batch.request_ids, batch.num_new_tokens.tolist(), strict=True)))
        return [self.drafts.get(request_id, []) for request_id in batch.request_ids]


def test_in_order_a_part_is_asked_for_what_is_left_and_told_all_that_is_new(make_engine):
    first, second, third = Asked({"a": [5]}), Asked({"b": [6], "c": [7]}), Asked({})
    runtime = cascade(make_engine, {"first": first, "second": second, "third": third})
    for request_id in "abc":
        runtime.begin(Arrival(request_id, [1], 60))
    assert step(runtime, ["a", "b", "c"]) == [[5], [6], [7]]
    first.drafts = {}
    assert step(runtime, ["c", "a"], ((1, 2, 3, 4), (1, 2, 3, 4))) == [[7], []]
    assert first.asked == [{"a": 2, "b": 2, "c": 2}, {"c": 2, "a": 2}]
    assert second.asked == [{"b": 2, "c": 2}, {"c": 2, "a": 4}]
    assert third.asked == [{"a": 4}]
    runtime.end("a")
    runtime.begin(Arrival("d", [1], 60))  # takes the slot over
    step(runtime, ["d"])
    assert second.asked[-1] == third.asked[-1] == {"d": 2}
    assert runtime.counters.num_faults == 0


def test_by_what_is_expected_all_are_asked(make_engine):
    parts = {"first": Asked({"a": [5]}), "second": Asked({})}
    runtime = cascade(make_engine, parts, by="expected")
    runtime.begin(Arrival("a", [1], 60))
    step(runtime, ["a"])
    assert [part.asked for part in parts.values()] == [[{"a": 2}]] * 2
