"""Whatever a proposer returns, what comes out is a valid draft, and each fault is reported."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import Drafts
from specplug.drafts import validated

VOCAB = 100


@pytest.fixture(scope="session")
def check(make_batch):
    """Validate a result for requests with these limits; check it; return rows and fault kinds."""

    def run(result, limits=(4, 4)):
        faults = []
        batch = make_batch([[1]] * len(limits), limits=limits)
        drafts = validated(result, batch, VOCAB, lambda kind, detail: faults.append((kind, detail)))
        assert_valid(drafts, limits)
        assert all(isinstance(part, str) and part for fault in faults for part in fault[:1])
        return drafts.to_lists(), [kind for kind, _ in faults]

    return run


def assert_valid(drafts, limits):
    assert isinstance(drafts, Drafts)
    ids, lengths = drafts.token_ids, drafts.lengths
    assert type(ids) is np.ndarray
    assert type(lengths) is np.ndarray
    assert ids.dtype == lengths.dtype == np.int32
    assert ids.ndim == 2
    assert lengths.shape == (len(limits),)
    assert len(ids) == len(limits)
    assert (lengths >= 0).all()
    assert (lengths <= np.array(limits, np.int32)).all()
    assert lengths.max(initial=0) <= ids.shape[1]
    for row in drafts.to_lists():
        assert all(0 <= token < VOCAB for token in row)


class Lazy(Sequence):
    """A sequence that is not a list and knows no slices."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        if isinstance(i, slice):
            raise TypeError("no slices")
        return self.items[i]


class Broken(Lazy):
    """A sequence that fails when it is read."""

    def __getitem__(self, i):
        raise RuntimeError("cannot be read")


class Hostile:
    """An object that cannot even be shown."""

    def __repr__(self):
        raise RuntimeError("no repr")


# -- what is fine ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.int8),
        np.array([1, 2, 3], np.uint64),
        [np.int32(1), np.int64(2), np.uint8(3)],
        [np.int8(1), np.uint16(2), 3],
        UserList([1, 2, 3]),
        deque([1, 2, 3]),
        Lazy(1, 2, 3),
    ],
    ids=lambda row: f"{type(row).__name__}-{getattr(row, 'dtype', '')}",
)
def test_any_sequence_of_integers_is_a_row(check, row):
    assert check([row, []]) == ([[1, 2, 3], []], [])
    assert check([[], row], (4, 2)) == ([[], [1, 2]], [])


@pytest.mark.parametrize("rows", [((1,), (2,)), Lazy([1], [2]), deque([[1], [2]])])
def test_any_sequence_of_rows_is_a_result(check, rows):
    assert check(rows) == ([[1], [2]], [])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "u4", "i8", "u8", ">i4"])
def test_columns_of_any_integer_type(check, dtype):
    drafts = Drafts(np.array([[1, 2, 99], [4, 0, 0]], dtype), np.array([3, 1], dtype))
    assert check(drafts) == ([[1, 2, 99], [4]], [])


def test_too_long_is_cut_without_a_fault(check):
    assert check([[1, 2, 3, 4], [5, 6]], (2, 1)) == ([[1, 2], [5]], [])
    drafts = Drafts(np.array([[1, 2, 3], [4, 5, 6]]), np.array([3, 3]))
    assert check(drafts, (2, 1)) == ([[1, 2], [4]], [])


def test_what_lies_behind_the_limit_is_no_fault(check):
    assert check([[1, -1], [2, "x"]], (1, 1)) == ([[1], [2]], [])
    drafts = Drafts(np.array([[1, -7], [2, 5000]]), np.array([2, 1]))
    assert check(drafts, (1, 2)) == ([[1], [2]], [])


def test_no_drafts_at_all(check):
    assert check([[], []]) == ([[], []], [])
    assert check(Drafts.empty(2)) == ([[], []], [])
    assert check(Drafts.empty(2, 7)) == ([[], []], [])
    assert check([], ()) == ([], [])


def test_the_result_is_not_the_proposers_own_memory(make_batch):
    own = Drafts(np.array([[1, 2]], np.int32), np.array([2], np.int32))
    drafts = validated(own, make_batch([[1]]), VOCAB, pytest.fail)
    own.token_ids[:], own.lengths[:] = 99, 0
    assert drafts.to_lists() == [[1, 2]]


def test_scores_are_kept_beside_the_tokens(make_batch):
    scores = np.array([[0.5, 0.25, 0.0], [1.0, 0.0, 0.0]])
    own = Drafts(np.array([[1, 2, 3], [4, 5, 6]]), np.array([2, 1]), scores)
    drafts = validated(own, make_batch([[1], [1]], limits=[2, 2]), VOCAB, pytest.fail)
    assert drafts.scores.tolist() == [[0.5, 0.25], [1.0, 0.0]]


