"""Attention for few new tokens: heads that share keys are served without copies of the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "specplug_grouped"
_NARROW = 16
"""Of more new tokens than this, the masks would be larger than the copies."""


def group_queries(model: Any) -> None:
    """Let a model that uses torch's attention use this one."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, grouped_attention)
        model.set_attn_implementation(_NAME)


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Take the heads that share a key head as more queries of that one.

    Args:
        module: the layer.
        query: ``[n, heads, width, d]``.
        key: ``[n, key_heads, length, d]``.
        value: ``[n, key_heads, length, v]``.
        attention_mask: added to the scores, ``[n, 1, width, length]``.
        scaling: of the scores.
        options: what else transformers passes.

    Returns:
        ``[n, width, heads, v]``, and no weights.
    """
    n, heads, width, _ = query.shape
    if attention_mask is None or width > _NARROW:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    groups = heads // key.shape[1]
    attended = scaled_dot_product_attention(
        query.reshape(n, key.shape[1], groups * width, -1),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return attended.view(n, heads, width, -1).transpose(1, 2).contiguous(), None
