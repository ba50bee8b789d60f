"""``fixed``: every draft as long as the proposer made it."""

from __future__ import annotations

from specplug.length import LengthPolicy, LengthPolicySpec, Lengths, Load
from specplug.proposer import Batch, Drafts, Options


class FixedLength(LengthPolicy):
    """Verifies whole drafts, whatever they are worth."""

    def __init__(self, options: Options) -> None:
        """Take no options."""

    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Lengths:
        """Return the drafts' lengths."""
        return drafts.lengths


SPEC = LengthPolicySpec(
    name="fixed",
    factory="specplug.lengths.fixed:FixedLength",
    summary="Every draft as long as the proposer made it, up to num_speculative_tokens.",
)