def certain(ids):
    """Return probabilities of 1 for some tokens."""
    return np.eye(VOCAB)[ids]


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8", np.longdouble])
def test_probabilities_are_cut_as_the_tokens_are(make_batch, dtype):
    ids = np.array([[1, 2, 3], [4, 5, VOCAB]])
    own = Drafts(ids, np.array([3, 3]), probabilities=certain(ids % VOCAB).astype(dtype))
    faults = []
    drafts = validated(
        own, make_batch([[1], [1]], limits=[1, 3]), VOCAB, lambda kind, _: faults.append(kind)
    )
    assert drafts.to_lists() == [[1], [4, 5]]
    assert faults == ["token outside the vocabulary"]
    assert drafts.probabilities.dtype == np.dtype("=f4")
    assert drafts.probabilities.tolist() == [
        [np.eye(VOCAB)[1].tolist(), [0.0] * VOCAB],
        np.eye(VOCAB)[[4, 5]].tolist(),
    ]


def test_what_lies_behind_a_draft_needs_no_probabilities(make_batch):
    ids = np.array([[1, 2], [4, 5]])
    probabilities = certain(ids)
    probabilities[0, 1] = np.nan
    own = Drafts(ids, np.array([1, 2]), probabilities=probabilities)
    drafts = validated(own, make_batch([[1]] * 2), VOCAB, pytest.fail)
    assert drafts.probabilities.sum(axis=-1).tolist() == [[1, 0], [1, 1]]


# -- results that are nonsense as a whole ---------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        None,
        5,
        1.5,
        True,
        "ab",
        b"ab",
        {},
        {1, 2},
        object(),
        iter([[1], [2]]),
        (row for row in ([1], [2])),
        np.array([[1], [2]]),
        np.zeros(2),
        [],
        [[1]],
        [[1], [2], [3]],
        ValueError("returned"),
        Drafts,
        Hostile(),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_result_that_is_no_list_of_rows_is_one_fault(check, result):
    assert check(result) == ([[], []], ["not one row per request"])


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (np.ones((2, 3)), "token_ids not integers"),
        (np.full((2, 3), np.nan), "token_ids not integers"),
        (np.ones((2, 3), bool), "token_ids not integers"),
        (np.ones((2, 3), object), "token_ids not integers"),
        (np.array([["1"], ["2"]]), "token_ids not integers"),
        ([[1], [2]], "token_ids not integers"),
        (None, "token_ids not integers"),
        (np.ones(2, int), "token_ids of wrong shape"),
        (np.ones((3, 2), int), "token_ids of wrong shape"),
        (np.ones((1, 2), int), "token_ids of wrong shape"),
        (np.ones((2, 2, 1), int), "token_ids of wrong shape"),
        (np.array(1), "token_ids of wrong shape"),
    ],
)
def test_columns_with_wrong_token_ids(check, ids, kind):
    assert check(Drafts(ids, np.array([1, 1]))) == ([[], []], [kind])


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        (np.ones(2), "lengths not integers"),
        (np.ones(2, bool), "lengths not integers"),
        ([1, 1], "lengths not integers"),
        (None, "lengths not integers"),
        (np.ones((2, 1), int), "lengths of wrong shape"),
        (np.ones(3, int), "lengths of wrong shape"),
        (np.array(1), "lengths of wrong shape"),
    ],
)
def test_columns_with_wrong_lengths(check, lengths, kind):
    assert check(Drafts(np.ones((2, 3), int), lengths)) == ([[], []], [kind])


@pytest.mark.parametrize("bad", [-1, 3, 2**40, -(2**40), np.iinfo(np.uint64).max])
def test_a_length_outside_its_row_empties_that_row_only(check, bad):
    lengths = np.array([1, bad], np.uint64 if bad > 2**62 else np.int64)
    drafts = Drafts(np.array([[1, 2], [3, 4]]), lengths)
    assert check(drafts) == ([[1], []], ["length outside the draft"])


@pytest.mark.parametrize(
    "scores",
    [
        np.zeros(2),
        np.zeros((2, 1)),
        np.zeros((2, 3, 1)),
        0.5,
        [[0.5], [0.5, 0.5]],
        [["a", "b", "c"]] * 2,
        np.full((2, 3), "x"),
        np.full((2, 3), None),
        object(),
    ],
    ids=str,
)
def test_wrong_scores_are_dropped_and_the_tokens_kept(make_batch, scores):
    faults = []
    own = Drafts(np.array([[1, 2, 3], [4, 5, 6]]), np.array([3, 1]), scores)
    batch = make_batch([[1], [1]])
    drafts = validated(own, batch, VOCAB, lambda kind, _: faults.append(kind))
    assert drafts.to_lists() == [[1, 2, 3], [4]]
    assert drafts.scores is None
    assert len(faults) == 1
    assert "scores" in faults[0]


