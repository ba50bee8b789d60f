"""The compiled part of ``suffix``: indexing, finding matches, drafting from them.

A *text* is an array of tokens that only grows, with an index beside it: for each of a few n-gram
lengths, hash buckets that hold the last position of an n-gram, and for each position the one
before it in the same bucket. Walking such a chain visits the occurrences of an n-gram from the
most recent backwards; each is checked against the tokens, so a match is exact, and followed
backwards to its full length. Adding a token costs the same however long the text is.

Then the occurrences vote on each next token. One that matches a token less weighs half; each
further one back in time weighs less; and what is in the cache has a weight of its own.

All of it is in one file because numba's cache on disk notices changes of that file only.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from specplug.proposer import Int32Array
from specplug.proposers._kernel import (
    INT32S,
    INT64S,
    MATRIX32,
    compiled,
    int32_at,
    int64_at,
    mixed,
)

LENGTHS = np.array([1, 2, 3, 5, 8])
"""The indexed n-gram lengths; longer matches are found through the longest of them."""
MAX_MATCH = 64
"""Matches are not followed further back than this."""
MAX_OCCURRENCES = 4
"""Occurrences looked at per kind of text: the longest matches first, then the most recent."""
INDEX_BYTES_PER_TOKEN = 2 * 4 * len(LENGTHS)
"""Of each token that an index has room for."""

_NUM_LENGTHS, _LONGEST = len(LENGTHS), int(LENGTHS[-1])
_VISITS = 12 * MAX_OCCURRENCES
_AT_ONCE = 256  # fewer tokens than this are never put off
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_HALVED = 0.5 ** np.arange(MAX_MATCH + 1)
_RECENCY = 0.85 ** np.arange(2 * MAX_OCCURRENCES)
"""The weight of the first, second, ... occurrence, in the order in which they are found."""

_INDEX_ROWS = 2 * len(LENGTHS)
_OWN, _NEWER, _OLDER = 0, 1, 2
_FLOATS = types.Array(types.float64, 1, "C")
_SCORES = types.Array(types.float32, 2, "C")
_COLUMNS64 = types.Array(types.int64, 2, "C")


def new_index(capacity: int) -> Int32Array:
    """Return the index of a text of up to ``capacity`` tokens, empty.

    Buckets ``[len(LENGTHS), capacity]``, then chains ``[capacity, len(LENGTHS)]``, so that what
    belongs to one position lies together. An entry is the position of an n-gram's last token
    plus one; 0 is none.
    """
    return np.zeros(2 * _NUM_LENGTHS * capacity, np.int32)


@compiled(types.int64(types.uint64, types.int64))
def _bucket(state, capacity):  # type: ignore[no-untyped-def]
    return np.int64(((state & _LOW) * np.uint64(capacity)) >> _HALF)


@compiled(types.void(INT32S, types.int64, types.int64, INT64S, INT32S))
def index_tokens(tokens, begin, stop, owners, index):  # type: ignore[no-untyped-def]
    """Index the n-grams that end in ``[begin, stop)``.

    Negative tokens separate sequences, and no n-gram spans them. ``owners[i]`` is whose token
    ``i`` is; without owners all tokens are owner 0's.
    """
    capacity = len(index) // (2 * _NUM_LENGTHS)
    for end in range(begin, stop):
        if end + 1 < len(tokens) and tokens[end + 1] < 0:
            continue  # nothing follows
        state, level = np.uint64(owners[end] if len(owners) else 0), 0
        for back in range(min(end + 1, _LONGEST)):
            if tokens[end - back] < 0:
                break
            state = mixed(state, tokens[end - back])
            if back + 1 == LENGTHS[level]:
                bucket = level * capacity + _bucket(state, capacity)
                index[_NUM_LENGTHS * (capacity + end) + level] = index[bucket]
                index[bucket] = end + 1
                level += 1


@compiled(
    types.int64(
        INT32S, types.int64, INT32S, INT64S, INT32S, types.int64, types.int64,
        INT64S, INT64S, types.int64,
    )
)  # fmt: skip
def find_occurrences(  # type: ignore[no-untyped-def]
    tail, size, text, owners, index, owner, most, positions, matches, count
):
    """Find where the end of ``tail[:size]`` occurs in what is ``owner``'s, longest match first.

    Appends up to ``most`` occurrences behind the first ``count``: the position of the token that
    follows, and the length of the match. Returns the new count.
    """
    if not len(text):
        return count
    capacity = len(index) // (2 * _NUM_LENGTHS)
    latest = np.empty(_NUM_LENGTHS, np.int64)
    state, level = np.uint64(owner), 0
    for back in range(min(size, _LONGEST)):
        state = mixed(state, tail[size - 1 - back])
        if back + 1 == LENGTHS[level]:
            latest[level] = index[level * capacity + _bucket(state, capacity)]
            level += 1
    longer = np.int64(1 << 30)  # matches of this length were found already
    most += count
    for length in range(level - 1, -1, -1):
        follows, visits = latest[length], 0
        while follows > 0 and count < most and visits < _VISITS:
            match, reach = 0, min(MAX_MATCH, size, follows)
            while match < reach and text[follows - 1 - match] == tail[size - 1 - match]:
                match += 1
            if LENGTHS[length] <= match < longer and (
                not len(owners) or owners[follows - 1] == owner
            ):
                positions[count], matches[count] = follows, match
                count += 1
            follows = index[_NUM_LENGTHS * (capacity + follows - 1) + length]
            visits += 1
        longer = LENGTHS[length]
    return count


@compiled(types.void(INT64S, INT32S, INT64S, INT64S, INT64S, types.int64))
def update_indexes(  # type: ignore[no-untyped-def]
    tokens_at, num_tokens, indexes_at, capacities, indexed, budget
):
    """Index what is new of every request: the few tokens of a step at once, more by and by."""
    no_owners = np.empty(0, np.int64)
    for i in range(len(tokens_at)):
        stop = num_tokens[i] - 1  # an n-gram is of use once a token follows it
        missing = stop - indexed[i]
        if missing > _AT_ONCE:
            missing = min(missing, budget)
            stop = indexed[i] + missing
            budget -= missing
        if missing > 0:
            tokens = numba.carray(int32_at(tokens_at[i]), (num_tokens[i],))
            index = numba.carray(int32_at(indexes_at[i]), (2 * _NUM_LENGTHS * capacities[i],))
            index_tokens(tokens, indexed[i], stop, no_owners, index)
            indexed[i] = stop


@compiled(types.int64(INT64S, INT64S, types.int64, types.float64, _FLOATS))
def _weigh(kinds, matches, count, cache_weight, weights):  # type: ignore[no-untyped-def]
    """Weigh the occurrences, best first of each kind, and return the longest match."""
    longest, own = 0, 0
    for i in range(count):
        longest = max(longest, matches[i])
        own += kinds[i] == _OWN
    for i in range(count):
        weights[i] = _HALVED[longest - matches[i]]
        weights[i] *= _RECENCY[i] if i < own else cache_weight * _RECENCY[i - own]
    return longest


@compiled(types.int64(INT32S, _FLOATS, types.int64, _FLOATS))
def _elect(candidates, weights, count, share):  # type: ignore[no-untyped-def]
    """Return the token with the most weight, -1 if there is none, and its share of all."""
    same = 1
    while same < count and candidates[same] == candidates[0]:
        same += 1
    if same == count:
        share[0] = 1.0
        return candidates[0]
    best, best_weight, total = -1, 0.0, 0.0
    for i in range(count):
        if candidates[i] < 0:
            continue
        total += weights[i]
        weight = 0.0
        for j in range(count):
            if candidates[j] == candidates[i]:
                weight += weights[j]
        if weight > best_weight:
            best, best_weight = candidates[i], weight
    share[0] = best_weight / total
    return best


@compiled(types.Tuple((INT32S, INT64S, INT32S))(INT64S, INT64S))
def _text(addresses, sizes):  # type: ignore[no-untyped-def]
    """Return tokens, owners and index of a text of others."""
    return (
        numba.carray(int32_at(addresses[0]), (sizes[0],)),
        numba.carray(int64_at(addresses[1]), (sizes[0],)),
        numba.carray(int32_at(addresses[2]), (_INDEX_ROWS * sizes[1],)),
    )


@compiled(
    types.void(
        INT64S, INT32S, INT64S, INT64S, INT32S,
        INT64S, _COLUMNS64, _COLUMNS64,
        types.float64, types.float64, types.float64, MATRIX32, INT32S, _SCORES,
    )
)  # fmt: skip
def draft_batch(  # type: ignore[no-untyped-def]
    tokens_at, num_tokens, indexes_at, capacities, limits,
    owners, others_at, others_sizes,
    cache_weight, min_confidence, tokens_per_match, draft_ids, lengths, scores,
):  # fmt: skip
    """Draft for a whole batch from each request's own text and from two texts of others.

    ``owners`` int64 ``[n]`` is whose text of others each request may see; 0 is none of it. The
    texts of others are as ``SuffixCache.columns`` gives them.
    """
    room = 2 * MAX_OCCURRENCES
    kinds, positions, matches = (
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    )  # fmt: skip
    weights, share = np.empty(room, np.float64), np.empty(1, np.float64)
    candidates = np.empty(room, np.int32)
    no_owners = np.empty(0, np.int64)
    newer, newer_owners, newer_index = _text(others_at[0], others_sizes[0])
    older, older_owners, older_index = _text(others_at[1], others_sizes[1])
    for i in range(len(tokens_at)):
        size = num_tokens[i]
        tokens = numba.carray(int32_at(tokens_at[i]), (size,))
        index = numba.carray(int32_at(indexes_at[i]), (_INDEX_ROWS * capacities[i],))
        count = own = find_occurrences(
            tokens, size, tokens, no_owners, index, 0, MAX_OCCURRENCES, positions, matches, 0
        )
        kinds[:own] = _OWN
        if owners[i]:
            count = find_occurrences(
                tokens, size, newer, newer_owners, newer_index, owners[i], MAX_OCCURRENCES,
                positions, matches, own,
            )  # fmt: skip
            kinds[own:count] = _NEWER
            found, most = count, own + MAX_OCCURRENCES - count
            count = find_occurrences(
                tokens, size, older, older_owners, older_index, owners[i], most,
                positions, matches, found,
            )  # fmt: skip
            kinds[found:count] = _OLDER
        if not count:
            continue
        longest = _weigh(kinds, matches, count, cache_weight, weights)
        trust, confidence = 1.0 - _HALVED[longest], 1.0
        draft = draft_ids[i]
        for step in range(min(limits[i], np.int64(tokens_per_match * longest))):
            for j in range(count):
                at = positions[j] + step
                if kinds[j] == _OWN:  # goes on with its draft: a repetition repeats
                    candidates[j] = tokens[at] if at < size else draft[at - size]
                elif kinds[j] == _NEWER:
                    candidates[j] = newer[at] if at < len(newer) else -1
                else:
                    candidates[j] = older[at] if at < len(older) else -1
            token = _elect(candidates, weights, count, share)
            confidence *= share[0] * trust
            if token < 0 or confidence < min_confidence:
                break
            draft[step], scores[i, step], lengths[i] = token, share[0] * trust, step + 1
            agreeing = 0
            for j in range(count):
                if candidates[j] == token:
                    kinds[agreeing], positions[agreeing] = kinds[j], positions[j]
                    weights[agreeing] = weights[j]
                    agreeing += 1
            count = agreeing


@compiled(types.int64(INT32S, types.int64, INT32S, INT32S, types.int64, types.int64))
def _find_again(tokens, size, text, index, last, window):  # type: ignore[no-untyped-def]
    """Return where the text goes on behind the longest match nearest to ``last``; -1 if nowhere.

    A single token is enough close by: a word was put in, left out or replaced.
    """
    positions, matches = np.empty(MAX_OCCURRENCES, np.int64), np.empty(MAX_OCCURRENCES, np.int64)
    no_owners = np.empty(0, np.int64)
    count = find_occurrences(
        tokens, size, text, no_owners, index, 0, MAX_OCCURRENCES, positions, matches, 0
    )
    best, longest = -1, 2
    for i in range(count):
        nearer = best < 0 or abs(positions[i] - last) < abs(best - last)
        if matches[i] > longest or (matches[i] == longest and nearer):
            best, longest = positions[i], matches[i]
    if best < 0:
        for at in range(last, min(last + window, len(text) - 1)):
            if text[at] == tokens[size - 1]:
                return at + 1
    return best


@compiled(
    types.void(
        INT64S, INT32S, INT32S, INT32S, INT32S,
        INT64S, INT64S, INT64S, INT64S, types.int64, MATRIX32, INT32S,
    )
)  # fmt: skip
def follow_batch(  # type: ignore[no-untyped-def]
    tokens_at, num_tokens, num_new, num_prompt, limits,
    texts_at, sizes, indexes_at, positions, window, draft_ids, lengths,
):  # fmt: skip
    """Draft for a whole batch from the text that each request is expected to say.

    ``positions[i]`` is where in its text request ``i`` has got to; ``-1 - position`` where it
    was when it lost the thread. A text of size 0 is none.
    """
    for i in range(len(tokens_at)):
        if not sizes[i]:
            continue
        size, at = num_tokens[i], positions[i]
        tokens = numba.carray(int32_at(tokens_at[i]), (size,))
        text = numba.carray(int32_at(texts_at[i]), (sizes[i],))
        index = numba.carray(int32_at(indexes_at[i]), (2 * _NUM_LENGTHS * sizes[i],))
        for j in range(max(size - num_new[i], num_prompt[i]), size):
            if 0 <= at < len(text) and text[at] == tokens[j]:
                at += 1
            elif at >= 0:
                at = -1 - at
        if at < 0:
            found = _find_again(tokens, size, text, index, -1 - at, window)
            at = found if found >= 0 else at
        positions[i] = at
        if at >= 0:
            lengths[i] = min(limits[i], len(text) - at)
            draft_ids[i, : lengths[i]] = text[at : at + lengths[i]]
