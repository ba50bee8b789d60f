"""``adaptive``: as many draft tokens as pay, by measured acceptance and by what steps cost."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from specplug.length import Floats, LengthPolicy, LengthPolicySpec, Lengths, Load, Outcome
from specplug.lengths._acceptance import AcceptanceEstimate
from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Options, Request

_LONGEST_PAUSE = 32
"""A request whose drafts do not pay is drafted for at least every so many steps."""
_LEAST_SECONDS = 1e-9


class AdaptiveOptions(Options):
    """Options of ``adaptive``."""

    min_gain: float = Field(
        0.02,
        ge=0,
        description="Speculate in a step only if it is expected to be faster by this share.",
    )
    free_share: float = Field(
        0.01,
        ge=0,
        description="Drafting that takes no more than this share of a step is done without asking "
        "whether it pays.",
    )


class Adaptive(LengthPolicy):
    """Verifies the draft tokens that bring the most tokens per second, over the whole batch.

    The draft tokens of all requests are taken in the order of the chance that they are accepted,
    and as many as make expected tokens per second of the step the highest (goodput; Liu et al.,
    arXiv 2406.14066, choose one length for all requests so). That may be none.

    The acceptance of a request's draft is judged also where it was not verified, so a request
    that begins to copy is noticed at once, and at no cost.
    """

    def __init__(self, options: AdaptiveOptions) -> None:
        self._options = options

    def prepare(self, engine: EngineInfo) -> None:
        """Make room for what is learnt."""
        self._estimate = AcceptanceEstimate(engine.num_speculative_tokens)
        self._pauses: dict[int, _Pause] = {}
        self._slots: dict[str, int] = {}

    def begin(self, request: Request) -> None:
        """Expect of a new request what others did."""
        self._estimate.begin(request.slot)
        self._slots[request.id] = request.slot

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._pauses.pop(self._slots.pop(request_id), None)

    def observe(self, outcome: Outcome) -> None:
        """Learn how far drafts came true."""
        self._estimate.observe(outcome)

    def ask(self, batch: Batch, load: Load) -> Lengths:
        """Ask for all where drafting costs next to nothing, else for what is expected to pay."""
        costs = load.costs
        step = costs.of_steps(load.num_tokens)
        drafting = costs.per_draft + costs.per_draft_token * int(batch.max_draft_tokens.sum())
        if drafting <= self._options.free_share * step:
            return batch.max_draft_tokens
        worth = worthwhile(
            self._estimate.before_drafting(batch),
            batch.max_draft_tokens,
            load,
            self._options.min_gain,
            once=costs.per_draft,
            per_token=costs.per_draft_token,
        )
        # One more than pays: so it is seen when more would.
        asked = np.minimum(worth + 1, batch.max_draft_tokens)
        for i in np.flatnonzero(worth == 0).tolist():
            if self._pausing(int(batch.slots[i])):
                asked[i] = 0
        for i in np.flatnonzero(worth).tolist():
            self._pauses.pop(int(batch.slots[i]), None)
        return asked

    def _pausing(self, slot: int) -> bool:
        pause = self._pauses.setdefault(slot, _Pause())
        return pause.goes_on()

    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Lengths:
        """Return the lengths that bring the most expected tokens per second."""
        if not drafts.lengths.any():
            return drafts.lengths
        chances = self._estimate.of_drafts(batch, drafts)
        return worthwhile(chances, drafts.lengths, load, self._options.min_gain)


class _Pause:
    """How long a request is not drafted for: each time twice as long."""

    def __init__(self) -> None:
        self._length, self._left = 1, 0

    def goes_on(self) -> bool:
        """Return whether the request is left out of this step too."""
        if self._left:
            self._left -= 1
            return True
        self._left = self._length
        self._length = min(2 * self._length, _LONGEST_PAUSE)
        return False


def worthwhile(
    chances: Floats,
    most: Lengths,
    load: Load,
    min_gain: float,
    *,
    once: float = 0.0,
    per_token: float = 0.0,
) -> Int32Array:
    """Return how many draft tokens of each request make the step's tokens per second highest.

    Args:
        chances: ``[n, width]``, of each token given that those before it are accepted.
        most: integers ``[n]``, the tokens that there are.
        load: what the step does anyway, and what it costs.
        min_gain: the share by which speculation must be faster to be worth it.
        once: seconds that speculation takes beside the step, however many tokens there are ...
        per_token: ... and for each.
    """
    n, width = chances.shape
    gains = np.where(np.arange(width) < most[:, None], np.cumprod(chances, axis=1), 0.0).ravel()
    # Stable, so that equal gains stay in order of position and no token is taken before those
    # in front of it.
    order = np.argsort(-gains, kind="stable")[: min(int(most.sum()), load.max_draft_tokens)]
    extra = np.arange(len(order) + 1)
    # Never 0, so that free steps can be compared.
    seconds = np.maximum(load.costs.of_steps(load.num_tokens + extra), _LEAST_SECONDS)
    expected = load.num_tokens + np.cumsum(gains[order])
    goodput = expected / (seconds[1:] + once + per_token * extra[1:])
    best = int(goodput.argmax()) if len(order) else 0
    if not len(order) or goodput[best] * seconds[0] < load.num_tokens * (1 + min_gain):
        return np.zeros(n, np.int32)
    return np.bincount(order[: best + 1] // width, minlength=n).astype(np.int32)


SPEC = LengthPolicySpec(
    name="adaptive",
    factory="specplug.lengths.adaptive:Adaptive",
    options=AdaptiveOptions,
    summary="As many draft tokens as pay, by measured acceptance and what the engine's steps cost.",
)
