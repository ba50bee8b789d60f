"""Which blocks of the draft model's KV cache belong to which request: numpy columns only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specplug.proposer import Int32Array
from specplug.proposers._columns import with_room

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

BLOCK_SIZE = 16
"""Tokens of a block."""
SCRATCH = 0
"""The block that padding is written to; it belongs to nobody."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockTable:
    """Gives out blocks, each to one request, and finds the place of every token.

    Args:
        num_blocks: all blocks there are; block 0 is never given out.
        max_tokens: the most tokens of one request.
    """

    def __init__(self, num_blocks: int, max_tokens: int) -> None:
        self._free = np.arange(num_blocks - 1, SCRATCH, -1, dtype=np.int32)  # a stack
        self._num_free = len(self._free)
        self._table = np.zeros((0, blocks_for(max_tokens)), np.int32)  # 0 is SCRATCH
        self._held = np.zeros(0, np.int32)

    @property
    def num_held(self) -> int:
        """How many blocks are given out."""
        return len(self._free) - self._num_free

    def begin(self, slot: int) -> None:
        """Have a row for the request ``slot``."""
        self._table = with_room(self._table, slot)
        self._held = with_room(self._held, slot)

    def reserve(self, slots: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Give each request the blocks for all its tokens, or none.

        Those that want least come first, so that a long prompt waits and the others go on.

        Args:
            slots: int32 ``[n]``.
            num_tokens: int32 ``[n]``, at most ``max_tokens``.

        Returns:
            ``[n]``, who has the blocks.
        """
        wanted = np.maximum(-(-num_tokens // BLOCK_SIZE) - self._held[slots], 0)
        order = np.argsort(wanted, kind="stable")
        given = np.zeros(len(slots), np.bool_)
        given[order] = np.cumsum(wanted[order]) <= self._num_free
        self._give(slots[given], wanted[given])
        return given

    def _give(self, slots: Int32Array, counts: Int32Array) -> None:
        total = int(counts.sum())
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(slots, counts)
        taken = self._free[self._num_free - total : self._num_free]
        self._table[rows, self._held[rows] + within] = taken
        self._num_free -= total
        self._held[slots] += counts

    def end(self, slot: int) -> None:
        """Take all blocks of a request back."""
        count = int(self._held[slot])
        self._free[self._num_free : self._num_free + count] = self._table[slot, :count]
        self._num_free += count
        self._table[slot] = SCRATCH
        self._held[slot] = 0

    def places(self, slots: Int32Array, num_tokens: int) -> Int64Array:
        """Return where the first ``num_tokens`` tokens of requests lie.

        Returns:
            int64 ``[n, num_tokens]``, places in the cache; in the scratch block for tokens that
            a request has no block for.
        """
        blocks = self._table[slots, : blocks_for(num_tokens)].astype(np.int64)
        places = blocks[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
        return places.reshape(len(slots), -1)[:, :num_tokens]