TWO = np.array([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("probabilities", "kind"),
    [
        (certain(TWO).tolist(), "probabilities of wrong shape"),
        (certain(TWO)[:, :2], "probabilities of wrong shape"),
        (certain(TWO)[:, :, :50], "probabilities of wrong shape"),
        (certain(TWO)[0], "probabilities of wrong shape"),
        (certain(TWO).astype(int), "probabilities of wrong shape"),
        (object(), "probabilities of wrong shape"),
        (certain(TWO) / 2, "probabilities are no distribution"),
        (certain(TWO) * np.nan, "probabilities are no distribution"),
        (2 * certain(TWO) - certain(TWO + 1), "probabilities are no distribution"),
        (certain(TWO + 1), "token of probability 0"),
    ],
    ids=["list", "width", "vocabulary", "one request", "integers", "object", "sum", "NaN",
         "negative", "another token"],
)  # fmt: skip
def test_wrong_probabilities_are_dropped_and_the_tokens_kept(make_batch, probabilities, kind):
    faults = []
    own = Drafts(TWO, np.array([3, 1]), probabilities=probabilities)
    batch = make_batch([[1], [1]])
    drafts = validated(own, batch, VOCAB, lambda kind, _: faults.append(kind))
    assert drafts.to_lists() == [[1, 2, 3], [4]]
    assert drafts.probabilities is None
    assert faults == [kind]


def test_scores_may_be_a_plain_list_or_are_dropped(make_batch):
    own = Drafts(np.array([[1, 2]]), np.array([2]), [[0.5, 0.5]])
    drafts = validated(own, make_batch([[1]], limits=[1]), VOCAB, lambda *_: None)
    assert drafts.to_lists() == [[1]]


# -- rows and tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        None,
        5,
        1.5,
        "12",
        b"12",
        {1: 2},
        {1, 2},
        iter([1, 2]),
        np.array([1.0, 2.0]),
        np.array([np.nan]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(1),
        np.array([1], object),
        np.array(["1"]),
        Hostile(),
    ],
    ids=lambda row: f"{type(row).__name__}-{getattr(row, 'dtype', '')}",
)
def test_a_row_that_is_no_sequence_of_integers_costs_only_itself(check, row):
    assert check([row, [7]]) == ([[], [7]], ["row is not a sequence"])
    assert check([[7], row]) == ([[7], []], ["row is not a sequence"])


@pytest.mark.parametrize(
    "token",
    [
        None,
        1.0,
        float("nan"),
        float("inf"),
        "1",
        b"1",
        True,
        np.True_,
        np.float32(1),
        [1],
        Hostile(),
    ],
    ids=lambda token: type(token).__name__,
)
def test_a_draft_is_cut_before_what_is_no_integer(check, token):
    assert check([[7, token, 8], [9]]) == ([[7], [9]], ["token is not an integer"])


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 5, 2**31, -(2**31), 2**32 + 1, 2**63, 10**30])
def test_a_draft_is_cut_before_the_first_token_outside_the_vocabulary(check, token):
    kinds = ["token outside the vocabulary"]
    assert check([[7, token, 8], [9, 9]]) == ([[7], [9, 9]], kinds)
    assert check([[token], [9]]) == ([[], [9]], kinds)
    if abs(token) < 2**63:
        assert check(Drafts(np.array([[7, token], [9, 9]]), np.array([2, 2]))) == (
            [[7], [9, 9]],
            kinds,
        )


@pytest.mark.parametrize("token", [2**31, 2**32 + 1, 2**63, 2**64 - 1])
def test_unsigned_ids_do_not_wrap_around(check, token):
    kinds = ["token outside the vocabulary"]
    ids = np.array([[7, token], [9, 9]], np.uint64)
    assert check(Drafts(ids, np.array([2, 2]))) == ([[7], [9, 9]], kinds)
    assert check([ids[0], ids[1]]) == ([[7], [9, 9]], kinds)


def test_an_all_minus_one_padding_drafts_nothing(check):
    assert check([[-1] * 4, [-1] * 4])[0] == [[], []]


def test_the_fault_shows_the_token_found(make_batch):
    details = []
    validated([[3, 123]], make_batch([[1]]), VOCAB, lambda _, detail: details.append(detail))
    assert details == ["token 123 is not in [0, 100)"]


