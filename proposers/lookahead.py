"""``lookahead``: let the target model itself guess ahead, and remember what it said.

Lookahead decoding (Fu et al., arXiv 2402.02057) in the linear form that engines can verify. The
draft slots hold an n-gram that was seen before and continues the last tokens, else the current
Jacobi guess. The target's own token behind every drafted one, rejected ones too, is the next
guess for its position, and the n-grams it makes with the tokens before it are remembered.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, PositiveInt

from specplug.proposer import (
    Acceptance,
    Batch,
    Capability,
    Drafts,
    EngineInfo,
    Int32Array,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    Usage,
)

if TYPE_CHECKING:
    from specplug.proposers._kernel import Int64Array
    from specplug.proposers._suffix_cache import SuffixCache
    from specplug.proposers._suffix_index import SuffixIndex

logger = logging.getLogger(__name__)

_NONE = -1
_POOL_WEIGHT = 1.0
"""An n-gram that the target guessed counts as much as one of the text."""


class LookaheadOptions(Options):
    """How much is remembered."""

    pool_bytes: PositiveInt = Field(
        16 * 2**20,
        description="Memory for the n-grams that the target guessed, for all requests together; "
        "the oldest go first. Each request sees its own.",
    )


@dataclass(slots=True)
class _State:
    slot: int
    last: int = -1  # the last token, once one is known


class LookaheadProposer(Proposer):
    """Drafts from the target's own earlier guesses."""

    uses = frozenset({Capability.TARGET_TOKENS})

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._states: dict[str, _State] = {}
        self._count = 0
        self._guesses: Int32Array  # [slots, K], -1 for none
        self._owners: Int64Array  # [slots], marks each request's n-grams in the pool
        self._index: SuffixIndex
        self._pool: SuffixCache

    def prepare(self, engine: EngineInfo) -> None:
        """Compile the kernels, or load them from numba's cache."""
        from specplug.proposers._suffix_cache import SuffixCache
        from specplug.proposers._suffix_index import SuffixIndex

        self._index = SuffixIndex.shared(engine)
        self._pool = SuffixCache(self._options.pool_bytes)
        self._guesses = np.zeros((0, engine.num_speculative_tokens), np.int32)
        self._owners = np.zeros(0, np.int64)
        self._looks_ahead = Capability.TARGET_TOKENS in engine.provides
        if not self._looks_ahead:
            logger.warning(
                "specplug lookahead: the backend '%s' does not give the target's tokens at "
                "rejected positions; it learns from accepted tokens only.", engine.backend,
            )  # fmt: skip

    def begin(self, request: Request) -> None:
        """Start with no guess and nothing remembered."""
        from specplug.proposers._columns import with_room

        slot = request.slot
        self._index.begin(request.id, slot)
        self._owners = with_room(self._owners, slot)
        self._guesses = with_room(self._guesses, slot)
        self._count += 1
        self._owners[slot] = self._count
        self._guesses[slot] = _NONE
        self._states[request.id] = _State(slot)

    def observe(self, acceptance: Acceptance) -> None:
        """Take the target's tokens at rejected positions as the next guess, and remember them."""
        targets = acceptance.target_token_ids or [()] * len(acceptance.request_ids)
        for request_id, draft, target, new in zip(
            acceptance.request_ids,
            acceptance.draft_token_ids,
            targets,
            acceptance.new_token_ids,
            strict=True,
        ):
            state = self._states[request_id]
            accepted = len(new) - 1  # of the draft; the last new token is the target's own
            guess = target[accepted + 1 :]
            self._guesses[state.slot] = _NONE
            if guess:
                self._guesses[state.slot, : len(guess)] = guess
                # What the target saw, two tokens each time, and what it put behind them.
                seen = [state.last, *draft]
                ngrams: list[int] = []
                for i in range(accepted + 1, len(target)):
                    ngrams += (seen[i - 1], seen[i], target[i], _NONE)
                owner = int(self._owners[state.slot])
                self._pool.add(np.array(ngrams[:-1], np.int32), owner)
            state.last = new[-1]

    def propose(self, batch: Batch) -> Drafts:
        """Draft n-grams that continue each sequence, and fill up with guesses."""
        self._pool.update(None)
        drafts = self._index.draft(
            batch, self._owners[batch.slots], self._pool, cache_weight=_POOL_WEIGHT
        )
        if not self._looks_ahead:
            return drafts
        width = drafts.token_ids.shape[1]
        positions = np.arange(width)
        guesses = self._guesses[batch.slots, :width]
        fill = np.where(guesses >= 0, guesses, _last_tokens(batch, width))
        pooled = positions < drafts.lengths[:, None]
        return Drafts(np.where(pooled, drafts.token_ids, fill), batch.max_draft_tokens)

    def end(self, request_id: str) -> None:
        """Forget the request; what the pool holds of it is seen by nobody and goes in time."""
        slot = self._states.pop(request_id).slot
        self._index.end(request_id, slot)
        self._owners[slot] = 0

    def usage(self) -> Usage:
        """Return the requests known and the bytes of indexes and pool."""
        held = self._index.usage().num_bytes + self._pool.num_bytes
        return Usage(len(self._states), held)


def _last_tokens(batch: Batch, width: int) -> Int32Array:
    """Return each request's last tokens, as many as it may draft: a first guess like any other.

    Returns:
        int32 ``[n, width]``; what is behind a request's own limit repeats its last token.
    """
    sizes, limits = batch.num_tokens[:, None], batch.max_draft_tokens[:, None]
    at = np.maximum(sizes - limits, 0) + np.arange(width)
    last: Int32Array = batch.token_ids[batch.rows[:, None], np.minimum(at, sizes - 1)]
    return last


SPEC = ProposerSpec(
    name="lookahead",
    factory="specplug.proposers.lookahead:LookaheadProposer",
    options=LookaheadOptions,
    summary="Drafts from the target's own guesses at rejected positions (Jacobi iteration).",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
