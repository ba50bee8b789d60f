"""Whether a sequence ends with its last token, asked for each token in turn."""

from __future__ import annotations

from itertools import chain
from typing import Any


class Stopping:
    """The stopping criteria of one call: what can be seen on the host, and the others.

    Plain ``generate`` asks all of them, in tensor operations, for every token; maximum length and
    EOS tokens are all that most calls have, and need none.

    Args:
        criteria: the prepared ``StoppingCriteriaList``.

    Attributes:
        max_length: the length, prompt included, at which a sequence ends at the latest.
        eos_token_ids: the tokens that end it; may be empty.
        others: whether there are criteria beside these.
    """

    def __init__(self, criteria: Any) -> None:
        from transformers.generation import StoppingCriteriaList
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        eos = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
        known = (MaxLengthCriteria, EosTokenCriteria)
        self.max_length: int = min(lengths)
        self.eos_token_ids = frozenset(chain.from_iterable(eos))
        self._others = StoppingCriteriaList(one for one in criteria if type(one) not in known)
        self.others = bool(self._others)

    def __call__(self, tokens: Any, token: int, scores: Any) -> bool:
        """Return whether the sequence ends.

        Args:
            tokens: int64 ``[1, length]``, the new token included.
            token: the last of them.
            scores: the scores so far, one tensor a step, if they are recorded.
        """
        ended = token in self.eos_token_ids or tokens.shape[1] >= self.max_length
        # Asked in any case: they may count how often they are.
        return bool(self._others(tokens, scores).all()) | ended if self.others else ended
