"""Where each request is in a text that it is expected to say."""

from __future__ import annotations

import numpy as np

from specplug.proposer import Batch, Drafts, Int32Array, Usage
from specplug.proposers._columns import with_room
from specplug.proposers._kernel import token_addresses
from specplug.proposers._suffix_kernels import follow_batch, index_tokens, new_index

INDEXED_PER_CALL = 8192
"""Tokens of texts that are indexed per call: a long text is spread over several steps."""
WINDOW = 16
"""How far ahead a single token is enough to find the place again, in tokens."""

_NO_OWNERS = np.zeros(0, np.int64)


class TextFollower:
    """Follows one text per request, and finds the place again after a change."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._texts: dict[int, Int32Array] = {}
        self._indexes: dict[int, Int32Array] = {}
        self._unindexed: dict[int, int] = {}
        self._columns = np.zeros((0, 4), np.int64)

    def begin(self, request_id: str, slot: int, text: Int32Array) -> None:
        """Expect the request to say ``text``, int32 ``[n]``; empty for nothing in particular."""
        self._columns = with_room(self._columns, slot)
        self._slots[request_id] = slot
        self._columns[slot] = 0
        if len(text):
            index = new_index(len(text))
            self._texts[slot], self._indexes[slot] = text, index
            self._unindexed[slot] = 0
            self._columns[slot, :3] = text.ctypes.data, len(text), index.ctypes.data

    def end(self, request_id: str) -> None:
        """Forget the request and its text."""
        slot = self._slots.pop(request_id)
        self._columns[slot] = 0
        for held in (self._texts, self._indexes, self._unindexed):
            held.pop(slot, None)

    def draft(self, batch: Batch) -> Drafts:
        """Draft what comes next in each request's text; nothing where the thread is lost."""
        drafts = Drafts.empty(len(batch), int(batch.max_draft_tokens.max()))
        if not self._texts:
            return drafts
        self._index()
        texts_at, sizes, indexes_at, positions = self._columns[batch.slots].T.copy()
        follow_batch(
            token_addresses(batch),
            batch.num_tokens,
            batch.num_new_tokens,
            batch.num_prompt_tokens,
            batch.max_draft_tokens,
            texts_at,
            sizes,
            indexes_at,
            positions,
            WINDOW,
            drafts.token_ids,
            drafts.lengths,
        )
        self._columns[batch.slots, 3] = positions
        return drafts

    def _index(self) -> None:
        budget = INDEXED_PER_CALL
        for slot, begin in list(self._unindexed.items()):
            text = self._texts[slot]
            stop = min(len(text) - 1, begin + budget)
            index_tokens(text, begin, stop, _NO_OWNERS, self._indexes[slot])
            budget -= stop - begin
            self._unindexed[slot] = stop
            if stop == len(text) - 1:
                del self._unindexed[slot]

    def usage(self) -> Usage:
        """Return the requests known, and the bytes of texts and indexes."""
        held = (*self._texts.values(), *self._indexes.values())
        return Usage(len(self._slots), sum(array.nbytes for array in held))
