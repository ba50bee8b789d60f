"""The index of every request's own tokens, for the proposers that look for their longest match."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Usage
from specplug.proposers._columns import with_room
from specplug.proposers._kernel import Int64Array, token_addresses
from specplug.proposers._suffix_cache import SuffixCache
from specplug.proposers._suffix_kernels import MAX_MATCH, draft_batch, new_index, update_indexes

INDEXED_PER_CALL = 8192
"""Tokens of long new texts that are indexed per call: a prompt is spread over several steps."""
_MIN_CAPACITY = 256
_ROOM = 1.5


class SuffixIndex:
    """Indexes each request's tokens, prompt and output; several proposers may share one."""

    def __init__(self) -> None:
        self._num_sharers = 0
        self._users: dict[str, int] = {}
        self._indexes: dict[int, Int32Array] = {}
        self._indexes_at = np.zeros(0, np.int64)
        self._capacities = np.zeros(0, np.int64)
        self._indexed = np.zeros(0, np.int64)

    @classmethod
    def shared(cls, engine: EngineInfo) -> SuffixIndex:
        """Return the one of this worker, for one more proposer."""
        index: SuffixIndex = engine.shared.setdefault(cls, cls())
        index._num_sharers += 1
        return index

    def begin(self, request_id: str, slot: int) -> None:
        """Start with nothing indexed; the index is made when the first draft is asked for."""
        self._indexes_at, self._capacities, self._indexed = (
            with_room(column, slot)
            for column in (self._indexes_at, self._capacities, self._indexed)
        )
        self._users[request_id] = self._users.get(request_id, 0) + 1

    def end(self, request_id: str, slot: int) -> None:
        """Free the request's index once its last user has ended it."""
        self._users[request_id] -= 1
        if not self._users[request_id]:
            del self._users[request_id]
            self._indexes.pop(slot, None)
            self._capacities[slot] = self._indexed[slot] = 0

    def draft(
        self,
        batch: Batch,
        owners: Int64Array,
        cache: SuffixCache,
        *,
        cache_weight: float = 0.25,
        min_confidence: float = 0.0,
        tokens_per_match: float = MAX_MATCH,
    ) -> Drafts:
        """Index what is new, which once a step is enough, and draft for every request.

        Args:
            batch: the batch.
            owners: int64 ``[n]``, whose part of the cache each request sees; 0 for none.
            cache: more text to draft from.
            cache_weight: how much an occurrence in the cache counts; by default its match must
                be two tokens longer to count as much as one of the request's own.
            min_confidence: a draft ends before the probability that all of it is accepted, as the
                scores have it, falls below this.
            tokens_per_match: the most draft tokens for each token of the longest match.
        """
        slots, tokens_at = batch.slots, token_addresses(batch)
        for i in np.flatnonzero(batch.num_tokens > self._capacities[slots]):
            self._grow(int(slots[i]), int(batch.num_tokens[i]))
        indexes_at, capacities = self._indexes_at[slots], self._capacities[slots]
        indexed = self._indexed[slots]
        update_indexes(
            tokens_at, batch.num_tokens, indexes_at, capacities, indexed, INDEXED_PER_CALL
        )
        self._indexed[slots] = indexed

        width = int(batch.max_draft_tokens.max())
        drafts = Drafts.empty(len(batch), width)
        scores = np.zeros((len(batch), width), np.float32)
        draft_batch(
            tokens_at,
            batch.num_tokens,
            indexes_at,
            capacities,
            batch.max_draft_tokens,
            owners,
            *cache.columns(),
            cache_weight,
            min_confidence,
            tokens_per_match,
            drafts.token_ids,
            drafts.lengths,
            scores,
        )
        return replace(drafts, scores=scores)

    def usage(self) -> Usage:
        """Return how many requests are known, and a sharer's part of the bytes of their indexes."""
        held = sum(index.nbytes for index in self._indexes.values())
        return Usage(len(self._users), held // self._num_sharers)

    def _grow(self, slot: int, num_tokens: int) -> None:
        capacity = max(_MIN_CAPACITY, int(num_tokens * _ROOM))
        index = new_index(capacity)
        self._indexes[slot] = index
        self._indexes_at[slot] = index.ctypes.data
        self._capacities[slot] = capacity
        self._indexed[slot] = 0
