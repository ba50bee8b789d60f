"""Learns what an engine's steps cost, from the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

from specplug.length import StepCosts

_TOKEN_SHARE_ON_CPU = 0.03
_TOKEN_SHARE_ELSEWHERE = 0.005
"""What one more token adds to a step with one token, before anything is measured: on a GPU weights
dominate a small step."""

_NOISE = 0.1
"""How much a step's time varies, as a share of it."""
_DRIFT = 0.01
"""How much a step's cost may change from one step to the next, as a share of it."""
_FIRST_DRAFTS = 8
"""The first calls of a proposer are slow: of so many the fastest counts."""
_LEAST_SECONDS = 1e-9
"""A clock may be too coarse to see that time passed."""
_FURTHEST = 3.0
"""A step counts as at most this many standard deviations off: others use the machine too."""


@dataclass(slots=True)
class _Line:
    """Seconds by tokens, followed by a Kalman filter.

    Of a step, by extra tokens per request; of a call of the proposer, by tokens asked for. What a
    token adds is at most ``most_slope`` times what there is without any.

    A filter, not a regression over recent steps: where always as many tokens are drafted, nothing
    is learnt about the slope, and what was known of it must stay.
    """

    level: float
    slope: float
    var_level: float
    var_slope: float
    covariance: float = 0.0
    most_slope: float = inf

    @classmethod
    def expected(cls, level: float, slope: float, most_slope: float = inf) -> _Line:
        return cls(level, slope, level**2, slope**2, most_slope=most_slope)

    def learn(self, extra: float, seconds: float) -> None:
        """Take in one step or call with so many tokens."""
        scale = (self.level + self.slope * extra) ** 2
        self.var_level = min(self.var_level + _DRIFT**2 * scale, scale)
        self.var_slope = min(self.var_slope + (_DRIFT * self.slope) ** 2 + 1e-8 * scale, scale)
        # What was cut above, and rounding, must not leave more in common than there is.
        most = sqrt(self.var_level * self.var_slope)
        self.covariance = max(-most, min(most, self.covariance))
        gain_level = self.var_level + self.covariance * extra
        gain_slope = self.covariance + self.var_slope * extra
        variance = gain_level + gain_slope * extra + _NOISE**2 * scale
        most = _FURTHEST * sqrt(variance)
        error = max(-most, min(most, seconds - self.level - self.slope * extra))
        self.level = max(self.level + error * gain_level / variance, _LEAST_SECONDS)
        slope = self.slope + error * gain_slope / variance
        self.slope = min(max(slope, 0.0), self.most_slope * self.level)
        self.var_level = max(self.var_level - gain_level * gain_level / variance, 0.0)
        self.covariance -= gain_level * gain_slope / variance
        self.var_slope = max(self.var_slope - gain_slope * gain_slope / variance, 0.0)


class Line(NamedTuple):
    """What was learnt of steps with batches of one size or of the proposer's calls, by tokens.

    Attributes:
        level: seconds without any.
        slope: seconds that each adds.
    """

    level: float
    slope: float


_NOTHING = Line(0.0, 0.0)


class Learnt(NamedTuple):
    """All that was learnt: lines by size class of the batch, and the proposer's."""

    lines: dict[int, Line]
    drafts: Line


class StepClock:
    """A line per size class of the batch: 1, 2 to 3, 4 to 7 requests, and so on.

    Args:
        device: where the target model runs, such as ``"cpu"`` or ``"cuda:0"``.
        learns: whether this process decides by what it measures itself; False where ranks have to
            agree: then they use what :meth:`adopt` tells them.
    """

    def __init__(self, device: str, *, learns: bool = True) -> None:
        self._token_share = _TOKEN_SHARE_ON_CPU if device == "cpu" else _TOKEN_SHARE_ELSEWHERE
        self._lines: dict[int, _Line] = {}
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
        if size not in self._lines:
            share = self._slope_share(self._lines, size)
            level = seconds / (1 + share * extra)
            # A token of a step costs no more than its share of it.
            self._lines[size] = _Line.expected(level, share * level, most_slope=1.0)
        self._lines[size].learn(extra, seconds)

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
        lines = {size: Line(line.level, line.slope) for size, line in self._lines.items()}
        drafts = self._drafts
        return Learnt(lines, Line(drafts.level, drafts.slope) if drafts else _NOTHING)

    def adopt(self, learnt: Learnt) -> None:
        """Use what one rank has learnt, until the next time."""
        self._agreed = learnt

    def costs(self, num_requests: int) -> StepCosts:
        """Return what a step with this many requests costs; it may be a guess in other units."""
        lines: Mapping[int, Line | _Line] = self._lines
        drafts: Line | _Line = self._drafts or _NOTHING
        if self._agreed is not None:
            lines, drafts = self._agreed
        size = num_requests.bit_length()
        line = lines.get(size)
        if line is None:
            share = self._slope_share(lines, size)
            level = lines[_nearest(lines, size)].level if lines else 1.0
            line = Line(level, share * level)
        per_token = line.slope / num_requests
        return StepCosts(line.level - line.slope, per_token, drafts.slope, drafts.level)

    def _slope_share(self, lines: Mapping[int, Line | _Line], size: int) -> float:
        """Guess how much longer a draft token per request makes a step, as a share of it."""
        if not lines:
            share, doublings = self._token_share, size - 1
        else:
            nearest = _nearest(lines, size)
            share, doublings = lines[nearest].slope / lines[nearest].level, size - nearest
        # Twice the requests add twice the tokens, to a step that takes longer too.
        odds: float = share / max(1 - share, 1e-9) * 2.0**doublings
        return odds / (1 + odds)


def _nearest(lines: Mapping[int, Line | _Line], size: int) -> int:
    return min(lines, key=lambda known: (abs(known - size), known))
