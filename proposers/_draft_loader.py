"""Loads draft models: what they need is known, and refused, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specplug.errors import OptionError
from specplug.proposer import EngineInfo
from specplug.proposers._draft_attention import group_queries
from specplug.proposers._draft_blocks import BlockTable, blocks_for
from specplug.proposers._draft_cache import (
    LayerShape,
    PooledCache,
    bytes_per_block,
    layer_shapes,
    weight_bytes,
)
from specplug.proposers._draft_options import DrafterOptions
from specplug.proposers._draft_sampling import sampling_of
from specplug.proposers._drafter import Drafter


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model of transformers that can be loaded.

    Attributes:
        name: a folder, or a name on the hub.
        options: how to load it.
        device: where to.
        config: its configuration.
    """

    name: str
    options: DrafterOptions
    device: torch.device
    config: Any

    @classmethod
    def find(cls, name: str, options: DrafterOptions, engine: EngineInfo) -> Checkpoint:
        """Read its configuration.

        Raises:
            OptionError: there is no such checkpoint.
        """
        try:
            config = AutoConfig.from_pretrained(
                name, revision=options.revision, local_files_only=options.local_files_only
            )
        except (OSError, ValueError) as error:
            raise _not_loaded(name, error) from error
        return cls(name, options, torch.device(options.device or engine.device), config)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and cache."""
        if self.options.dtype != "auto":
            return getattr(torch, self.options.dtype)
        return getattr(self.config, "dtype", None) or torch.float32

    def skeleton(self) -> Any:
        """Return the model without its weights."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()

    def load(self) -> Any:
        """Return the model.

        Raises:
            OptionError: it cannot be loaded.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.name,
                config=self.config,
                revision=self.options.revision,
                local_files_only=self.options.local_files_only,
                dtype=self.dtype,
            )
        except (OSError, ValueError) as error:
            raise _not_loaded(self.name, error) from error
        return model.to(self.device).eval().requires_grad_(False)

    def load_tokenizer(self) -> Any:
        """Return its tokenizer.

        Raises:
            OptionError: it has none.
        """
        try:
            return AutoTokenizer.from_pretrained(
                self.name,
                revision=self.options.revision,
                local_files_only=self.options.local_files_only,
            )
        except (OSError, ValueError) as error:
            raise _not_loaded(self.name, error) from error

    def longest(self, engine: EngineInfo) -> int:
        """Return the longest sequence that can be drafted for, in tokens.

        Attention within a sliding window equals full attention up to the window's length.
        """
        text = self.config.get_text_config()
        layer_types = getattr(text, "layer_types", None) or ["sliding_attention"]
        window = getattr(text, "sliding_window", None) if "sliding_attention" in layer_types else 0
        limits = [engine.max_model_len, getattr(text, "max_position_embeddings", 0), window]
        return min(limit for limit in limits if limit)


@dataclass(frozen=True, slots=True)
class Plan:
    """What drafting with a checkpoint takes.

    Attributes:
        shapes: what each layer keeps for a token.
        max_tokens: the longest sequence.
        num_blocks: of the cache, the scratch block included.
    """

    shapes: list[LayerShape]
    max_tokens: int
    num_blocks: int


def planned(checkpoint: Checkpoint, engine: EngineInfo) -> Plan:
    """Work out what the model needs.

    Raises:
        OptionError: it is more than the options allow or the device has, or the model is not of
            the kind that this cache can serve.
    """
    skeleton, name = checkpoint.skeleton(), checkpoint.name
    try:
        shapes = layer_shapes(skeleton)
    except Exception as error:  # models fail in many ways
        raise OptionError(
            f"'{name}' ({type(skeleton).__name__}) cannot draft: {error}.",
            hint="Take a model whose layers all attend to keys and values, such as a Llama.",
        ) from error
    limit, longest = checkpoint.options.cache_bytes, checkpoint.longest(engine)
    block = bytes_per_block(shapes)
    needed = (blocks_for(longest) + 1) * block
    if limit < needed:
        raise OptionError(
            f"The KV cache of the draft model '{name}' needs {shown_bytes(needed)} for one request "
            f"of {longest} tokens, and cache_bytes is {shown_bytes(limit)}.",
            hint=f"Set cache_bytes to {needed} or more, or serve with a smaller maximum length.",
        )
    weights, num_blocks = weight_bytes(skeleton), limit // block
    refuse_more_than_there_is(checkpoint, weights, num_blocks * block)
    return Plan(shapes, longest, num_blocks)


def refuse_more_than_there_is(checkpoint: Checkpoint, weights: int, cache: int = 0) -> None:
    """Compare what a model needs with the device's free memory.

    Raises:
        OptionError: it is more.
    """
    free = free_bytes(checkpoint.device)
    if weights + cache > free:
        raise OptionError(
            f"The draft model '{checkpoint.name}' needs {shown_bytes(weights + cache)} on "
            f"{checkpoint.device} ({shown_bytes(weights)} for weights, {shown_bytes(cache)} for "
            f"its KV cache), and {shown_bytes(free)} are free.",
            hint="Take a smaller model, a smaller cache_bytes, another dtype or another device.",
        )


def free_bytes(device: torch.device) -> int:
    """Return how much memory of a device is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]  # type: ignore[no-any-return]
    return psutil.virtual_memory().available  # type: ignore[no-any-return]


def make_drafter(
    model: Any, plan: Plan, checkpoint: Checkpoint, engine: EngineInfo, vocab_size: int
) -> Drafter:
    """Return what drafts with a loaded model.

    Args:
        model: the model.
        plan: what it takes.
        checkpoint: what it was loaded from.
        engine: the engine.
        vocab_size: tokens from here on are not drafted.

    Raises:
        CapabilityError: drafts are to be sampled, and the engine cannot use their probabilities.
    """
    options = checkpoint.options
    group_queries(model)
    return Drafter(
        model,
        PooledCache(plan.shapes, plan.num_blocks, checkpoint.device),
        BlockTable(plan.num_blocks, plan.max_tokens),
        max_tokens=plan.max_tokens,
        vocab_size=vocab_size,
        num_speculative_tokens=engine.num_speculative_tokens,
        max_prefill_tokens=options.max_prefill_tokens,
        min_confidence=options.min_confidence,
        sampling=sampling_of(options, engine),
    )


def shown_bytes(count: int) -> str:
    """Return a number of bytes for people."""
    if count < 2**20:
        return f"{count:,} bytes"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _not_loaded(name: str, error: Exception) -> OptionError:
    return OptionError(
        f"The draft model '{name}' cannot be loaded: {error}",
        hint="Give the option 'model' the folder of a checkpoint of transformers; or its name on "
        "the hub, and local_files_only: false.",
    )
