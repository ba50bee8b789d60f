"""``specplug tune``: from recorded requests to the best flags; ``tune_live`` asks the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from specplug.bench.methods import Backend, Method, imported, ours
from specplug.bench.verdict import FEW_TOKENS
from specplug.cli_measure import Goal
from specplug.plugins import PluginManager
from specplug.replay import report
from specplug.replay.command import ReplaySettings, measure
from specplug.replay.run import Candidate, Result

WORTH_IT = 1.02
"""A smaller assumed speed is no reason to speculate: the assumption is not that exact."""
AS_GOOD = 0.99
"""Of those with this share of the best speed, the one that drafts least is taken."""

REQUESTS = {Goal.LATENCY: 1, Goal.THROUGHPUT: 16}
"""How many requests are served at a time, where the user does not say."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What the command line asks for; see ``specplug tune --help``.

    Without ``files`` the engine is asked: then ``model`` and what follows it count, and
    ``token_cost`` and ``tokenizer`` do not.
    """

    files: Sequence[Path]
    engine: str
    goal: Goal
    proposers: Sequence[str]
    num_speculative_tokens: Sequence[int]
    length_policies: Sequence[str]
    token_cost: float
    concurrency: int | None
    tokenizer: Path | None
    model: str | None
    data: Sequence[str]
    engine_arguments: Mapping[str, Any]
    output: Path

    @property
    def requests(self) -> int:
        """How many requests are served at a time."""
        return self.concurrency or REQUESTS[self.goal]


def run_tune(settings: TuneSettings, console: Console) -> bool:
    """Measure, print the tables and the flags; return whether speculation is worth it.

    Raises:
        SpecplugError: a file, a proposer or an option is wrong, or the engine ended early.
    """
    if settings.files:
        return _replayed(settings, console)
    from specplug.bench.tune_live import tune_live

    return tune_live(settings, console)


def _replayed(settings: TuneSettings, console: Console) -> bool:
    plugins = PluginManager()
    results = measure(_replay_settings(settings), plugins)
    console.print(report.table(results))
    best = chosen(results)
    if best is None:
        console.print("Leave it off: every proposer failed; see the log.")
        return False
    at = f"{settings.requests} at a time, {settings.token_cost:g} of a step per token"
    choice = Choice(best.candidate, best.num_speculative_tokens, best.length_policy)
    if best.speed < WORTH_IT:
        console.print(f"Leave it off ({at}): {_reason(best)}", markup=False)
        console.print(f"The best, {choice}, had {best.speed:.2f}x.", markup=False)
        return False
    console.print(f"For {settings.goal} ({at}): {choice}, {best.speed:.2f}x.", markup=False)
    method = choice.method(imported(settings.engine), plugins)
    console.print(f"  {method.flags}", markup=False)
    return True


def _replay_settings(settings: TuneSettings) -> ReplaySettings:
    return ReplaySettings(
        files=settings.files,
        proposers=settings.proposers,
        num_speculative_tokens=settings.num_speculative_tokens,
        length_policies=settings.length_policies,
        token_cost=settings.token_cost,
        concurrency=settings.requests,
        tokenizer=settings.tokenizer,
    )


def chosen(results: Sequence[Result]) -> Result | None:
    """Return the fastest without a fault; of those as good as it, the one that drafts least."""
    sound = [result for result in results if not result.counters.num_faults]
    if not sound:
        return None
    enough = AS_GOOD * max(result.speed for result in sound)
    good = [result for result in sound if result.speed >= enough]
    return min(good, key=lambda one: (one.counters.num_draft_tokens, one.num_speculative_tokens))


def _reason(best: Result) -> str:
    steps = best.counters.num_steps
    tokens = best.num_tokens / steps if steps else 1.0
    if tokens < FEW_TOKENS:
        return f"low acceptance, a step brings {tokens:.2f} tokens. This text repeats little."
    return (
        f"compute-bound, a step brings {tokens:.2f} tokens but costs as much more. Fewer requests "
        "at a time, or an engine whose tokens cost less, would change that."
    )


class Choice(NamedTuple):
    """A proposer, K and a length policy."""

    candidate: Candidate
    k: int
    length_policy: str

    def __str__(self) -> str:
        return f"{self.candidate}, K={self.k}, {self.length_policy}"

    def method(self, backend: Backend, plugins: PluginManager) -> Method:
        """Return it as it is measured."""
        options = {**self.candidate.options, "length_policy": self.length_policy}
        candidate = replace(self.candidate, options=options)
        return ours(backend, str(self), candidate, self.k, plugins)
