"""The draft model's KV cache: one pool per layer, in which requests hold blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache

from specplug.proposers._draft_blocks import BLOCK_SIZE


class LayerShape(NamedTuple):
    """What a layer keeps for a token: ``heads`` keys and values of these widths."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in this layer."""
        return self.heads * (self.key_width + self.value_width) * int(self.dtype.itemsize)


@torch.inference_mode()
def layer_shapes(model: Any) -> list[LayerShape]:
    """Return what each layer keeps, from a forward of one token; a model on ``meta`` will do.

    Raises:
        ValueError: the model keeps something else than keys and values.
    """
    cache = DynamicCache()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    if len(cache.layers) != model.config.get_text_config().num_hidden_layers:
        raise ValueError("not every layer keeps keys and values of its own")
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise ValueError(f"a layer keeps {type(layer).__name__}, not keys and values")
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
    return shapes


def bytes_per_block(shapes: list[LayerShape]) -> int:
    """Return what a block takes in all layers."""
    return BLOCK_SIZE * sum(shape.bytes_per_token for shape in shapes)


def weight_bytes(model: Any) -> int:
    """Return what a model's weights take; those that are shared count once."""
    return sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


class PooledCache(Cache):  # type: ignore[misc]
    """Writes keys and values where ``write`` says, and returns those that ``read`` names.

    A token is given up by forgetting its place: what lies there is masked until it is
    overwritten. So everything in the pools must be finite, also before it is first written.

    Attributes:
        read: int64 ``[n, length]``, the places of each request's tokens, in order.
        write: int64 ``[n, width]``, the places of the tokens of the next forward.
        block_bytes: what a block takes.
    """

    read: torch.Tensor
    write: torch.Tensor

    def __init__(self, shapes: list[LayerShape], num_blocks: int, device: Any) -> None:
        super().__init__(layers=[])
        self.block_bytes = bytes_per_block(shapes)
        size = num_blocks * BLOCK_SIZE

        def pool(shape: LayerShape, width: int) -> torch.Tensor:
            return torch.zeros((size, shape.heads, width), dtype=shape.dtype, device=device)

        self._keys = [pool(shape, shape.key_width) for shape in shapes]
        self._values = [pool(shape, shape.value_width) for shape in shapes]

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """Store ``[n, heads, width, d]`` and return ``[n, heads, length, d]`` of a layer."""
        return (
            self._swap(self._keys[layer_idx], key_states),
            self._swap(self._values[layer_idx], value_states),
        )

    def _swap(self, pool: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        pool.index_copy_(0, self.write.flatten(), states.transpose(1, 2).flatten(0, 1))
        found = pool.index_select(0, self.read.flatten())
        return found.view(*self.read.shape, *pool.shape[1:]).transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions and masks are always given, so nobody needs it."""
        return 0
