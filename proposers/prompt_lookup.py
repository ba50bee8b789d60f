"""``prompt_lookup``: continue as the prompt went on after the last tokens occurred in it.

Source: prompt lookup decoding (Saxena, 2023), as in transformers' ``prompt_lookup_num_tokens``,
but matches never come from the output: for summaries, edits and extraction, where the answer
quotes the prompt.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, PositiveInt

from specplug.proposer import Batch, Drafts, ProposerSpec
from specplug.proposers.ngram import LookupOptions, LookupProposer


class PromptLookupOptions(LookupOptions):
    """Which matches count: in a prompt alone, two equal tokens are mostly chance."""

    min_n: PositiveInt = Field(3, description="The shortest match, in tokens.")


class PromptLookupProposer(LookupProposer):
    """Looks the last tokens up in the prompt only."""

    def propose(self, batch: Batch) -> Drafts:
        """Draft what followed the longest match in the prompt."""
        return self._index.draft(batch, np.minimum(batch.num_prompt_tokens, batch.num_tokens))


SPEC = ProposerSpec(
    name="prompt_lookup",
    factory="specplug.proposers.prompt_lookup:PromptLookupProposer",
    options=PromptLookupOptions,
    summary="Continues the longest match of the last tokens in the prompt.",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
