"""``match_scaled``: as much of a draft as its own scores promise."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from specplug.length import LengthPolicy, LengthPolicySpec, Lengths, Load
from specplug.proposer import Batch, Drafts, Options


class MatchScaledOptions(Options):
    """Options of ``match_scaled``."""

    min_probability: float = Field(
        0.2,
        ge=0,
        le=1,
        description="A token is verified if, by the proposer's scores, it and all before it are "
        "accepted with at least this chance.",
    )


class MatchScaled(LengthPolicy):
    """Cuts drafts where the product of the scores gets small. Drafts without scores stay whole."""

    def __init__(self, options: MatchScaledOptions) -> None:
        self._least = options.min_probability

    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Lengths:
        """Return how many tokens of each draft have a product of scores above the option."""
        if drafts.scores is None:
            return drafts.lengths
        likely = np.cumprod(drafts.scores, axis=1) >= self._least
        lengths: Lengths = np.minimum(likely.sum(axis=1, dtype=np.int32), drafts.lengths)
        return lengths


SPEC = LengthPolicySpec(
    name="match_scaled",
    factory="specplug.lengths.match_scaled:MatchScaled",
    options=MatchScaledOptions,
    summary="As much of a draft as the proposer's own scores promise to be accepted.",
)
