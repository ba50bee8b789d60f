"""``prediction``: following a text that the request brings."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import PluginManager, Runtime
from specplug.config import Settings
from specplug.proposers._suffix_kernels import INDEX_BYTES_PER_TOKEN
from specplug.runtime import Arrival, Step

MANAGER = PluginManager()
K = 4
ALONE = {"fallback": None}


class Tokenizer:
    """One token per letter: a is 1, b is 2."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - 96 for letter in text]


class Served:
    """Requests that say given outputs, through the runtime."""

    def __init__(self, make_engine, options=ALONE, **engine):
        standard = {"load_tokenizer": Tokenizer, "max_model_len": 400, "num_speculative_tokens": K}
        settings = Settings(options=options, length_policy="fixed")
        self.runtime = Runtime("prediction", make_engine(**standard | engine), settings, MANAGER)

    def begin(self, request_id="r", prompt=(50, 51), **arguments):
        prefixed = {f"specplug_{name}": value for name, value in arguments.items()}
        self.runtime.begin(Arrival(request_id, list(prompt), 400, arguments=prefixed))

    def drafts(self, output, prompt=(50, 51), request_id="r"):
        """Return the draft after each token of the output, one token a step."""
        tokens = np.zeros((1, 400), np.int32)
        tokens[0, : len(prompt) + len(output)] = [*prompt, *output]
        rows = np.zeros(1, np.int32)
        return [
            self.runtime.step(
                Step([request_id], tokens, rows, [len(prompt) + n], [True], {})
            ).to_lists()[0]
            for n in range(1, len(output) + 1)
        ]


@pytest.fixture(scope="session")
def served(make_engine):
    def make(*arguments, **engine):
        return Served(make_engine, *arguments, **engine)

    return make


def steps_for(one, output, prompt=(50, 51)):
    """Return in how many steps a request says its output, the first token being prefill's."""
    tokens = np.zeros((1, 400), np.int32)
    tokens[0, : len(prompt) + len(output)] = [*prompt, *output]
    said, steps, draft = 1, 0, []
    rows = np.zeros(1, np.int32)
    while True:
        verified = {"r": draft} if draft else {}
        size = len(prompt) + said
        draft = one.runtime.step(Step(["r"], tokens, rows, [size], [True], verified)).to_lists()[0]
        if said == len(output):
            return steps
        right = 0
        while right < len(draft) and output[said + right : said + right + 1] == [draft[right]]:
            right += 1
        said = min(len(output), said + right + 1)
        steps += 1


