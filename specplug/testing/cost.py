"""How long a step takes with a short and with a long text behind it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import numpy as np

from specplug.proposer import Acceptance, Batch, EngineInfo, Int32Array, Proposer, Request
from specplug.testing.simulation import MakeProposer, prepared

SHORTER = 128
"""How many times shorter the short text is."""
_CATCH_UP = 40
"""Steps that are not measured: a proposer may take in a new prompt bit by bit."""
_MEASURED = 20


class _Text:
    """One request that goes on by a token a step."""

    def __init__(self, proposer: Proposer, engine: EngineInfo, slot: int, size: int) -> None:
        self._proposer = proposer
        rng = np.random.default_rng(0)
        vocab_size, end = engine.vocab_size, size + _CATCH_UP + _MEASURED + 1
        self._tokens: Int32Array = rng.integers(0, vocab_size, (1, end), np.int32)
        self._view = self._tokens.view()
        self._view.flags.writeable = False
        self._size, self._shown, self._slot = size, 0, slot
        self._most = engine.num_speculative_tokens
        prompt = self._tokens[0, :size].tolist()
        self._id = f"request-{slot}"
        proposer.begin(Request(self._id, slot, prompt, engine.max_model_len, self._most))

    def step(self) -> float:
        """Take in a token and ask for a draft; return the seconds."""
        new = [int(self._tokens[0, self._size])]
        self._size += 1

        def column(value: int) -> Int32Array:
            return np.array([value], np.int32)

        acceptance = Acceptance([self._id], column(self._slot), [[]], column(0), [new])
        batch = Batch(
            request_ids=[self._id],
            slots=column(self._slot),
            token_ids=self._view,
            rows=column(0),
            num_tokens=column(self._size),
            num_new_tokens=column(self._size - self._shown),
            num_prompt_tokens=column(self._size - 1),
            max_draft_tokens=column(self._most),
        )
        self._shown = self._size
        began = perf_counter()
        with suppress(Exception):  # which another rule is about
            self._proposer.observe(acceptance)
            self._proposer.propose(batch)
        return perf_counter() - began


def step_seconds(make: MakeProposer, engine: EngineInfo, long_context: int) -> tuple[float, float]:
    """Return the seconds of a step with a short and with a long text, the least of several.

    Args:
        make: makes the proposer.
        engine: what it is told, but for the longest sequence.
        long_context: the tokens of the long text.
    """
    longest = long_context + _CATCH_UP + _MEASURED + engine.num_speculative_tokens + 2
    proposer, engine = prepared(make, replace(engine, max_model_len=longest))
    sizes = max(1, long_context // SHORTER), long_context
    texts = [_Text(proposer, engine, slot, size) for slot, size in enumerate(sizes)]
    for _ in range(_CATCH_UP):
        for text in texts:
            text.step()
    # In turns, so that a busy machine is busy for both.
    seconds = [[text.step() for text in texts] for _ in range(_MEASURED)]
    short, long = map(min, zip(*seconds, strict=True))
    return short, long
