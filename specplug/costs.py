"""Learns what an engine's steps cost, from the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, NamedTuple

import numpy as np

from specplug.length import Floats, StepCosts

_TOKEN_SHARE_ON_CPU = 0.03
_TOKEN_SHARE_ELSEWHERE = 0.005
"""What one more token adds to a step with one token, before anything is measured: on a GPU weights
dominate a small step."""
_JUMP = 0.3
"""How far, as a share, a step with twice the tokens may be from what that says: kernels change
with the number of tokens, and some are padded."""

_NOISE = 0.1
"""How much a step's time varies, as a share of it."""
_DRIFT = 0.01
"""How much a step's cost may change from one step to the next, as a share of it."""
_FORGETTING = 1e-4
"""The share of what is known of how cost depends on tokens that each step makes uncertain again."""
_FIRST_DRAFTS = 8
"""The first calls of a proposer are slow: of so many the fastest counts."""
_LEAST_SECONDS = 1e-9
"""A clock may be too coarse to see that time passed."""
_FURTHEST = 3.0
"""A step counts as at most this many standard deviations off: others use the machine too."""


class _Curve:
    """The logarithm of a step's seconds, by draft tokens per request, followed by a Kalman filter.

    A Gaussian process: a line, and a random walk on it, since what one more token adds is not the
    same everywhere. Two tokens may take 1.7 times as long as one, and seven hardly longer than two;
    a line through one and two says 5 for seven, and seven would never be tried. What a walk says of
    lengths that were not seen is what the nearest that were take, and what the line adds.

    Args:
        extras: ``[m]``, increasing from 0: the draft tokens per request at which it is known.
        seconds: of one step ...
        extra: ... which had so many.
        share: what a draft token per request is expected to add, as a share of a step without.
    """

    def __init__(self, extras: Floats, seconds: float, extra: float, share: float) -> None:
        self._extras = extras
        self._logs = np.log1p(share * extras) + log(seconds) - log(1 + share * extra)
        tilt, doublings = share * extras / (1 + share * extras), np.log2(1 + extras)
        walk = _JUMP**2 * np.minimum.outer(doublings, doublings)
        self._first = np.outer(tilt, tilt) + walk
        self._covariance = self._first + 1.0

    def learn(self, extra: float, seconds: float) -> None:
        """Take in one step with so many draft tokens per request."""
        i = min(int(np.searchsorted(self._extras, extra, "right")), len(self._extras) - 1) - 1
        below, above = self._extras[i : i + 2]
        part = min((extra - below) / (above - below), 1.0)
        # All lengths change together where the engine gets slower.
        self._covariance += _FORGETTING * (self._first - self._covariance) + _DRIFT**2
        shared = (1 - part) * self._covariance[i] + part * self._covariance[i + 1]
        variance = (1 - part) * shared[i] + part * shared[i + 1] + _NOISE**2
        most = _FURTHEST * sqrt(variance)
        error = log(seconds) - (1 - part) * self._logs[i] - part * self._logs[i + 1]
        if error < -most:
            # A step may be slow by accident, but not fast: the engine was still warming up, or has
            # got faster. Lengths that were last seen before that have got faster too.
            self._logs += error
            return
        self._logs += shared * (min(most, error) / variance)
        self._covariance -= np.outer(shared, shared / variance)

    def seconds(self) -> tuple[float, ...]:
        """Return the seconds of a step at each number of draft tokens per request."""
        found = np.exp(self._logs)
        # A token of a step costs no more than its share of it.
        return tuple(np.minimum(found, found[0] * (1 + self._extras)).tolist())


