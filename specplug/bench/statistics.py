"""Ratios with an interval for how far chance may have moved them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specplug.errors import DependencyError

_REPLICATES = 5_000
_SEED = 0
LEVEL = 0.95
"""How often an interval is to hold the true ratio."""


class Interval(NamedTuple):
    """An estimate and its interval; NaN where there is no number."""

    value: float
    low: float
    high: float


def ratio(samples: Sequence[Sequence[float]]) -> Interval:
    """Return the typical ratio of paired runs: the geometric mean over units of the median over
    rounds, with a bootstrap interval that draws units, and rounds in each of them.

    Percentiles of few samples are too close together; the level is widened for that, as Hesterberg
    does (The American Statistician 69, 2015, arXiv 1411.5279, section 5).

    Args:
        samples: the ratios of each unit's rounds, all above 0; each unit has at least one.
    """
    logs = [np.log(np.asarray(rounds, float)) for rounds in samples]
    value = exp(float(np.mean([np.median(rounds) for rounds in logs])))
    count = len(logs) if len(logs) > 1 else len(logs[0])
    if count < 2:
        return Interval(value, nan, nan)
    tail = _widened((1 - LEVEL) / 2, count)
    low, high = np.quantile(_replicates(logs), [tail, 1 - tail])
    return Interval(value, exp(float(low)), exp(float(high)))


def _replicates(logs: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean over units of the median over rounds, drawn anew: ``[replicates]``."""
    rng = np.random.default_rng(_SEED)
    units = rng.integers(0, len(logs), (_REPLICATES, len(logs)))
    drawn = np.empty(units.shape)
    for unit, rounds in enumerate(logs):
        places = units == unit
        again = rng.choice(rounds, (int(places.sum()), len(rounds)))
        drawn[places] = np.median(again, axis=1)
    means: NDArray[np.float64] = drawn.mean(axis=1)
    return means


def _widened(tail: float, count: int) -> float:
    """Return the share of replicates beyond each end of the interval, for so few samples."""
    try:
        from scipy import stats
    except ImportError as error:
        raise DependencyError(
            f"Intervals need a package that is not installed: {error}.",
            hint="Install it with: pip install 'specplug[bench]'.",
        ) from error
    quantile = stats.t.ppf(tail, count - 1) * (count / (count - 1)) ** 0.5
    return float(stats.norm.cdf(quantile))


def weighted_quantile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """Return the smallest value such that it and those below have the share of the weight."""
    if not values:
        return nan
    order = np.argsort(values)
    reached = np.cumsum(np.asarray(weights)[order])
    place = int(np.searchsorted(reached, share * reached[-1]))
    return float(np.asarray(values)[order][place])