def test_an_exception_in_a_row_is_that_rows_fault(check):
    assert check([KeyError("no"), [7]]) == ([[], [7]], ["raised KeyError"])


def test_what_fails_while_it_is_read(check):
    rows, kinds = check([Broken(1, 2), [7]])
    assert (rows, len(kinds)) == ([[], [7]], 1)
    rows, kinds = check(Broken([1], [2]))
    assert (rows, len(kinds)) == ([[], []], 1)


def test_an_exception_that_cannot_be_shown(check):
    class UnprintableError(Exception):
        def __str__(self):
            raise RuntimeError("no str")

    assert check([UnprintableError(), [7]]) == ([[], [7]], ["raised UnprintableError"])


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize(
    "subclass",
    [lambda ids: np.ma.masked_greater(ids, 50), np.asmatrix],
    ids=["masked", "matrix"],
)
def test_subclasses_of_arrays_are_taken_as_plain_arrays(check, subclass):
    ids = subclass(np.array([[7, 5000], [9, 9]]))
    assert check(Drafts(ids, np.array([2, 2])))[0] == [[7], [9, 9]]


def test_every_faulty_row_is_reported(check):
    rows, kinds = check([[None], None, [1], [2, 2.5]], (4, 4, 4, 4))
    assert rows == [[], [], [1], [2]]
    assert sorted(kinds) == [
        "row is not a sequence",
        "token is not an integer",
        "token is not an integer",
    ]


# -- properties -----------------------------------------------------------------------------

tokens = st.integers(0, VOCAB - 1)
limits_of = st.lists(st.integers(1, 6), min_size=0, max_size=5)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    tokens,
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([KeyError("x"), object(), np.int64(3), np.float32(2), np.array(3)]),
    st.builds(np.array, st.lists(st.integers(-5, 200), max_size=4)),
    st.builds(np.array, st.lists(st.floats(), max_size=4)),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.lists(inner, max_size=5).map(deque),
        st.dictionaries(tokens, inner, max_size=3),
    ),
    max_leaves=20,
)
some_dtype = st.sampled_from(["i1", "i4", "i8", "u8", "f4", "f8", "?", "O"])


@st.composite
def arrays(draw, shape):
    """An array of about this shape, of any type."""
    if draw(st.integers(0, 4)) == 0:
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(
        st.lists(
            st.integers(-3, 127),
            min_size=int(np.prod(shape)),
            max_size=int(np.prod(shape)),
        )
    )
    return np.array(values, np.int64).reshape(shape).astype(draw(some_dtype))


@st.composite
def junk_columns(draw, n):
    width = draw(st.integers(0, 5))
    return Drafts(
        draw(st.one_of(arrays((n, width)), junk)),
        draw(st.one_of(arrays((n,)), junk)),
        draw(st.one_of(st.none(), arrays((n, width)), junk)),
        draw(st.one_of(st.none(), arrays((n, width, 2)), junk)),
    )


@given(st.data(), limits_of)
def test_any_junk_ends_as_valid_drafts(check, data, limits):
    n = len(limits)
    rows = st.lists(junk, min_size=n, max_size=n)
    check(data.draw(st.one_of(junk, rows, junk_columns(n))), limits)


@given(st.data(), limits_of)
def test_valid_rows_come_out_unchanged(check, data, limits):
    rows = [data.draw(st.lists(tokens, max_size=limit)) for limit in limits]
    assert check(rows, limits) == (rows, [])
    assert check([np.array(row, int) for row in rows], limits) == (rows, [])


@given(st.data(), limits_of, st.sampled_from(["i1", "i4", "i8", "u8"]), st.integers(0, 3))
def test_valid_columns_come_out_unchanged(check, data, limits, dtype, padding):
    rows = [data.draw(st.lists(tokens, max_size=limit)) for limit in limits]
    width = max(map(len, rows), default=0) + padding
    ids = np.full((len(rows), width), -1, dtype if dtype != "u8" else "i8")
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows], dtype)
    assert check(Drafts(ids.astype(dtype), lengths), limits) == (rows, [])


@given(st.data(), limits_of)
def test_invalid_tokens_cut_exactly_before_the_first(check, data, limits):
    rows = [data.draw(st.lists(st.integers(-2, VOCAB + 2), max_size=8)) for _ in limits]
    expected, faulty = [], False
    for row, limit in zip(rows, limits, strict=True):
        good = []
        for token in row[:limit]:
            if not 0 <= token < VOCAB:
                faulty = True
                break
            good.append(token)
        expected.append(good)
    assert check(rows, limits) == (expected, ["token outside the vocabulary"] * faulty)