@dataclass(slots=True)
class _Line:
    """Seconds of a call of the proposer by tokens asked for, followed by a Kalman filter.

    A filter, not a regression over recent calls: where always as many tokens are drafted, nothing
    is learnt about the slope, and what was known of it must stay.
    """

    level: float
    slope: float
    var_level: float
    var_slope: float
    covariance: float = 0.0

    @classmethod
    def expected(cls, level: float, slope: float) -> _Line:
        return cls(level, slope, level**2, slope**2)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take in one call with so many tokens."""
        scale = (self.level + self.slope * num_tokens) ** 2
        self.var_level = min(self.var_level + _DRIFT**2 * scale, scale)
        self.var_slope = min(self.var_slope + (_DRIFT * self.slope) ** 2 + 1e-8 * scale, scale)
        # What was cut above, and rounding, must not leave more in common than there is.
        most = sqrt(self.var_level * self.var_slope)
        self.covariance = max(-most, min(most, self.covariance))
        gain_level = self.var_level + self.covariance * num_tokens
        gain_slope = self.covariance + self.var_slope * num_tokens
        variance = gain_level + gain_slope * num_tokens + _NOISE**2 * scale
        most = _FURTHEST * sqrt(variance)
        error = max(-most, min(most, seconds - self.level - self.slope * num_tokens))
        self.level = max(self.level + error * gain_level / variance, _LEAST_SECONDS)
        self.slope = max(self.slope + error * gain_slope / variance, 0.0)
        self.var_level = max(self.var_level - gain_level * gain_level / variance, 0.0)
        self.covariance -= gain_level * gain_slope / variance
        self.var_slope = max(self.var_slope - gain_slope * gain_slope / variance, 0.0)


class Line(NamedTuple):
    """What was learnt of the proposer's calls.

    Attributes:
        level: seconds of a call ...
        slope: ... and what each token adds that it is asked for.
    """

    level: float
    slope: float


_NOTHING = Line(0.0, 0.0)


class Learnt(NamedTuple):
    """All that was learnt.

    Attributes:
        steps: by size class of the batch, seconds at 0 and more draft tokens per request.
        drafts: of the proposer's calls.
    """

    steps: dict[int, tuple[float, ...]]
    drafts: Line


class StepClock:
    """A curve for each size class of the batch: 1, 2 to 3, 4 to 7 requests, and so on.

    Args:
        device: where the target model runs, such as ``"cpu"`` or ``"cuda:0"``.
        k: the most draft tokens per request.
        learns: whether this process decides by what it measures itself; False where ranks have to
            agree: then they use what :meth:`adopt` tells them.
    """

    def __init__(self, device: str, k: int, *, learns: bool = True) -> None:
        self._token_share = _TOKEN_SHARE_ON_CPU if device == "cpu" else _TOKEN_SHARE_ELSEWHERE
        self._extras = _extras(k)
        self._curves: dict[int, _Curve] = {}
        self._drafts: _Line | None = None
        self._first_drafts: list[tuple[float, int]] = []
        self._agreed: Learnt | None = None if learns else Learnt({}, _NOTHING)

    def count_step(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take in a step that had requests to generate for, and no prompts.

        Args:
            num_requests: how many.
            num_tokens: what was computed for them, drafts included.
            seconds: how long it took.
        """
        if seconds <= 0:
            return
        size, extra = num_requests.bit_length(), num_tokens / num_requests - 1
        if size not in self._curves:
            share = self._share(self.learnt().steps, size)
            self._curves[size] = _Curve(self._extras, seconds, extra, share)
        self._curves[size].learn(extra, seconds)

    def count_draft(self, num_tokens: int, seconds: float) -> None:
        """Take in a call of the proposer, which was asked for so many tokens."""
        seconds = max(seconds, _LEAST_SECONDS)
        if self._drafts is not None:
            self._drafts.learn(num_tokens, seconds)
            return
        self._first_drafts.append((seconds, num_tokens))
        if len(self._first_drafts) == _FIRST_DRAFTS:
            seconds, num_tokens = min(self._first_drafts)
            # Half of it for each token, until calls for more or fewer tell.
            self._drafts = _Line.expected(seconds / 2, seconds / 2 / num_tokens)

    def learnt(self) -> Learnt:
        """Return what was learnt here."""
        steps = {size: curve.seconds() for size, curve in self._curves.items()}
        drafts = self._drafts
        return Learnt(steps, Line(drafts.level, drafts.slope) if drafts else _NOTHING)

    def adopt(self, learnt: Learnt) -> None:
        """Use what one rank has learnt, until the next time."""
        self._agreed = learnt

    def costs(self, num_requests: int) -> StepCosts:
        """Return what a step with this many requests costs; it may be a guess in other units."""
        steps, drafts = self.learnt() if self._agreed is None else self._agreed
        size = num_requests.bit_length()
        seconds = steps.get(size)
        if seconds is None:
            level = steps[_nearest(steps, size)][0] if steps else 1.0
            seconds = tuple((level * (1 + self._share(steps, size) * self._extras)).tolist())
        num_tokens = tuple((num_requests * (1 + self._extras)).tolist())
        return StepCosts(num_tokens, seconds, drafts.slope, drafts.level)

    def _share(self, steps: Mapping[int, tuple[float, ...]], size: int) -> float:
        """Guess how much longer a draft token per request makes a step, as a share of it."""
        if not steps:
            share, doublings = self._token_share, size - 1
        else:
            nearest = _nearest(steps, size)
            none, *_, most = steps[nearest]
            share, doublings = max(most / none - 1, 0.0) / self._extras[-1], size - nearest
        # Twice the requests add twice the tokens, to a step that takes longer too.
        odds: float = share / max(1 - share, 1e-9) * 2.0**doublings
        return odds / (1 + odds)


def _nearest(steps: Mapping[int, Any], size: int) -> int:
    return min(steps, key=lambda known: (abs(known - size), known))


def _extras(k: int) -> Floats:
    """Return 0 to ``k``: each number up to 8, then 8 for each doubling."""
    steps = [0]
    while steps[-1] < k:
        steps.append(steps[-1] + max(1, steps[-1] // 8))
    return np.array([*steps[:-1], k], float)
