"""From turns to what people read: a cell for each workload, batch size and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean, median
from typing import NamedTuple

from specplug.bench.samples import Sample, Turn
from specplug.bench.statistics import Interval, ratio, weighted_quantile
from specplug.bench.work import Unit
from specplug.metrics import Counters

ALL = "all"
"""The workload that holds the prompts of all."""
UNSTEADY = 1.25
"""The same work this many times slower in another round means that others used the machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one method came to on one workload at one batch size; NaN where there is no number.

    Attributes:
        workload: its name, or :data:`ALL`.
        batch_size: how many requests were served at once.
        method: its label.
        ratio: tokens per second against no speculation next to it.
        tokens_per_second: of all requests together, prefill included; the median.
        acceptance_rate: accepted per drafted token.
        mean_acceptance_length: tokens per draft, bonus token included.
        tokens_per_step: per request and step after the first token, steps without a draft included.
        step_seconds: of a step of the engine without drafting.
        drafting_share: the share of the time that the proposer took.
        prefill_share: the share of the time until each request had its first token.
        first_token_seconds: the median over requests.
        token_seconds_p50: from token to token; those of one step share its time. The median.
        token_seconds_p99: the same, 99th percentile.
        peak_bytes: the most that the engine's process took, on the host.
        peak_device_bytes: the same on the device, as torch counts.
        num_outputs: how many answers there are.
        num_identical: how many of them have the tokens of no speculation.
    """

    workload: str
    batch_size: int
    method: str
    ratio: Interval
    tokens_per_second: float
    acceptance_rate: float
    mean_acceptance_length: float
    tokens_per_step: float
    step_seconds: float
    drafting_share: float
    prefill_share: float
    first_token_seconds: float
    token_seconds_p50: float
    token_seconds_p99: float
    peak_bytes: int | None
    peak_device_bytes: int | None
    num_outputs: int
    num_identical: int

    @property
    def identical(self) -> bool:
        """Whether no text differed."""
        return self.num_identical == self.num_outputs


class _Pair(NamedTuple):
    unit: Unit
    plain: Sample
    sample: Sample


def cells(turns: Sequence[Turn], units: Sequence[Unit]) -> list[Cell]:
    """Return the cells by batch size, workload and method, in the order in which they appeared.

    Where there are several workloads, all of them together come first.
    """
    by_key = {unit.key: unit for unit in units}
    pairs = [
        _Pair(by_key[turn.unit], turn.samples[0], sample)
        for turn in turns
        for sample in turn.samples
    ]
    methods = list(dict.fromkeys(pair.sample.method for pair in pairs))
    workloads = list(dict.fromkeys(unit.workload for unit in units))
    names = [ALL, *workloads] if len(workloads) > 1 else workloads
    found = []
    for size in dict.fromkeys(unit.batch_size for unit in units):
        for name in names:
            for method in methods:
                own = [
                    pair
                    for pair in pairs
                    if pair.sample.method == method
                    and pair.unit.batch_size == size
                    and name in (pair.unit.workload, ALL)
                ]
                if own:
                    found.append(_cell(name, size, method, own))
    return found


def _cell(workload: str, batch_size: int, method: str, pairs: Sequence[_Pair]) -> Cell:
    samples = [pair.sample for pair in pairs]
    ratios: dict[str, list[float]] = {}
    for unit, plain, sample in pairs:
        ratios.setdefault(unit.key, []).append(sample.tokens_per_second / plain.tokens_per_second)
    counters = Counters(
        num_drafts=int(_counted(samples, "num_drafts")),
        num_draft_tokens=int(_counted(samples, "num_draft_tokens")),
        num_accepted_tokens=int(_counted(samples, "num_accepted_tokens")),
    )
    seconds = sum(sample.seconds for sample in samples)
    steps = [step for sample in samples for step in sample.decode_steps()]
    drafting = _counted(samples, "propose_seconds")
    gaps = [gap for sample in samples for output in sample.outputs for gap in output.gaps()]
    each, counts = [gap / count for gap, count in gaps], [count for _, count in gaps]
    first = [time for sample in samples for time in sample.first_tokens]
    same = [
        one.token_ids == other.token_ids
        for _, plain, sample in pairs
        for one, other in zip(plain.outputs, sample.outputs, strict=True)
    ]
    return Cell(
        workload=workload,
        batch_size=batch_size,
        method=method,
        ratio=ratio(list(ratios.values())),
        tokens_per_second=median(sample.tokens_per_second for sample in samples),
        acceptance_rate=counters.acceptance_rate,
        mean_acceptance_length=counters.mean_acceptance_length,
        tokens_per_step=sum(counts) / len(gaps) if gaps else nan,
        step_seconds=max(fmean(steps) - drafting / len(steps), 0.0) if steps else nan,
        drafting_share=drafting / seconds,
        prefill_share=sum(sample.prefill_seconds for sample in samples) / seconds,
        first_token_seconds=median(first) if first else nan,
        token_seconds_p50=weighted_quantile(each, counts, 0.5),
        token_seconds_p99=weighted_quantile(each, counts, 0.99),
        peak_bytes=_peak(samples, "host"),
        peak_device_bytes=_peak(samples, "device"),
        num_outputs=len(same),
        num_identical=sum(same),
    )


def _counted(samples: Sequence[Sample], name: str) -> float:
    return sum(sample.counts.get(name, 0) for sample in samples)


def _peak(samples: Sequence[Sample], where: str) -> int | None:
    return max((found for one in samples if (found := one.memory.get(where))), default=None)


def unsteadiness(turns: Sequence[Turn]) -> float:
    """Return how many times as fast the same work ran typically in one round as in another.

    Judged by no speculation alone; 1 with a single round.
    """
    speeds: dict[str, list[float]] = {}
    for turn in turns:
        speeds.setdefault(turn.unit, []).append(turn.samples[0].tokens_per_second)
    return median(max(rounds) / min(rounds) for rounds in speeds.values())
