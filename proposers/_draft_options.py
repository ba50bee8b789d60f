"""What all proposers that draft with a language model have in common for their users."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from specplug.proposer import Options

INSTALL_HINT = "Install what it needs with: pip install 'specplug[draft-model]'."


class DrafterOptions(Options):
    """Where the model runs, what it may take, and how long its drafts are."""

    revision: str | None = Field(
        None, description="Which revision of a checkpoint that has a name; None for the newest."
    )
    local_files_only: bool = Field(
        True, description="Whether a checkpoint that is not on this machine is refused."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="The type of weights and cache; the checkpoint's own by default."
    )
    device: str | None = Field(
        None, description="Where the model runs, such as 'cuda:1'; None for the target's device."
    )
    cache_bytes: PositiveInt = Field(
        2**30,
        description="Memory for the draft model's KV cache, for all requests together. A request "
        "that finds no room in it is not drafted for.",
    )
    max_prefill_tokens: PositiveInt = Field(
        1024,
        description="The most tokens per step of requests that the model has to catch up with, "
        "such as new ones. They are drafted for once that is done.",
    )
    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Drafts end before the probability of the most likely one, as the draft model "
        "has it, falls below this.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Above 0, drafts are sampled at this temperature, where the engine can use "
        "their probabilities; 0 takes what is most likely.",
    )
    seed: NonNegativeInt = Field(0, lt=2**64, description="What sampled drafts follow from.")
