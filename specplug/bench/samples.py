"""One batch, answered once with one method: what was said, when, and what it cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """One answer.

    Attributes:
        token_ids: what was said.
        arrivals: for each step that brought tokens, the seconds after the batch was sent and how
            many tokens came.
    """

    token_ids: list[int]
    arrivals: list[tuple[float, int]]

    def gaps(self) -> Iterator[tuple[float, int]]:
        """Yield, from the second step, the seconds since the one before and the tokens."""
        for (before, _), (now, count) in pairwise(self.arrivals):
            yield now - before, count


@dataclass(frozen=True, slots=True)
class Sample:
    """One unit of work, done once.

    Attributes:
        method: its label.
        seconds: from sending the batch to its last token.
        outputs: an answer for each request.
        counts: ``num_drafts``, ``num_draft_tokens``, ``num_accepted_tokens``,
            ``num_propose_calls`` and ``propose_seconds``, for this unit.
        memory: the most bytes that the process took so far, ``host`` and ``device``.
    """

    method: str
    seconds: float
    outputs: list[Output]
    counts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def first_tokens(self) -> list[float]:
        """Seconds to the first token of each answer."""
        return [output.arrivals[0][0] for output in self.outputs if output.arrivals]

    @property
    def prefill_seconds(self) -> float:
        """Until every request has its first token."""
        return max(self.first_tokens, default=self.seconds)

    def decode_steps(self) -> list[float]:
        """Return the seconds of each step of the engine after the prefill of all requests."""
        times = {time for output in self.outputs for time, _ in output.arrivals}
        return [
            after - before
            for before, after in pairwise(sorted(times))
            if before >= self.prefill_seconds
        ]

    def as_json(self) -> dict[str, Any]:
        """Return it in plain types."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Sample:
        """Return what :meth:`as_json` or an engine's answer holds."""
        outputs = [
            Output(one["token_ids"], [(seconds, count) for seconds, count in one["arrivals"]])
            for one in row["outputs"]
        ]
        return cls(**{**row, "outputs": outputs})


@dataclass(frozen=True, slots=True)
class Turn:
    """One unit of work in one round: no speculation first, then what was measured next to it."""

    round: int
    unit: str
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        """Return it in plain types."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Turn:
        """Return what :meth:`as_json` holds."""
        return cls(row["round"], row["unit"], [Sample.from_json(one) for one in row["samples"]])
