"""From generations to the demo's tables: every method against no speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import exp, isnan, log, nan
from statistics import fmean, median
from typing import Any

from rich.table import Table

from specplug.demo.prompts import Prompt
from specplug.metrics import Counters

UNSTEADY = 1.25
"""The same work this many times slower in another round means that others used the machine."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, answered once with one method; counters as in :class:`specplug.Counters`."""

    method: str
    prompt: str
    round: int
    token_ids: list[int]
    seconds: float
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_propose_calls: int = 0
    propose_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """What one method came to.

    Attributes:
        method: its label.
        ratio: tokens/s against no speculation: the geometric mean over the prompts of the
            median over the rounds.
        ratio_by_workload: the same for the prompts of each workload.
        acceptance_rate: accepted per drafted token; NaN without drafts.
        mean_acceptance_length: tokens per draft, bonus token included; NaN without drafts.
        draft_microseconds: per ``propose`` call; NaN where the engine drafts by itself.
        num_prompts: how many prompts were answered.
        num_identical: how many of them with the tokens of no speculation in every round.
    """

    method: str
    ratio: float
    ratio_by_workload: dict[str, float]
    acceptance_rate: float
    mean_acceptance_length: float
    draft_microseconds: float
    num_prompts: int
    num_identical: int

    @property
    def identical(self) -> bool:
        """Whether no text differed."""
        return self.num_identical == self.num_prompts


def summarise(generations: Iterable[Generation], prompts: Sequence[Prompt]) -> list[Summary]:
    """Compare each method, in order of appearance, with the first, which is no speculation."""
    by_method: dict[str, list[Generation]] = {}
    for generation in generations:
        by_method.setdefault(generation.method, []).append(generation)
    baseline = {(one.prompt, one.round): one for one in next(iter(by_method.values()))}
    return [_summary(method, done, baseline, prompts) for method, done in by_method.items()]


def _summary(
    method: str,
    done: list[Generation],
    baseline: dict[tuple[str, int], Generation],
    prompts: Sequence[Prompt],
) -> Summary:
    ratios: dict[str, list[float]] = {}
    differing = set()
    for one in done:
        plain = baseline[one.prompt, one.round]
        ratios.setdefault(one.prompt, []).append(one.tokens_per_second / plain.tokens_per_second)
        if one.token_ids != plain.token_ids:
            differing.add(one.prompt)
    typical = {prompt: median(rounds) for prompt, rounds in ratios.items()}
    workloads: dict[str, list[float]] = {}
    for prompt in prompts:
        workloads.setdefault(prompt.workload, []).append(typical[prompt.name])
    counters = Counters(
        num_drafts=sum(one.num_drafts for one in done),
        num_draft_tokens=sum(one.num_draft_tokens for one in done),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in done),
    )
    calls = sum(one.num_propose_calls for one in done)
    return Summary(
        method=method,
        ratio=_geometric_mean(typical.values()),
        ratio_by_workload={name: _geometric_mean(own) for name, own in workloads.items()},
        acceptance_rate=counters.acceptance_rate,
        mean_acceptance_length=counters.mean_acceptance_length,
        draft_microseconds=sum(o.propose_seconds for o in done) / calls * 1e6 if calls else nan,
        num_prompts=len(typical),
        num_identical=len(typical) - len(differing),
    )


def _geometric_mean(values: Iterable[float]) -> float:
    return exp(fmean(map(log, values)))


def overall_table(summaries: Sequence[Summary]) -> Table:
    """Return one row per method over all prompts."""
    table = _table(
        "All prompts",
        "tokens/s\nratio",
        "acceptance\nrate",
        "mean acc.\nlength",
        "draft\ntime",
        "same\ntext",
    )
    for one in summaries:
        table.add_row(
            one.method,
            _shown(one.ratio, "{:.2f}x"),
            _shown(one.acceptance_rate, "{:.0%}"),
            _shown(one.mean_acceptance_length, "{:.2f}"),
            _shown(one.draft_microseconds, "{:.0f} µs"),
            f"{one.num_identical}/{one.num_prompts}",
            style=None if one.identical else "bold red",
        )
    return table


def workload_table(summaries: Sequence[Summary]) -> Table:
    """Return the tokens/s ratio of each method by workload."""
    table = _table("tokens/s ratio by workload", *summaries[0].ratio_by_workload)
    for one in summaries:
        ratios = (_shown(ratio, "{:.2f}x") for ratio in one.ratio_by_workload.values())
        table.add_row(one.method, *ratios)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shown(value: float, form: str) -> str:
    return "-" if isnan(value) else form.format(value)


def verdict(summaries: Sequence[Summary]) -> str:
    """Say in a line which method was best and on which workloads it lost."""
    _, *speculating = summaries
    best = max(speculating, key=lambda one: one.ratio)
    lost = [
        f"{workload} ({ratio:.2f}x)"
        for workload, ratio in best.ratio_by_workload.items()
        if ratio < 1
    ]
    where = f"slower than no speculation on {', '.join(lost)}" if lost else "it lost nowhere"
    return f"Best over all prompts: {best.method}, {best.ratio:.2f}x no speculation; {where}."


def differences(summaries: Iterable[Summary]) -> str:
    """Name the methods that changed a text, or return an empty string."""
    wrong = [
        f"{one.method} ({one.num_prompts - one.num_identical} of {one.num_prompts} prompts)"
        for one in summaries
        if not one.identical
    ]
    return f"TEXT DIFFERS from no speculation with: {', '.join(wrong)}." if wrong else ""


def caution(generations: Iterable[Generation]) -> str:
    """Say so if the machine was too busy for the ratios to mean much, or return an empty string.

    Judged by how much no speculation's own speed on a prompt differed between rounds.
    """
    speeds: dict[str, list[float]] = {}
    plain = None
    for one in generations:
        plain = plain or one.method
        if one.method == plain:
            speeds.setdefault(one.prompt, []).append(one.tokens_per_second)
    spread = median(max(rounds) / min(rounds) for rounds in speeds.values())
    if spread < UNSTEADY:
        return ""
    return (
        "The machine was busy: without speculation the same prompt ran "
        f"typically {spread:.1f} times as fast in one round as in another. The ratios are rough; "
        "a quiet machine or more --rounds would help."
    )


def as_json(summaries: Iterable[Summary], generations: Iterable[Generation]) -> dict[str, Any]:
    """Return everything measured, in plain types; what there is no number for is null."""
    return {
        "methods": [
            {
                name: None if isinstance(value, float) and isnan(value) else value
                for name, value in asdict(summary).items()
            }
            for summary in summaries
        ],
        "generations": [asdict(generation) for generation in generations],
    }
