"""Verifies a sampled draft so that the text keeps the target's distribution."""

from __future__ import annotations

from typing import Any


def verified(target: Any, draft: Any, token: int) -> int:
    """Return the target's token at a position for which one was drafted.

    The drafted one with probability ``min(1, p / q)``, else one from what the target has more of:
    ``max(0, p - q)`` (Leviathan et al., arXiv 2211.17192). That is never the drafted one.

    Args:
        target: float32 ``[vocab_size]``, p, what the target would sample from.
        draft: float32 ``[vocab_size]``, q, what the token was drawn from.
        token: the drafted one; its q is above 0.
    """
    import torch

    chance = torch.rand((), device=target.device)
    if chance * draft[token] < target[token]:
        return token
    rest = (target - draft).clamp_min(0)
    # Nothing is left only where p and q are the same but for rounding.
    return int(torch.multinomial(rest if rest.any() else target, num_samples=1))
