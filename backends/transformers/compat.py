"""What specplug uses of transformers beyond its documented interface, and what it cannot drive."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from specplug.errors import EngineSupportError, OptionError

NEEDED = {
    "GenerationMixin._prefill": ("input_ids", "generation_config", "model_kwargs"),
    "GenerationMixin.prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "GenerationMixin._update_model_kwargs_for_generation": ("outputs", "num_new_tokens"),
    "Cache.crop": ("tokens_to_remove",),
    "Cache.activate_past_recording": (),
    "Cache.is_croppable": (),
}
"""Names, and the parameters that are passed to them."""


def mismatches() -> Iterator[str]:
    """Yield what the installed transformers lacks of what is needed."""
    import transformers
    from transformers import GenerationMixin
    from transformers.cache_utils import Cache

    classes = {"GenerationMixin": GenerationMixin, "Cache": Cache}
    for name, parameters in NEEDED.items():
        owner, _, attribute = name.partition(".")
        found = getattr(classes[owner], attribute, None)
        if found is None:
            yield f"{name} is not there in transformers {transformers.__version__}"
        elif missing := [p for p in parameters if p not in inspect.signature(found).parameters]:
            yield f"{name} takes no {', '.join(missing)}"


def check_release() -> None:
    """Refuse a transformers that differs from what specplug knows.

    Raises:
        EngineSupportError: naming what differs.
    """
    if differing := list(mismatches()):
        raise EngineSupportError(
            f"specplug does not know how to drive this transformers: {'; '.join(differing)}.",
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
