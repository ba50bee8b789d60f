"""The contract of a length policy: how many draft tokens are worth verifying.

A proposer says what may come next; a *length policy* says how much of it the target model is to
verify in this step. Drafted tokens are not free: each makes the step a little longer, on a loaded
engine nearly as much as a token of its own. A policy weighs that against the chance that they are
accepted. Like a proposer, it can only change speed, never text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Options, Request, check_name

Lengths = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs by the tokens that it computes; only ratios count.

    Attributes:
        num_tokens: two or more numbers of tokens, increasing: one for each request that generates,
            and more.
        seconds: of a step with so many. It need not increase: kernels change with the number of
            tokens.
        per_draft_token: seconds that the proposer takes for each token that it is asked for.
        per_draft: seconds that a call of the proposer takes beside that.
    """

    num_tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_draft_token: float = 0.0
    per_draft: float = 0.0

    @classmethod
    def line(
        cls, base: float, per_token: float, per_draft_token: float = 0.0, per_draft: float = 0.0
    ) -> StepCosts:
        """Make costs of which each token adds as much, ``per_token``, to ``base`` for none."""
        return cls((0.0, 1.0), (base, base + per_token), per_draft_token, per_draft)

    def of_steps(self, num_tokens: Lengths | Sequence[int] | int) -> Floats:
        """Return the seconds of steps with so many tokens, by the lines between what is known.

        Args:
            num_tokens: ``[m]``, or one number.
        """
        asked = np.asarray(num_tokens, float)
        found = np.interp(asked, self.num_tokens, self.seconds)
        (before, last), (at_before, at_last) = self.num_tokens[-2:], self.seconds[-2:]
        beyond = np.maximum(asked - last, 0)
        costs: Floats = found + beyond * max(at_last - at_before, 0.0) / (last - before)
        return costs


@dataclass(frozen=True, slots=True)
class Load:
    """What the next step has to do, whatever is drafted.

    Attributes:
        num_running: the requests in the engine's batch, those in prefill included.
        num_tokens: the tokens that the step computes without drafts: one for each request that
            generates. Those of prompts are not known.
        max_draft_tokens: the most draft tokens that the step may verify, over all requests.
        costs: what it costs; the same on every tensor-parallel rank.
    """

    num_running: int
    num_tokens: int
    max_draft_tokens: int
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far drafts agreed with what followed, verified or not; in columns.

    A draft that was cut before it was verified is compared all the same with the tokens that came
    instead: the position behind the verified ones is judged for free.

    Attributes:
        request_ids: ``n`` ids of the requests that had a draft and got tokens.
        slots: int32 ``[n]``, see :class:`~specplug.Request`.
        num_proposed: int32 ``[n]``, the length of the draft as the proposer made it.
        num_verified: int32 ``[n]``, how many of its tokens the target verified.
        num_matched: int32 ``[n]``, how many tokens at its beginning came true.
        num_judged: int32 ``[n]``, for how many it is known whether they came true:
            ``num_matched``, or one more when the next one is known to be wrong.
    """

    request_ids: Sequence[str]
    slots: Int32Array
    num_proposed: Int32Array
    num_verified: Int32Array
    num_matched: Int32Array
    num_judged: Int32Array

    def __len__(self) -> int:
        return len(self.request_ids)


class LengthPolicy(ABC):
    """Decides how many draft tokens each request gets. One instance lives in each worker.

    Only :meth:`choose` must be written. What a method raises is caught and counted by the runtime;
    drafts then have the length that the proposer gave them. Decisions must follow from the
    arguments alone (no clock, no unseeded randomness): every tensor-parallel rank decides for
    itself.
    """

    def prepare(self, engine: EngineInfo) -> None:  # noqa: B027
        """Get ready: called once, before the first request. An exception refuses the start."""

    def begin(self, request: Request) -> None:  # noqa: B027
        """Meet a new request."""

    def ask(self, batch: Batch, load: Load) -> Lengths:
        """Return how many tokens the proposer shall draft at most for each request, before it does.

        A request with 0 is not shown to the proposer in this step, so it costs nothing.

        Returns:
            integers ``[n]``; what exceeds ``batch.max_draft_tokens`` is cut to it.
        """
        return batch.max_draft_tokens

    @abstractmethod
    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Lengths:
        """Return how many tokens of each draft the target shall verify.

        Args:
            batch: the requests that the proposer was asked to draft for.
            drafts: what it drafted: valid tokens, perhaps with scores. Sampled drafts (those with
                probabilities) may not be cut for what they hold: in their place stand zeros, as
                many as were asked for, without scores.
            load: what the step has to do.

        Returns:
            integers ``[n]``; what exceeds ``drafts.lengths`` is cut to it.
        """

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn how far earlier drafts were right; called before ``ask`` of the same step."""

    def end(self, request_id: str) -> None:  # noqa: B027
        """Forget a request. Called once for each ``begin``."""


@dataclass(frozen=True, slots=True)
class LengthPolicySpec:
    """Registers a length policy; an entry point of the group ``specplug`` may point at one.

    Attributes:
        name: lower-case identifier; what users write in the setting ``length_policy``.
        factory: called with the options to make a :class:`LengthPolicy`; a callable or
            ``"package.module:attribute"``.
        options: the model of its options, which is ``length_policy_options``.
        summary: one line for ``specplug list``.
        install_hint: what to do when the factory's imports fail.
    """

    name: str
    factory: Callable[[Any], LengthPolicy] | str
    options: type[Options] = Options
    summary: str = ""
    install_hint: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "length policy")
