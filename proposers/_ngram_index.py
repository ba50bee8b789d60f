"""An index of a request's n-grams that grows with it, and the compiled kernel that reads it.

For each n-gram length, a hash table per request maps every n-gram to where it occurred. It holds
positions only; the tokens stay in the engine's matrix, and every hit is checked against them, so
a match is exact. A step costs the tokens that are new, not those that are there.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from specplug.proposer import Batch, Drafts, Int32Array, Usage
from specplug.proposers._columns import with_room
from specplug.proposers._kernel import (
    INT32S,
    INT64S,
    MATRIX32,
    compiled,
    int32_at,
    mixed,
    token_addresses,
)

INDEXED_PER_CALL = 8192
"""Tokens indexed per call at most: a new long prompt is spread over several steps."""
_MIN_CAPACITY = 1024


@compiled(types.int64(INT32S, types.int64, types.int64, types.int64))
def _slot_of(tokens, end, n, mask):  # type: ignore[no-untyped-def]
    """Hash the n-gram that ends at ``end`` (inclusive) to a table slot."""
    state = np.uint64(n)
    for i in range(n):
        state = mixed(state, tokens[end - i])
    return np.int64(state & np.uint64(mask))


@compiled(types.boolean(INT32S, types.int64, types.int64, types.int64))
def _same(tokens, end, other, n):  # type: ignore[no-untyped-def]
    for i in range(n):  # noqa: SIM110 (numba compiles no generators)
        if tokens[end - i] != tokens[other - i]:
            return False
    return True


@compiled(types.int64(INT32S, types.int64, types.int64, INT32S, types.int64))
def _find(tokens, end, n, table, mask):  # type: ignore[no-untyped-def]
    """Return the slot that holds the n-gram ending at ``end``, or the empty one where it goes."""
    slot = _slot_of(tokens, end, n, mask)
    while table[slot] != 0 and not _same(tokens, end, table[slot] - 1, n):
        slot = (slot + 1) & mask
    return slot


@compiled(
    types.void(
        INT64S, INT32S, INT32S, INT64S, INT64S, INT64S,
        types.int64, types.int64, types.boolean, types.int64,
        INT32S, MATRIX32, INT32S,
    )
)  # fmt: skip
def _draft(  # type: ignore[no-untyped-def]
    tokens_at, num_tokens, source_ends, tables_at, capacities, indexed,
    min_n, max_n, most_recent, budget,
    limits, draft_ids, draft_lengths,
):  # fmt: skip
    """Index what is new and draft for a whole batch.

    Row ``i`` may be continued from its own tokens ``[0, source_ends[i])``. Tables hold the
    position of an n-gram's last token plus one; 0 is an empty slot.
    """
    for i in range(len(tokens_at)):
        size, source_end, capacity = num_tokens[i], source_ends[i], capacities[i]
        mask = capacity - 1
        tokens = numba.carray(int32_at(tokens_at[i]), (size,))
        table = numba.carray(int32_at(tables_at[i]), ((max_n - min_n + 1) * capacity,))

        # An n-gram is of use once a token follows it.
        begin, stop = indexed[i], max(indexed[i], min(source_end - 1, indexed[i] + budget))
        for n in range(min_n, max_n + 1):
            part = table[(n - min_n) * capacity : (n - min_n + 1) * capacity]
            for end in range(max(begin, n - 1), stop):
                slot = _find(tokens, end, n, part, mask)
                if most_recent or part[slot] == 0:
                    part[slot] = end + 1
        indexed[i] = stop
        budget -= stop - begin

        length = 0
        for n in range(min(max_n, size), min_n - 1, -1):
            part = table[(n - min_n) * capacity : (n - min_n + 1) * capacity]
            source = part[_find(tokens, size - 1, n, part, mask)]
            if source == 0:
                continue
            for _ in range(limits[i]):
                if source < source_end:
                    draft_ids[i, length] = tokens[source]
                elif source_end == size:  # past the end: the repetition goes on
                    draft_ids[i, length] = draft_ids[i, source - size]
                else:
                    break
                source += 1
                length += 1
            break
        draft_lengths[i] = length


class NgramIndex:
    """Drafts for a batch by looking up the longest n-gram that ends each sequence.

    Args:
        min_n: the shortest n-gram that counts as a match.
        max_n: the longest one looked for.
        most_recent: continue from the most recent occurrence; else from the earliest.
    """

    def __init__(self, min_n: int, max_n: int, *, most_recent: bool) -> None:
        self._min_n, self._max_n, self._most_recent = min_n, max_n, most_recent
        self._slots: dict[str, int] = {}
        self._tables: dict[int, Int32Array] = {}
        self._tables_at = np.zeros(0, np.int64)
        self._capacities = np.zeros(0, np.int64)
        self._indexed = np.zeros(0, np.int64)

    def begin(self, request_id: str, slot: int) -> None:
        """Start with nothing indexed. The table is made when the first draft is asked for."""
        self._tables_at, self._capacities, self._indexed = (
            with_room(column, slot) for column in (self._tables_at, self._capacities, self._indexed)
        )
        self._slots[request_id] = slot
        self._capacities[slot] = self._indexed[slot] = 0

    def end(self, request_id: str) -> None:
        """Free what belongs to the request."""
        slot = self._slots.pop(request_id)
        self._tables.pop(slot, None)
        self._capacities[slot] = 0

    def usage(self) -> Usage:
        """Return how many requests are indexed, and the bytes of their tables."""
        return Usage(len(self._slots), sum(table.nbytes for table in self._tables.values()))

    def draft(self, batch: Batch, source_ends: Int32Array) -> Drafts:
        """Draft for every request from the first ``source_ends[i]`` of its own tokens."""
        slots = batch.slots
        # A table more than half full would be slow to search.
        for i in np.flatnonzero(2 * source_ends >= self._capacities[slots]):
            self._grow(int(slots[i]), int(source_ends[i]))
        indexed = self._indexed[slots]
        drafts = Drafts.empty(len(batch), int(batch.max_draft_tokens.max()))
        _draft(
            token_addresses(batch),
            batch.num_tokens,
            source_ends,
            self._tables_at[slots],
            self._capacities[slots],
            indexed,
            self._min_n,
            self._max_n,
            self._most_recent,
            INDEXED_PER_CALL,
            batch.max_draft_tokens,
            drafts.token_ids,
            drafts.lengths,
        )
        self._indexed[slots] = indexed
        return drafts

    def _grow(self, slot: int, num_tokens: int) -> None:
        capacity = max(_MIN_CAPACITY, 1 << (3 * num_tokens - 1).bit_length())
        table = np.zeros((self._max_n - self._min_n + 1) * capacity, np.int32)
        self._tables[slot] = table
        self._tables_at[slot] = table.ctypes.data
        self._capacities[slot] = capacity
        self._indexed[slot] = 0
