"""What a proposer returned, held against the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specplug.drafts import validated
from specplug.proposer import Batch, Drafts


@dataclass(frozen=True)
class Fault:
    """Something that a plugin raised or returned and should not have.

    Attributes:
        what: what it was.
        error: what was raised; None if it was returned.
    """

    what: str
    error: BaseException | None = None


def checked(result: Any, batch: Batch, vocab_size: int) -> tuple[list[list[int]], list[Fault]]:
    """Return the drafts that the runtime would make of a result, and what is wrong with it."""
    faults = [
        Fault(f"propose raised {type(row).__name__}: {row}", row)
        for row in (result if isinstance(result, list) else ())
        if isinstance(row, Exception)  # of a proposer that is a function
    ]

    def report(kind: str, detail: str) -> None:
        if not kind.startswith("raised "):  # noted already, with its error
            faults.append(Fault(f"propose returned what is no draft ({kind}): {detail}"))

    drafts = validated(result, batch, vocab_size, report)
    faults += [*_too_long(result, batch), *_no_probabilities(drafts)]
    return drafts.to_lists(), faults


def _too_long(result: Any, batch: Batch) -> list[Fault]:
    try:
        lengths = result.lengths if isinstance(result, Drafts) else list(map(len, result))
        over = np.flatnonzero(np.asarray(lengths) > batch.max_draft_tokens)
    except Exception:  # not one draft for each request, which has been reported
        return []
    return [
        Fault(
            f"propose returned {lengths[i]} tokens for {batch.request_ids[i]!r}, for which "
            f"batch.max_draft_tokens is {batch.max_draft_tokens[i]}"
        )
        for i in over.tolist()
    ]


def _no_probabilities(drafts: Drafts) -> list[Fault]:
    scores = drafts.scores
    if scores is None:
        return []
    valid = np.arange(scores.shape[1]) < drafts.lengths[:, None]
    wrong = scores[valid & ~((scores >= 0) & (scores <= 1))]  # not a number is neither
    return [Fault(f"propose returned the score {score}, not in [0, 1]") for score in wrong]
