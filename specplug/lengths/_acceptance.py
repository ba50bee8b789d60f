"""How likely draft tokens are to be accepted, from how earlier ones fared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specplug.length import Floats, Outcome
from specplug.proposer import Batch, Drafts

Ints = NDArray[np.integer[Any]]

_BINS = 8
"""Scores are compared with what came of them in so many classes."""
_FIRST_SHARE = 0.6
"""The chance of a token before anything is known, as a share of the score that it has."""
_FIRST_RATE = 0.5
"""The same of a token without a score."""
_FIRST_WEIGHT = 4.0
"""What is known at first weighs as much as so many judged tokens, and so does what is known of a
class when one of its positions is looked at."""
_MEMORY = 100.0
"""Judged tokens of a class and position that count; older ones fade."""
_SURPRISE = 3.0
"""A step's matches of a class are so many standard deviations from what was expected: the text has
changed, and what was known of the class counts no more than what is known at first."""
_REQUEST_DECAY = 0.95
"""What a request's judged token counts when the next one has been judged."""
_REQUEST_WEIGHT = 4.0
"""A request is expected to fare as others do; that weighs as much as so many accepted tokens."""
_HIGHEST = 0.98
"""Nothing is certain: a draft that always was right so far may not be the next time."""


class AcceptanceEstimate:
    """The chance of each draft token, given that those before it were accepted.

    Two parts: a table over all requests, by position and by the proposer's score, and for each
    request how much better or worse it fares than the table says.

    Args:
        k: the most draft tokens per request and step.
    """

    def __init__(self, k: int) -> None:
        scores = (np.arange(_BINS) + 0.5) / _BINS
        # The last class: tokens without a score.
        self._first = np.append(scores * _FIRST_SHARE, _FIRST_RATE)
        self._judged, self._matched = np.zeros((2, _BINS + 1, k))
        self._by_position = np.full((2, k), _FIRST_WEIGHT)
        self._by_position[0] *= _FIRST_RATE
        self._k = k
        self._grow(16)

    def _grow(self, slots: int) -> None:
        """Make room for so many requests."""
        self._kinds = np.zeros((slots, self._k), np.int64)
        self._expected = np.zeros((slots, self._k))
        self._record = np.zeros((2, slots))

    def begin(self, slot: int) -> None:
        """Know nothing of the request in this slot."""
        if slot >= self._record.shape[1]:
            kinds, expected, record = self._kinds, self._expected, self._record
            self._grow(2 * slot)
            self._kinds[: len(kinds)], self._expected[: len(kinds)] = kinds, expected
            self._record[:, : len(kinds)] = record
        self._record[:, slot] = 0

    def of_drafts(self, batch: Batch, drafts: Drafts) -> Floats:
        """Return the chances of a step's draft tokens, ``[n, width]``, and remember the drafts."""
        width = drafts.token_ids.shape[1]
        if drafts.scores is None:
            kinds = np.full((len(batch), width), _BINS)
        else:
            kinds = np.clip((drafts.scores * _BINS).astype(np.int64), 0, _BINS - 1)
        rates = self._rates()[kinds, np.arange(width)]
        self._kinds[batch.slots, :width] = kinds
        self._expected[batch.slots, :width] = rates
        return self._for_requests(batch, rates)

    def _rates(self) -> Floats:
        """Return the chance by class and position, ``[classes, k]``.

        A position that was judged little is expected to fare as the others of its class do.
        """
        whole = (self._matched.sum(axis=1) + _FIRST_WEIGHT * self._first) / (
            self._judged.sum(axis=1) + _FIRST_WEIGHT
        )
        rates: Floats = (self._matched + _FIRST_WEIGHT * whole[:, None]) / (
            self._judged + _FIRST_WEIGHT
        )
        return rates

    def before_drafting(self, batch: Batch) -> Floats:
        """Return the chances at each position, ``[n, k]``, of drafts that are not made yet."""
        rates = self._by_position[0] / self._by_position[1]
        return self._for_requests(batch, np.broadcast_to(rates, (len(batch), self._k)))

    def _for_requests(self, batch: Batch, rates: Floats) -> Floats:
        matched, expected = self._record[:, batch.slots]
        ratio = ((matched + _REQUEST_WEIGHT) / (expected + _REQUEST_WEIGHT))[:, None]
        # A good record multiplies the odds, not the chance: 0.8 by 1.2 is no near certainty.
        chances: Floats = rates * ratio / np.maximum(1 - rates + rates * ratio, 1.0)
        return np.minimum(chances, _HIGHEST)

    def observe(self, outcome: Outcome) -> None:
        """Learn how far drafts came true."""
        slots, positions = outcome.slots, np.arange(self._k)
        judged = positions < outcome.num_judged[:, None]
        matched = positions < outcome.num_matched[:, None]
        faded = _REQUEST_DECAY**outcome.num_judged
        self._record[0, slots] = self._record[0, slots] * faded + matched.sum(axis=1)
        expected = np.where(judged, self._expected[slots], 0.0).sum(axis=1)
        self._record[1, slots] = self._record[1, slots] * faded + expected

        rows, at = np.nonzero(judged)
        kinds = self._kinds[slots[rows], at]
        self._forget_surprised(kinds, self._expected[slots[rows], at], matched[rows, at])
        np.add.at(self._judged, (kinds, at), 1.0)
        np.add.at(self._matched, (kinds, at), matched[rows, at])
        self._by_position += matched.sum(axis=0), judged.sum(axis=0)
        self._fade()

    def _forget_surprised(self, kinds: Ints, chances: Floats, matched: NDArray[np.bool_]) -> None:
        """Forget most of classes whose tokens, ``[j]``, fared far otherwise than expected."""
        classes = len(self._judged)
        surplus = np.bincount(kinds, matched - chances, classes)
        # One more than the variance, or a single token could be a surprise.
        variance = np.bincount(kinds, chances * (1 - chances), classes) + 1
        surprised = np.abs(surplus) > _SURPRISE * np.sqrt(variance)
        known = np.maximum(self._judged, _FIRST_WEIGHT)
        kept = np.where(surprised[:, None], _FIRST_WEIGHT / known, 1.0)
        self._judged *= kept
        self._matched *= kept

    def _fade(self) -> None:
        full = self._judged > _MEMORY
        if full.any():
            self._judged[full] /= 2
            self._matched[full] /= 2
        full = self._by_position[1] > _MEMORY
        if full.any():
            self._by_position[:, full] /= 2
