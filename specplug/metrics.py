"""What is counted about a proposer, under the names that vLLM gives these counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan


@dataclass(slots=True)
class Counters:
    """Running totals of one proposer in one process.

    Attributes:
        num_requests: requests begun.
        num_steps: verification steps, counted per request, with a draft or without.
        num_proposed_tokens: tokens that the proposer drafted, before the length policy cut.
        num_drafts: drafts verified; like vLLM, an empty draft is not a draft.
        num_draft_tokens: tokens in them.
        num_accepted_tokens: tokens of them that were accepted and kept.
        num_accepted_tokens_per_pos: the same by position in the draft; ``[K]``.
        num_propose_calls: calls of ``propose``.
        propose_seconds: time spent in them.
        longest_propose_seconds: the longest of them.
        num_faults: exceptions and invalid results.
        switched_off: whether the proposer failed too often and was switched off.
    """

    num_requests: int = 0
    num_steps: int = 0
    num_proposed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_propose_calls: int = 0
    propose_seconds: float = 0.0
    longest_propose_seconds: float = 0.0
    num_faults: int = 0
    switched_off: bool = False

    def count_verified(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verification step of one request."""
        self.num_steps += 1
        if num_draft_tokens:
            self.num_drafts += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted_tokens
            for position in range(num_accepted_tokens):
                self.num_accepted_tokens_per_pos[position] += 1

    def count_propose(self, seconds: float) -> None:
        """Count one call of ``propose``."""
        self.num_propose_calls += 1
        self.propose_seconds += seconds
        self.longest_propose_seconds = max(self.longest_propose_seconds, seconds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, in [0, 1]; NaN before the first draft."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    def acceptance_rates(self) -> list[float]:
        """Return the measured chance that a position is accepted if the one before it was; ``[K]``.

        In (0, 1). Starts from a half, so that the first drafts count little.
        """
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [
            (accepted + 1) / (before + 2)
            for before, accepted in zip(reached, self.num_accepted_tokens_per_pos, strict=False)
        ]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step that had a draft, bonus token included; NaN before the first."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, bonus token included, over all steps; NaN before the first."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_steps)

    def __str__(self) -> str:
        microseconds = _ratio(self.propose_seconds * 1e6, self.num_propose_calls)
        longest = self.longest_propose_seconds * 1e3
        text = (
            f"{self.num_requests} requests, {self.num_steps} steps, "
            f"{self.num_proposed_tokens} tokens proposed, {self.num_drafts} drafts, "
            f"{self.num_draft_tokens} drafted, {self.num_accepted_tokens} accepted, "
            f"acceptance rate {_shown(self.acceptance_rate, '.1%')}, "
            f"mean acceptance length {_shown(self.mean_acceptance_length, '.2f')}, "
            f"tokens per step {_shown(self.tokens_per_step, '.2f')}, "
            f"propose {_shown(microseconds, '.0f')} µs per call (longest {longest:.1f} ms), "
            f"{self.num_faults} faults"
        )
        return text + (", SWITCHED OFF" if self.switched_off else "")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def _shown(value: float, form: str) -> str:
    return "-" if isnan(value) else format(value, form)