@given(output=st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_a_right_prediction_is_accepted_whole(served, output):
    one = served()
    one.begin(prediction_token_ids=output)
    assert steps_for(one, output) == -(-(len(output) - 1) // (K + 1))


def test_text_is_the_same_as_its_tokens(served):
    one = served()
    one.begin(prediction="abcdef")
    assert one.drafts([1, 2]) == [[2, 3, 4, 5], [3, 4, 5, 6]]


TEXT = list(range(10, 40))


@pytest.mark.parametrize(
    ("output", "draft"),
    [
        ([10, 11, 99, 13], [14, 15, 16, 17]),  # replaced: found again one token later
        ([10, 11, 13], [14, 15, 16, 17]),  # left out
        ([10, 11, 99, 98, 97, 12], [13, 14, 15, 16]),  # put in
        ([99, 98, 10], [11, 12, 13, 14]),  # before the beginning
        ([10, 11, 30], []),  # too far ahead for a single token
        ([10, 11, 30, 31], [32, 33, 34, 35]),  # two are enough anywhere
        ([30, 31, 32, 11, 12], [13, 14, 15, 16]),  # and back again
        ([99, 98, 97], []),
        ([*TEXT[:-1]], [39]),
        (TEXT, []),
        ([*TEXT, 99], []),
    ],
)
def test_after_an_edit_it_finds_its_place_again(served, output, draft):
    one = served()
    one.begin(prediction_token_ids=TEXT)
    assert one.drafts(output)[-1] == draft


def test_of_equal_places_the_nearest_wins(served):
    one = served()
    text = [1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 1, 2, 9, 9]
    one.begin(prediction_token_ids=text)
    assert one.drafts([1, 2, 3, 4, 99, 1, 2])[-1] == [5, 6, 7, 8]


@given(
    text=st.lists(st.integers(0, 3), max_size=60),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=60),
)
def test_it_only_drafts_what_is_somewhere_in_the_prediction(served, text, output):
    one = served()
    one.begin(prediction_token_ids=text)
    pieces = {tuple(text[i : i + n]) for i in range(len(text)) for n in range(1, K + 1)}
    assert all(tuple(draft) in pieces for draft in one.drafts(output) if draft)
    assert one.runtime.counters.num_faults == 0


def test_requests_of_a_batch_do_not_meet(served):
    one = served()
    for request_id, text in {"a": [1, 2, 3], "b": [], "c": [1, 7, 8]}.items():
        one.begin(request_id, prediction_token_ids=text)
    tokens = np.array([[50, 51, 1]] * 3, np.int32)
    rows = np.arange(3, dtype=np.int32)
    drafts = one.runtime.step(Step(["a", "b", "c"], tokens, rows, [3] * 3, [True] * 3, {}))
    assert drafts.to_lists() == [[2, 3], [], [7, 8]]


def test_a_long_text_is_indexed_by_and_by(served):
    text = np.random.default_rng(0).integers(0, 2**15, 30_000).tolist()
    one = served(vocab_size=2**15)
    one.begin(prediction_token_ids=text)
    output = [*text[25_000:25_002], *[2**15 - 1] * 4]
    drafts = one.drafts([*output, *text[25_000:25_002]])
    assert drafts[1] == []  # not there yet
    assert drafts[-1] == text[25_002 : 25_002 + K]


def test_memory_and_its_return(served):
    one = served()
    one.begin(prediction_token_ids=TEXT)
    one.begin("other")
    held = (INDEX_BYTES_PER_TOKEN + 4) * len(TEXT)
    assert one.runtime.proposer.usage() == (2, held)
    one.runtime.end("r")
    one.runtime.end("other")
    assert one.runtime.proposer.usage() == (0, 0)


def test_a_slot_is_clean_when_it_is_used_again(served):
    one = served()
    one.begin(prediction_token_ids=TEXT)
    one.drafts(TEXT[:5])
    one.runtime.end("r")
    one.begin()
    assert one.drafts([10, 11, 12]) == [[], [], []]


# -- what cannot be used ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "engine", "reason"),
    [
        ({"prediction": "a" * 11}, {}, r"longer than max_prediction_tokens \(10\)"),
        ({"prediction": "a" * 10_000}, {}, r"longer than max_prediction_tokens \(10\)"),
        ({"prediction_token_ids": [1] * 11}, {}, r"longer than max_prediction_tokens \(10\)"),
        ({"prediction_token_ids": [1, 100]}, {}, r"not in \[0, 100\)"),
        ({"prediction": "ab"}, {"load_tokenizer": None}, "no tokenizer"),
        ({"prediction": "ab"}, {"load_tokenizer": lambda: 1 / 0}, "no tokenizer"),
        ({"prediction_token_ids": [-1]}, {}, "prediction_token_ids"),
        ({"prediction_token_ids": ["a"]}, {}, "prediction_token_ids"),
        ({"prediction_token_ids": 3}, {}, "prediction_token_ids"),
        ({"prediction": 3}, {}, "'prediction'"),
        ({"prediction": "ab", "prediction_token_ids": [1]}, {}, "not both"),
    ],
)
def test_a_prediction_that_is_no_good_is_said_and_the_request_served(
    served, caplog, arguments, engine, reason
):
    one = served(ALONE | {"max_prediction_tokens": 10}, **engine)
    one.begin(**arguments)
    assert one.drafts([1, 2, 3]) == [[], [], []]
    (told,) = (r for r in caplog.records if "serves request" in r.getMessage())
    assert re.search(reason, told.getMessage())
    assert one.runtime.counters.num_faults == 0


def test_the_same_complaint_is_logged_once(served, caplog):
    one = served(ALONE | {"max_prediction_tokens": 1})
    for request_id in "abc":
        one.begin(request_id, prediction="xyz")
    assert sum("without its prediction" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("arguments", [{"prediction": ""}, {"prediction_token_ids": []}, {}])
def test_an_empty_prediction_is_none(served, caplog, arguments):
    one = served()
    one.begin(**arguments)
    assert one.drafts([1, 2, 3]) == [[], [], []]
    assert not caplog.records


# -- the fallback -----------------------------------------------------------------------------


def test_off_its_track_the_fallback_drafts(served):
    one = served({})
    one.begin(prediction_token_ids=TEXT)
    assert one.drafts([10, 11, 12])[-1] == [13, 14, 15, 16]
    assert one.drafts([10, 11, 12, 60, 61, 62, 63, 60, 61, 62])[-1] == [63, 60, 61, 62]


def test_the_fallback_takes_its_own_request_options(served):
    one = served({"fallback_options": {"cache_prompts": True}})
    one.begin("first", prompt=[1, 2, 3, 4], cache_namespace="a")
    one.begin("r", prompt=[50, 51], cache_namespace="a")
    assert one.drafts([1, 2])[-1] == [3, 4]


def test_a_fallback_that_does_not_exist_is_refused_at_start_up(make_engine):
    with pytest.raises(LookupError, match="no proposer 'sufix'"):
        Served(make_engine, {"fallback": "sufix"})
