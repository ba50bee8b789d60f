"""One plain sentence for each workload and batch size: keep it, or leave it off, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan, nan

from specplug.bench.cells import Cell
from specplug.bench.methods import Method


class Finding(StrEnum):
    """What the numbers of a workload at a batch size say."""

    KEEP = "keep it"
    UNCLEAR = "no clear gain"
    PROMPT_BOUND = "prompt-bound"
    DRAFT_TOO_SLOW = "draft too slow"
    LOW_ACCEPTANCE = "low acceptance"
    COMPUTE_BOUND = "compute-bound"


PROMPT_SHARE = 0.5
DRAFTING_SHARE = 0.1
FEW_TOKENS = 1.15

RULES = {
    Finding.KEEP: "the whole interval of the best method's ratio is above 1",
    Finding.UNCLEAR: "the best ratio is above 1, and its interval is not",
    Finding.PROMPT_BOUND: f"without speculation, at least {PROMPT_SHARE:.0%} of the time passes "
    "before every request has its first token",
    Finding.DRAFT_TOO_SLOW: f"at least {DRAFTING_SHARE:.0%} of the time is spent drafting, and "
    "without that the ratio would be above 1",
    Finding.LOW_ACCEPTANCE: f"a step brings fewer than {FEW_TOKENS} tokens per request",
    Finding.COMPUTE_BOUND: "all else: a step brings more tokens, but takes longer by as much",
}
"""When each finding holds; the first that does counts. Those but the first two are about the method
with the best ratio, where no ratio is above 1."""

_TRY = ("suffix", "lookahead", "cascade", "ngram")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is advised for a workload at a batch size.

    Attributes:
        workload: its name.
        batch_size: how many requests are served at once.
        finding: what the numbers say.
        method: the label of the best method.
        flags: what to add to the engine's command to get it; empty unless it is worth keeping.
        text: the sentence for people.
    """

    workload: str
    batch_size: int
    finding: Finding
    method: str
    flags: str
    text: str


def verdicts(cells: Sequence[Cell], methods: Sequence[Method]) -> list[Verdict]:
    """Return a verdict for each workload and batch size in which something was compared."""
    known = {method.label: method for method in methods}
    places: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.batch_size, cell.workload), []).append(cell)
    return [_verdict(plain, others, known) for plain, *others in places.values() if others]


def _verdict(plain: Cell, others: Sequence[Cell], methods: Mapping[str, Method]) -> Verdict:
    clear = [cell for cell in others if cell.ratio.low > 1]
    best = max(clear or others, key=lambda cell: cell.ratio.value)
    finding = find(plain, best)
    advice = {
        Finding.KEEP: _keep,
        Finding.UNCLEAR: _unclear,
        Finding.PROMPT_BOUND: _prompt_bound,
        Finding.DRAFT_TOO_SLOW: _draft_too_slow,
        Finding.LOW_ACCEPTANCE: _low_acceptance,
        Finding.COMPUTE_BOUND: _compute_bound,
    }[finding]
    text = advice(plain, best, methods)
    if not best.identical:
        text += (
            f" BUT {best.num_outputs - best.num_identical} of {best.num_outputs} texts differ from "
            "no speculation."
        )
    flags = methods[best.method].flags if finding is Finding.KEEP else ""
    return Verdict(plain.workload, plain.batch_size, finding, best.method, flags, text)


def find(plain: Cell, best: Cell) -> Finding:
    """Return the first finding that holds; see :data:`RULES`."""
    if best.ratio.low > 1:
        return Finding.KEEP
    if best.ratio.value > 1:
        return Finding.UNCLEAR
    if plain.prefill_share >= PROMPT_SHARE:
        return Finding.PROMPT_BOUND
    share = best.drafting_share
    if share >= DRAFTING_SHARE and best.ratio.value > 1 - share:
        return Finding.DRAFT_TOO_SLOW
    if best.tokens_per_step < FEW_TOKENS:
        return Finding.LOW_ACCEPTANCE
    return Finding.COMPUTE_BOUND


Methods = Mapping[str, Method]


def _keep(plain: Cell, best: Cell, methods: Methods) -> str:
    del plain
    k = methods[best.method].num_speculative_tokens
    shown = f" with K={k}" if k and f"K={k}" not in best.method else ""
    return f"Keep it: {best.method}{shown}, {_ratio(best)} no speculation."


def _unclear(plain: Cell, best: Cell, methods: Methods) -> str:
    del plain, methods
    return (
        f"No clear gain: the best, {best.method}, had {_ratio(best)} no speculation, which may be "
        "chance. Measure more --rounds or prompts, or leave it off."
    )


def _leave(why: str, best: Cell) -> str:
    return f"Leave it off: {why} The best, {best.method}, had {_ratio(best)} no speculation."


def _prompt_bound(plain: Cell, best: Cell, methods: Methods) -> str:
    del methods
    share = plain.prefill_share
    why = (
        f"prompt-bound. {share:.0%} of the time passes before the first tokens, and speculation "
        f"speeds up only what follows: {1 / share:.2f}x at the very most. Look at prefix caching "
        "and chunked prefill instead."
    )
    return _leave(why, best)


def _draft_too_slow(plain: Cell, best: Cell, methods: Methods) -> str:
    del plain
    other = _untried(methods)
    why = (
        f"the draft is too slow. {best.drafting_share:.0%} of the time is spent drafting. Try "
        f"{f'{other}, or ' if other else ''}a smaller draft model or fewer draft tokens."
    )
    return _leave(why, best)


def _low_acceptance(plain: Cell, best: Cell, methods: Methods) -> str:
    del plain
    other = _untried(methods)
    rate = "" if isnan(best.acceptance_rate) else f", {best.acceptance_rate:.0%} of drafts accepted"
    why = (
        f"low acceptance. A step brings {best.tokens_per_step:.2f} tokens{rate}. Try "
        f"{f'{other}, or ' if other else ''}a draft model that was trained for this model."
    )
    return _leave(why, best)


def _compute_bound(plain: Cell, best: Cell, methods: Methods) -> str:
    growth = best.step_seconds / plain.step_seconds if plain.step_seconds else nan
    k = methods[best.method].num_speculative_tokens
    fewer = f"fewer draft tokens (K = {k // 2}) or " if k and k > 1 else ""
    why = (
        f"compute-bound at this batch size. A step brings {best.tokens_per_step:.2f} tokens per "
        f"request, but takes {growth:.2f} times as long. Try {fewer}a proposer that drafts only "
        "when it is sure, such as suffix:min_confidence=0.1."
    )
    return _leave(why, best)


def _untried(methods: Methods) -> str:
    tried = {method.proposer.partition(":")[0] for method in methods.values()}
    return " or ".join(f"`{name}`" for name in _TRY if name not in tried)


def _ratio(cell: Cell) -> str:
    value, low, high = cell.ratio
    return f"{value:.2f}x" if isnan(low) else f"{value:.2f}x ({low:.2f} to {high:.2f})"
