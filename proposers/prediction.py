"""``prediction``: follow the text that the request says it expects.

For edits, where most of the answer is known beforehand: the request brings the old text, the
proposer follows it, finds its place again after a change, and otherwise leaves the request to a
fallback. As in the predicted outputs of hosted APIs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specplug.proposer import (
    Batch,
    Drafts,
    EngineInfo,
    Int32Array,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    RequestOptions,
    Usage,
)
from specplug.proposers.cascade import Cascade, Part

if TYPE_CHECKING:
    from specplug.proposers._text_follower import TextFollower

logger = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 32
"""No tokenizer makes fewer tokens of ordinary text; longer texts are refused unread."""


class PredictionOptions(Options):
    """What predictions may be, and what drafts where none helps."""

    fallback: str | None = Field(
        "suffix", description="The proposer for requests without a prediction or off its track."
    )
    fallback_options: dict[str, Any] = Field(
        default_factory=dict, description="The fallback's own options."
    )
    max_prediction_tokens: PositiveInt = Field(
        131_072, description="Longer predictions are not used."
    )


class PredictionRequestOptions(RequestOptions):
    """What a request may set: one of the two.

    Attributes:
        prediction: the expected output as text; tokenised once, when the request begins.
        prediction_token_ids: the expected output as token ids.
    """

    prediction: str | None = None
    prediction_token_ids: list[NonNegativeInt] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PredictionRequestOptions:
        if self.prediction is not None and self.prediction_token_ids is not None:
            raise ValueError("give prediction or prediction_token_ids, not both")
        return self


class PredictionFollower(Proposer):
    """Follows predictions, and drafts nothing else."""

    def __init__(self, options: PredictionOptions) -> None:
        self._most = options.max_prediction_tokens
        self._follower: TextFollower
        self._vocab_size = 0
        self._tokenizer: Any = None
        self._told: set[str] = set()

    def prepare(self, engine: EngineInfo) -> None:
        """Compile the kernels, or load them from numba's cache; load the tokenizer."""
        from specplug.proposers._text_follower import TextFollower

        self._follower = TextFollower()
        self._vocab_size = engine.vocab_size
        if engine.load_tokenizer is not None:
            try:
                self._tokenizer = engine.load_tokenizer()
            except Exception as error:
                logger.warning(
                    "specplug takes predictions as token ids only: the tokenizer cannot be "
                    "loaded (%s: %s).", type(error).__name__, error,
                )  # fmt: skip

    def begin(self, request: Request) -> None:
        """Take the request's prediction; one that cannot be used is said once of each kind."""
        try:
            text = self._prediction(request.options)
        except Exception as error:  # a tokenizer may fail in any way
            text = np.zeros(0, np.int32)
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.warning(
                    "specplug serves request %s without its prediction: %s. Others like it are "
                    "not logged.", request.id, error,
                )  # fmt: skip
        self._follower.begin(request.id, request.slot, text)

    def _prediction(self, options: RequestOptions) -> Int32Array:
        """Return the expected tokens, int32 ``[n]``; raises ValueError if they are no good."""
        ids: list[int] = getattr(options, "prediction_token_ids", None) or []
        text: str | None = getattr(options, "prediction", None)
        if text is not None:
            if len(text) > self._most * _CHARACTERS_PER_TOKEN:
                raise ValueError(f"it is longer than max_prediction_tokens ({self._most}) allows")
            ids = self._encode(text)
        if len(ids) > self._most:
            raise ValueError(f"it is longer than max_prediction_tokens ({self._most}) allows")
        if ids and max(ids) >= self._vocab_size:
            raise ValueError(f"it has a token that is not in [0, {self._vocab_size})")
        return np.array(ids, np.int32)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer; pass prediction_token_ids")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def propose(self, batch: Batch) -> Drafts:
        """Draft what comes next in each request's prediction."""
        return self._follower.draft(batch)

    def end(self, request_id: str) -> None:
        """Free the request's prediction."""
        self._follower.end(request_id)

    def usage(self) -> Usage:
        """Return the requests known and the bytes of their predictions."""
        return self._follower.usage()


class PredictionProposer(Cascade):
    """Follows predictions; what it cannot draft for is left to the fallback."""

    def __init__(self, options: PredictionOptions) -> None:
        fallback = {options.fallback: options.fallback_options} if options.fallback else {}
        follower = Part("prediction", PredictionFollower(options), PredictionRequestOptions)
        super().__init__([follower], fallback)


SPEC = ProposerSpec(
    name="prediction",
    factory="specplug.proposers.prediction:PredictionProposer",
    options=PredictionOptions,
    request_options=PredictionRequestOptions,
    summary="Follows the text that a request expects as its output; else leaves it to a fallback.",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
