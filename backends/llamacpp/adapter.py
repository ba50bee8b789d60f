"""A proposer as the draft model of llama-cpp-python's ``Llama``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from specplug.config import Settings, checked_k, validate
from specplug.proposer import EngineInfo, Int32Array
from specplug.runtime import Arrival, Runtime, Step

_UNLIMITED = 1 << 20
"""The context's length is not known here: ``Llama`` itself cuts drafts that do not fit."""
_ROW = np.zeros(1, np.int32)


def draft(
    proposer: str,
    *,
    num_speculative_tokens: int = 8,
    vocab_size: int | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Drafter:
    """Return what ``Llama(draft_model=...)`` takes.

    Args:
        proposer: the registered name of the proposer.
        num_speculative_tokens: K, the most draft tokens per step.
        vocab_size: of the model. Without it, drafts end before a token with a higher id than all
            that were seen: llama.cpp fails at one that it does not have.
        settings: the other settings, see ``specplug.config.Settings``.
        options: the proposer's own options.

    Raises:
        SpecplugError: the name, K, a setting or an option is wrong.
    """
    engine = EngineInfo(
        backend="llamacpp",
        vocab_size=vocab_size or np.iinfo(np.int32).max,
        max_model_len=_UNLIMITED,
        max_num_seqs=1,
        num_speculative_tokens=checked_k(num_speculative_tokens),
    )
    checked = validate(
        Settings,
        {**(settings or {}), "options": options},
        "the settings of specplug.llamacpp.draft",
    )
    return Drafter(Runtime(proposer, engine, checked), vocab_size)


class Drafter:
    """Has the interface of llama-cpp-python's ``LlamaDraftModel``: tokens in, a draft out.

    It is told nothing of requests. A call whose tokens are those of the one before, plus some of
    what was drafted then, plus one, goes on with its request; any other begins a new one.
    """

    def __init__(self, runtime: Runtime, vocab_size: int | None) -> None:
        self.runtime = runtime
        self._vocab_size = vocab_size
        self._highest = 0
        self._numbers = count()
        self._id: str | None = None
        self._tokens: Int32Array = np.zeros(0, np.int32)
        self._draft: list[int] = []

    def __call__(self, input_ids: Int32Array, /, **_: Any) -> Int32Array:
        """Return the draft for a sequence, int32 ``[at most K]``.

        Args:
            input_ids: int32 ``[length]``; the engine's own memory, the last token just sampled.
        """
        new = input_ids
        if self._goes_on(input_ids):
            new = input_ids[len(self._tokens) :]
        else:
            self._begin(input_ids)
        self._highest = max(self._highest, int(new.max(initial=0)))
        assert self._id is not None
        drafts = self.runtime.step(
            Step(
                request_ids=[self._id],
                token_ids=input_ids[None],
                rows=_ROW,
                num_tokens=[len(input_ids)],
                sampled=[True],
                verified={self._id: self._draft} if self._draft else {},
            )
        )
        self._tokens = input_ids.copy()
        self._draft = self._known(drafts.to_lists()[0])
        return np.array(self._draft, np.intc)

    def end(self) -> None:
        """End the request, if one is alive; the next call would, and nothing else does."""
        if self._id is not None:
            self.runtime.end(self._id)
        self._id = None

    def _goes_on(self, tokens: Int32Array) -> bool:
        known = len(self._tokens)
        accepted = tokens[known:-1].tolist()
        return (
            self._id is not None
            and len(tokens) > known
            and accepted == self._draft[: len(accepted)]
            and np.array_equal(tokens[:known], self._tokens)
        )

    def _begin(self, tokens: Int32Array) -> None:
        self.end()
        self._id, self._draft = str(next(self._numbers)), []
        self.runtime.begin(Arrival(self._id, tokens[:-1].tolist(), _UNLIMITED))

    def _known(self, draft: list[int]) -> list[int]:
        limit = self._vocab_size or self._highest + 1
        return draft[: next((i for i, token in enumerate(draft) if token >= limit), len(draft))]
