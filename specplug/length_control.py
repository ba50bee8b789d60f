"""Between proposer and engine: the length policy, guarded, and the user's hard limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from specplug.config import Settings
from specplug.costs import StepClock
from specplug.drafts import shown
from specplug.length import LengthPolicy, Lengths, Load, Outcome
from specplug.plugins import PluginManager
from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Request

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
_UNLIMITED = 2**31 - 1


class LengthControl:
    """Asks one length policy, and does without it where it fails.

    Args:
        engine: what the engine is.
        settings: the user's settings: which policy, its options, the limits.
        plugins: where to look the policy up.
        clock: returns seconds; what steps cost is measured with it.

    Attributes:
        costs: what steps cost.

    Raises:
        SpecplugError: an unknown policy or a wrong option. What its ``prepare`` raises passes.
    """

    def __init__(
        self,
        engine: EngineInfo,
        settings: Settings,
        plugins: PluginManager,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = settings.length_policy
        self.policy = plugins.create_length_policy(self.name, settings.length_policy_options)
        self.policy.prepare(engine)
        # What one rank measures, no other does: see StepClock.
        self.costs = StepClock(
            engine.device, engine.num_speculative_tokens, learns=engine.world_size == 1
        )
        self.num_faults = 0
        self._limits = settings
        self._most_faults = settings.max_consecutive_faults
        self._clock = clock
        self._stepped: float | None = None
        self._faults_seen: set[str] = set()
        self._step_faults = self._failed_steps = 0
        self._switched_off = False
        self._learns = type(self.policy).observe is not LengthPolicy.observe

    @property
    def learns(self) -> bool:
        """Whether somebody wants to know what became of drafts."""
        return self._learns and not self._switched_off

    def begin(self, request: Request) -> None:
        """Let the policy meet a request."""
        self._call(self.policy.begin, request)

    def end(self, request_id: str) -> None:
        """Let the policy forget a request."""
        self._call(self.policy.end, request_id)

    def observe(self, outcome: Outcome) -> None:
        """Let the policy learn what became of drafts."""
        self._call(self.policy.observe, outcome)

    def step_began(self) -> float | None:
        """Note that the engine has made a step; return how long it took, if that is known."""
        now = self._clock()
        return None if self._stepped is None else now - self._stepped

    def step_done(self) -> None:
        """Note that specplug has done its part: the engine's next step begins."""
        self._stepped = self._clock()

    def load(self, num_running: int, num_generating: int) -> Load:
        """Describe the next step."""
        return Load(
            num_running=num_running,
            num_tokens=num_generating,
            max_draft_tokens=self._limits.max_draft_tokens_per_step or _UNLIMITED,
            costs=self.costs.costs(num_generating),
        )

    def ask(self, batch: Batch, load: Load) -> tuple[Int32Array, Int32Array]:
        """Return which requests to draft for, integers ``[m]``, and how many tokens for each."""
        most = np.where(self._barred(batch, load), 0, batch.max_draft_tokens)
        if most.any():
            asked = self._lengths(self.policy.ask, most, batch, load)
            most = np.minimum(most, asked)
        kept = np.flatnonzero(most > 0).astype(np.int32)
        return kept, most[kept].astype(np.int32)

    def _barred(self, batch: Batch, load: Load) -> Any:
        limits = self._limits
        if limits.off_above_running and load.num_running > limits.off_above_running:
            return True
        if limits.off_above_context:
            return batch.num_tokens > limits.off_above_context
        return False

    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Drafts:
        """Return the drafts as long as they are to be verified."""
        seen = drafts if drafts.probabilities is None else _unseen(batch, drafts)
        lengths = self._lengths(self.policy.choose, seen.lengths, batch, seen, load)
        if self._limits.max_speculating_requests:
            lengths = _longest_only(lengths, self._limits.max_speculating_requests)
        if lengths.sum() > load.max_draft_tokens:
            lengths = _levelled(lengths, load.max_draft_tokens)
        self._judge()
        return replace(drafts, lengths=np.minimum(lengths, drafts.lengths).astype(np.int32))

    # -- guard ------------------------------------------------------------------------------

    def _lengths(self, method: Callable[..., Any], most: Lengths, *arguments: Any) -> Lengths:
        result = self._call(method, *arguments)
        if result is None:
            return most
        if not (
            isinstance(result, np.ndarray)
            and result.dtype.kind in "iu"
            and result.shape == most.shape
        ):
            found = f"{getattr(result, 'dtype', type(result).__name__)} of {np.shape(result)}"
            self._fault(
                f"{method.__name__} returned no lengths",
                f"{found}, expected {len(most)} integers",
            )
            return most
        return np.clip(result, 0, most)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._switched_off:
            return None
        try:
            return method(*arguments)
        except Exception as error:
            self._fault(f"{method.__name__} raised {type(error).__name__}", shown(error), error)
            return None

    def _fault(self, kind: str, detail: str, error: BaseException | None = None) -> None:
        self._step_faults += 1
        self.num_faults += 1
        if kind not in self._faults_seen:
            self._faults_seen.add(kind)
            logger.error(
                "specplug length policy '%s': %s: %s. Drafts keep the length that the proposer "
                "gave them; further faults of this kind are counted, not logged.",
                self.name, kind, detail, exc_info=error,
            )  # fmt: skip

    def _judge(self) -> None:
        """Switch off a policy that fails in step after step."""
        self._failed_steps = self._failed_steps + 1 if self._step_faults else 0
        self._step_faults = 0
        if self._failed_steps >= self._most_faults and not self._switched_off:
            self._switched_off = True
            logger.error(
                "specplug length policy '%s' failed in %d steps in a row and is switched off for "
                "this process; drafts keep the length that the proposer gives them.",
                self.name, self._failed_steps,
            )  # fmt: skip


def _unseen(batch: Batch, drafts: Drafts) -> Drafts:
    """Return in place of sampled drafts some that tell nothing of the tokens.

    Were a token kept for being likely, or for what follows from it, those kept would come from
    another distribution than their probabilities say, and so would the text. Whether there is a
    draft at all was settled before its first token.
    """
    lengths = np.where(drafts.lengths > 0, batch.max_draft_tokens, 0)
    return replace(Drafts.empty(len(batch), int(lengths.max(initial=0))), lengths=lengths)


def _longest_only(lengths: Lengths, count: int) -> Lengths:
    """Keep the longest drafts, so many; the first of equally long ones."""
    kept = np.argsort(-lengths, kind="stable")[:count]
    only = np.zeros_like(lengths)
    only[kept] = lengths[kept]
    return only


def _levelled(lengths: Lengths, total: int) -> Lengths:
    """Cut the longest drafts until all together have ``total`` tokens."""
    width = int(lengths.max())
    # Tokens by position: those at the front of every draft come first.
    order = np.argwhere(np.arange(width)[:, None] < lengths)[:total, 1]
    return np.bincount(order, minlength=len(lengths))
