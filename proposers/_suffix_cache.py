"""What earlier requests said, indexed and shared by all requests of a worker, within a limit.

The tokens lie in two *generations*, each a text that only grows. When the newer one is full, the
older one is dropped and a new one begun: eviction costs nothing, and positions never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np

from specplug.proposer import Int32Array
from specplug.proposers._kernel import Int64Array
from specplug.proposers._suffix_kernels import INDEX_BYTES_PER_TOKEN, index_tokens, new_index

BYTES_PER_TOKEN = INDEX_BYTES_PER_TOKEN + 4 + 8
"""Index, token and owner."""
INDEXED_PER_CALL = 4096
"""Tokens that are indexed per call at most."""
_SEPARATOR = -1

Snapshot = list[tuple[Int32Array, Int64Array]]


def owner_of(namespace: str) -> int:
    """Return the number that marks a namespace's tokens, in ``[1, 2**63)``."""
    return int.from_bytes(sha256(namespace.encode()).digest()[:8]) >> 1 or 1


def sequences(snapshot: Snapshot) -> Iterator[tuple[int, Int32Array]]:
    """Yield each sequence of a snapshot with its owner, oldest first."""
    for tokens, owners in snapshot:
        begin = 0
        for end in np.flatnonzero(tokens == _SEPARATOR).tolist():
            yield int(owners[begin]), tokens[begin:end]
            begin = end + 1


class Generation:
    """One text, whose each token of it is, and its index.

    Attributes:
        tokens: int32 ``[capacity]``: sequences, each followed by a negative token.
        owners: int64 ``[capacity]``.
        index: see :func:`specplug.proposers._suffix_kernels.new_index`.
        size: how many tokens are valid, separators included.
    """

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(capacity, np.int32)
        self.owners = np.zeros(capacity, np.int64)
        self.index = new_index(capacity)
        self.size = 0
        self._indexed = 0

    def append(self, tokens: Int32Array, owner: int) -> None:
        """Add a sequence; there must be room for it and a separator."""
        stop = self.size + len(tokens)
        self.tokens[self.size : stop] = tokens
        self.tokens[stop] = _SEPARATOR
        self.owners[self.size : stop + 1] = owner
        self.size = stop + 1

    def update(self, most: int | None) -> None:
        """Index what is new, at most so many tokens of it."""
        stop = self.size if most is None else min(self.size, self._indexed + most)
        index_tokens(self.tokens, self._indexed, stop, self.owners, self.index)
        self._indexed = stop


class SuffixCache:
    """The sequences that all requests of a worker may draft from, each within its namespace.

    Args:
        max_bytes: the most memory it may take; too little for a sequence turns it off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._capacity = max_bytes // (2 * BYTES_PER_TOKEN)
        self.newer, self.older = Generation(max(1, self._capacity)), Generation(1)

    def add(self, tokens: Int32Array, owner: int) -> None:
        """Take in a sequence, int32 ``[n]``; of one that is too long, its end."""
        tokens = tokens[max(0, len(tokens) - (self._capacity - 1)) :]
        if len(tokens) < 2 or self._capacity < 3:
            return
        if self.newer.size + len(tokens) + 1 > self._capacity:
            self.older, self.newer = self.newer, Generation(self._capacity)
        self.newer.append(tokens, owner)

    def update(self, most: int | None = INDEXED_PER_CALL) -> None:
        """Index what is new, by and by: by default as many tokens as a step can bear."""
        self.older.update(most)
        self.newer.update(most)

    def snapshot(self) -> Snapshot:
        """Return what is there now, oldest first: tokens and owners of each generation.

        Views, not copies: a text only grows, so what they show never changes.
        """
        return [(g.tokens[: g.size], g.owners[: g.size]) for g in (self.older, self.newer)]

    @property
    def num_bytes(self) -> int:
        """The bytes that are in use."""
        return (self.newer.size + self.older.size) * BYTES_PER_TOKEN

    def columns(self) -> tuple[Int64Array, Int64Array]:
        """Return, for a kernel, addresses and sizes of the newer and the older generation.

        int64 ``[2, 3]``: of the tokens, the owners and the index; int64 ``[2, 2]``: the valid
        tokens and the capacity.
        """
        both = (self.newer, self.older)
        addresses = [[part.ctypes.data for part in (g.tokens, g.owners, g.index)] for g in both]
        sizes = [[g.size, len(g.tokens)] for g in both]
        return np.array(addresses, np.int64), np.array(sizes, np.int64)
