"""What specplug uses of transformers beyond its documented interface, and what it cannot drive."""

from __future__ import annotations

from typing import Any

from specplug.compat import Hook, live, mismatches
from specplug.errors import EngineSupportError, OptionError

_GENERATION = "transformers.generation.utils"
_CACHES = "transformers.cache_utils"
HOOKS = (
    Hook(
        _GENERATION,
        "GenerationMixin._prefill",
        ("self", "input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    ),
    Hook(
        _GENERATION,
        "GenerationMixin.prepare_inputs_for_generation",
        ("self", "input_ids", "next_sequence_length"),
    ),
    Hook(
        _GENERATION,
        "GenerationMixin._update_model_kwargs_for_generation",
        ("self", "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    ),
    Hook(_CACHES, "Cache.crop", ("self", "tokens_to_remove")),
    Hook(_CACHES, "Cache.activate_past_recording", ("self",)),
    Hook(_CACHES, "Cache.is_croppable", ("self",)),
)


def differing() -> str:
    """Return in words what of the installed transformers is not as expected; nothing if all is."""
    return "; ".join(
        f"{hook}: expected {hook.expected}, found {found}"
        for hook, found in mismatches(HOOKS, live)
    )


def check_release() -> None:
    """Refuse a transformers that differs from what specplug knows.

    Raises:
        EngineSupportError: naming what differs.
    """
    if found := differing():
        raise EngineSupportError(
            f"specplug does not know how to drive this transformers: {found}.",
            hint="Install a release that docs/reference/releases.md names.",
        )


def check_call(model: Any, config: Any, *, use_cache: bool, synced_gpus: bool) -> None:
    """Refuse what could only give another text, or fail later in other words.

    Args:
        model: the target model.
        config: the prepared ``GenerationConfig`` of the call.
        use_cache: whether the call has a KV cache.
        synced_gpus: whether all ranks must run the same number of steps.

    Raises:
        EngineSupportError: the model or the way it is distributed is not supported.
        OptionError: the call asks for something else than greedy decoding or sampling.
    """
    if model.config.is_encoder_decoder:
        raise EngineSupportError(
            f"{type(model).__name__} is an encoder-decoder model; only decoder-only models are "
            "served."
        )
    if synced_gpus:
        raise EngineSupportError(
            "synced_gpus is on: every rank would have to take the same number of steps.",
            hint="Generate without FSDP or ZeRO-3, or leave out custom_generate.",
        )
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise OptionError(
            f"The generation mode is {mode.value}; drafts are verified by greedy decoding and by "
            "sampling only.",
            hint="Set num_beams=1 and leave out what selects the mode.",
        )
    if not use_cache:
        raise OptionError("use_cache is False; drafts cannot be verified without a cache.")
    for wanted in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, wanted):
            raise OptionError(
                f"{wanted} is set, and a verification step covers several tokens.",
                hint="Available are output_scores and output_logits.",
            )


def check_cache(cache: Any) -> None:
    """Refuse a cache that tokens cannot be taken out of; to be called after prefill.

    Raises:
        EngineSupportError: naming its type.
    """
    from transformers.cache_utils import QuantizedCache

    if not getattr(cache, "is_croppable", False) or isinstance(cache, QuantizedCache):
        layers = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        raise EngineSupportError(
            f"Rejected draft tokens cannot be taken out of this model's cache: "
            f"{type(cache).__name__} of {', '.join(sorted(layers)) or 'unknown layers'}.",
            hint="Leave out cache_implementation. Models whose state has a fixed size, such as "
            "state-space models, cannot be served.",
        )
