"""The first layers of a model as a model: how many pay, and how to get them."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specplug.errors import OptionError
from specplug.proposer import EngineInfo
from specplug.proposers._draft_cache import weight_bytes
from specplug.proposers._draft_loader import Checkpoint, refuse_more_than_there_is

logger = logging.getLogger(__name__)

_MOST_TRIED = 12
_TEXT = '''\
The lighthouse stood at the end of a narrow spit of land, and for eleven years the same keeper had \
climbed its stairs every evening. "You get used to the wind," she said, "but not to the quiet." \
In 1998 the lamp was replaced by an electric one, which needs no keeper; she stayed all the same.

def mean(values: list[float]) -> float:
    """Return the arithmetic mean of the values."""
    if not values:
        raise ValueError("values must not be empty")
    return sum(values) / len(values)

Question: A train leaves at 9:15 and arrives at 11:40. How long does the journey take?
Answer: From 9:15 to 11:15 are two hours, and from 11:15 to 11:40 are 25 minutes. So the journey \
takes 2 hours and 25 minutes.

1. Preheat the oven to 180 degrees.
2. Mix the flour, the sugar and the butter in a large bowl.
3. Add the eggs one at a time, and stir until the dough is smooth.
'''
"""Prose, code, an answer and a list: a little of what models write."""


def with_layers(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """Return a checkpoint of the first layers only.

    Raises:
        OptionError: it has no more layers than that.
    """
    text = checkpoint.config.get_text_config()
    if num_layers >= text.num_hidden_layers:
        raise OptionError(
            f"num_layers is {num_layers}, and '{checkpoint.name}' has {text.num_hidden_layers} "
            "layers: it must be less.",
            hint="Leave it out to have it chosen.",
        )
    config = copy.deepcopy(checkpoint.config)
    _shorten(config.get_text_config(), num_layers)
    return replace(checkpoint, config=config)


def _shorten(config: Any, num_layers: int) -> None:
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def cut(model: Any, num_layers: int) -> Any:
    """Take all but the first layers from a model, and give their memory back."""
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:num_layers]
    _shorten(model.config.get_text_config(), num_layers)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def chosen(checkpoint: Checkpoint, engine: EngineInfo) -> tuple[Any, int]:
    """Load the whole model; return it and how many of its layers pay best as a draft.

    Counted, not timed, so that all tensor-parallel ranks choose the same: how often the first
    layers agree with all of them, and which part of the weights they are.

    Raises:
        OptionError: the whole model does not fit, or there is no tokenizer to measure with.
    """
    weights = weight_bytes(checkpoint.skeleton())
    refuse_more_than_there_is(checkpoint, weights)
    model = checkpoint.load()
    tokens = checkpoint.load_tokenizer().encode(_TEXT, add_special_tokens=False)
    agreements = _agreements(model, tokens)
    costs = _costs(model)
    gains = {
        count: expected_gain(agreement, costs[count], engine.num_speculative_tokens)
        for count, agreement in agreements.items()
    }
    best = max(gains, key=lambda count: (gains[count], -count))
    logger.info(
        "specplug layer_skip drafts with %d of %d layers, which agree with all of them at %.0f%% "
        "of %d tokens; tokens per cost are expected to be %.2f times those without drafts.",
        best, len(costs), 100 * agreements[best], len(tokens), gains[best],
    )  # fmt: skip
    if gains[best] <= 1:
        logger.warning(
            "specplug layer_skip: no number of layers is expected to pay; this model was hardly "
            "trained for early exit."
        )
    return model, best


def expected_gain(agreement: float, cost: float, num_speculative_tokens: int) -> float:
    """Return tokens per cost of a target's forward (Leviathan et al., theorem 3.8).

    Args:
        agreement: the probability that a drafted token is accepted.
        cost: a draft forward's, of a target's.
        num_speculative_tokens: K.
    """
    tokens = sum(agreement**i for i in range(num_speculative_tokens + 1))
    return tokens / (1 + num_speculative_tokens * cost)


@torch.inference_mode()
def _agreements(model: Any, tokens: list[int]) -> dict[int, float]:
    """Return how often the first ``n`` layers choose the token that all choose, by ``n``."""
    decoder, ids = model.get_decoder(), torch.tensor([tokens], device=model.device)
    layers, found = decoder.layers, {}

    def choices(count: int) -> torch.Tensor:
        decoder.layers = layers[:count]
        return model(input_ids=ids, use_cache=False).logits[0].argmax(dim=-1)

    try:
        right = choices(len(layers))
        for count in _tried(len(layers)):
            found[count] = float((choices(count) == right).float().mean())
    finally:
        decoder.layers = layers
    return found


def _tried(num_layers: int) -> list[int]:
    counts = np.linspace(1, num_layers - 1, min(num_layers - 1, _MOST_TRIED))
    return sorted({round(count) for count in counts})


def _costs(model: Any) -> dict[int, float]:
    """Return which part of the weights that a token needs the first ``n`` layers are, by ``n``."""
    layers = [weight_bytes(layer) for layer in model.get_decoder().layers]
    head = weight_bytes(model.get_output_embeddings())
    needed = np.cumsum(layers) + head
    return {i + 1: float(part) for i, part in enumerate(needed / needed[-1])}
