"""Tries a draft model at start-up: with its cache it must say what it says without."""

from __future__ import annotations

import numpy as np
import torch

from specplug.errors import OptionError
from specplug.proposer import Batch, Drafts, EngineInfo
from specplug.proposers._drafter import Drafter

_SIZES = (3, 8)
"""Two requests of different lengths."""
_MOST = 0.5
"""How far two log-probabilities may differ, in nats; half-precision types are coarse."""


def check(drafter: Drafter, engine: EngineInfo) -> None:
    """Draft for two made-up requests and compare with plain forwards.

    Raises:
        OptionError: the model does not heed positions or masks as given, and would draft nonsense.
    """
    batch = _made_up(engine, min(drafter.vocab_size, 1000))
    for slot in batch.slots.tolist():
        drafter.begin(slot)
    drafts = drafter.draft(batch)
    for slot in batch.slots.tolist():
        drafter.end(slot)
    for i, draft in enumerate(drafts.to_lists()):
        difference = _difference(drafter, batch, drafts, i, draft)
        if not difference <= _MOST:  # NaN is no better
            raise OptionError(
                f"{drafter.model_name} cannot draft: with a cache its log-probabilities differ by "
                f"{difference:.2f} from those without.",
                hint="Take a model whose layers all attend to keys and values, such as a Llama.",
            )


def _made_up(engine: EngineInfo, vocab_size: int) -> Batch:
    k = engine.num_speculative_tokens
    sizes = np.minimum(np.array(_SIZES, np.int32), max(1, engine.max_model_len - k))
    rows = np.arange(len(sizes), dtype=np.int32)
    return Batch(
        request_ids=[f"check-{row}" for row in rows],
        slots=rows,
        token_ids=np.random.default_rng(0).integers(
            vocab_size, size=(2, sizes.max()), dtype=np.int32
        ),
        rows=rows,
        num_tokens=sizes,
        num_new_tokens=sizes,
        num_prompt_tokens=sizes,
        max_draft_tokens=np.full(len(sizes), k, np.int32),
    )


@torch.inference_mode()
def _difference(drafter: Drafter, batch: Batch, drafts: Drafts, i: int, draft: list[int]) -> float:
    """Return how far the draft's log-probabilities are from those of one plain forward."""
    if not draft:
        return 0.0
    text = [*batch.tokens(i).tolist(), *draft]
    logits = drafter.plain_logits(text)[-len(draft) - 1 : -1]
    plain = logits.log_softmax(dim=-1)[torch.arange(len(draft)), torch.tensor(draft)]
    assert drafts.scores is not None
    cached = torch.from_numpy(np.log(drafts.scores[i, : len(draft)]))
    return float((plain.cpu() - cached).abs().max())
