"""The engines' own n-gram rules as proposers, to compare with: written from the rules alone.

Both continue the earliest occurrence of the longest match, with no index: a step searches all
of the text. What they draft is the engines'; what a step costs is not.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from pydantic import Field, PositiveInt

from specplug.proposer import FunctionProposer, Int32Array, Options, ProposerSpec
from specplug.proposers.ngram import LookupOptions


class VllmNgramOptions(LookupOptions):
    """Which matches count; vLLM's ``prompt_lookup_min`` and ``prompt_lookup_max``."""

    min_n: PositiveInt = Field(5, description="The shortest match, in tokens.")


class HfPromptLookupOptions(Options):
    """Which matches count, and where a draft ends."""

    max_matching_ngram_size: PositiveInt = Field(
        2, description="The longest match looked for, in tokens."
    )
    eos_token_id: int | None = Field(None, description="A draft ends before this token.")


def earliest_match(tokens: Int32Array, max_tokens: int, *, min_n: int, max_n: int) -> list[int]:
    """Return what followed the earliest occurrence of the longest match of the last tokens.

    Args:
        tokens: int32 ``[num_tokens]``, prompt and output.
        max_tokens: the longest draft; it also ends where ``tokens`` end.
        min_n: the shortest match that counts, in tokens.
        max_n: the longest one looked for; longer ones count as this long.

    Returns:
        Up to ``max_tokens`` token ids, none without a match.
    """
    last = found = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for n in range(1, min(max_n, last) + 1):
        ends = ends[ends >= n - 1]
        ends = ends[tokens[ends - (n - 1)] == tokens[last - (n - 1)]]
        if not len(ends):
            break
        if n >= min_n:
            found = int(ends[0])
    draft: list[int] = tokens[found + 1 : found + 1 + max_tokens].tolist()
    return draft


def hf_prompt_lookup(
    tokens: Int32Array, max_tokens: int, *, options: HfPromptLookupOptions
) -> list[int]:
    """Return the draft of transformers' ``PromptLookupCandidateGenerator``."""
    draft = earliest_match(tokens, max_tokens, min_n=1, max_n=options.max_matching_ngram_size)
    if options.eos_token_id in draft:
        return draft[: draft.index(options.eos_token_id)]
    return draft


def make_vllm_ngram(options: VllmNgramOptions) -> FunctionProposer:
    """Return a proposer with the rule of vLLM's ``ngram`` method."""
    return FunctionProposer(partial(earliest_match, min_n=options.min_n, max_n=options.max_n))


def make_hf_prompt_lookup(options: HfPromptLookupOptions) -> FunctionProposer:
    """Return a proposer with the rule of transformers' ``prompt_lookup_num_tokens``."""
    return FunctionProposer(partial(hf_prompt_lookup, options=options))


VLLM_NGRAM = ProposerSpec(
    name="baseline_vllm_ngram",
    factory=make_vllm_ngram,
    options=VllmNgramOptions,
    summary="vLLM's rule: the earliest of the longest matches, 5 tokens unless told otherwise.",
)
HF_PROMPT_LOOKUP = ProposerSpec(
    name="baseline_hf_prompt_lookup",
    factory=make_hf_prompt_lookup,
    options=HfPromptLookupOptions,
    summary="Hugging Face's rule: the earliest of the longest matches, up to 2 tokens.",
)
BASELINES = (VLLM_NGRAM, HF_PROMPT_LOOKUP)
