"""Proposers that do what no proposer should, for engines that must not mind.

``BackendConformance`` registers them under their names for the time of its tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specplug.proposer import Acceptance, Batch, Drafts, EngineInfo, Proposer, ProposerSpec


class Nonsense(Proposer):
    """Drafts tokens at random, as many as it may; nothing is wrong with that but the tokens."""

    def __init__(self, _options: object) -> None:
        self._rng = np.random.default_rng(0)

    def prepare(self, engine: EngineInfo) -> None:
        """Note the vocabulary."""
        self._vocab_size = engine.vocab_size

    def propose(self, batch: Batch) -> Drafts:
        """Draft anything."""
        shape = len(batch), int(batch.max_draft_tokens.max())
        return Drafts(self._rng.integers(0, self._vocab_size, shape), batch.max_draft_tokens)


class Invalid(Proposer):
    """Returns something else each time, never a draft."""

    def __init__(self, _options: object) -> None:
        self._calls = 0

    def prepare(self, engine: EngineInfo) -> None:
        """Note the vocabulary."""
        self._vocab_size = engine.vocab_size

    def propose(self, batch: Batch) -> Any:
        """Return what is no draft."""
        n, v = len(batch), self._vocab_size
        draft: Any = Drafts  # whose types it does not keep
        results: list[Any] = [
            None, 3, [], "text", [[1]] * (n + 1), [None] * n, [7] * n, ["text"] * n, [[v]] * n,
            [[-1]] * n, [[0.5]] * n, [[float("nan")]] * n, [[2**40]] * n, [[True]] * n,
            [[[1]]] * n, [ValueError("in a row")] * n, draft(None, None),
            draft(np.zeros((n, 4)), np.full(n, 4)), draft(np.zeros((n, 4), int), np.full(n, 9)),
            draft(np.full((n, 4), v), np.full(n, 4)), draft(np.zeros(4, int), np.full(n, 4)),
        ]  # fmt: skip
        self._calls += 1
        return results[self._calls % len(results)]


class Raising(Proposer):
    """Raises whatever it is asked."""

    def __init__(self, _options: object) -> None:
        """Make one all the same: what is raised at start-up refuses the start."""

    def propose(self, batch: Batch) -> Drafts:
        """Raise."""
        raise IndexError("the window is longer than the prompt")

    def observe(self, acceptance: Acceptance) -> None:
        """Raise."""
        raise ZeroDivisionError

    def end(self, request_id: str) -> None:
        """Raise."""
        raise KeyError(request_id)


def _spec(kind: type[Proposer]) -> ProposerSpec:
    summary = (kind.__doc__ or "").splitlines()[0]
    name = kind.__name__
    return ProposerSpec(f"kit_{name.lower()}", factory=f"{__name__}:{name}", summary=summary)


nonsense, invalid, raising = map(_spec, (Nonsense, Invalid, Raising))
ENTRIES = {f"kit_{name}": f"{__name__}:{name}" for name in ("nonsense", "invalid", "raising")}
"""The entry points that a distribution of them has."""
