"""What of a transformers model the runtime is told, and the runtimes that a model keeps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

from specplug.config import Settings, checked_k, validate
from specplug.proposer import Capability, EngineInfo
from specplug.runtime import Runtime, running

PROVIDES = frozenset(
    {
        Capability.REQUEST_OPTIONS,
        Capability.TARGET_TOKENS,
        Capability.LOGITS,
        Capability.DRAFT_PROBABILITIES,
    }
)
_UNLIMITED = 1 << 20
"""The length in tokens of a model that names none."""

_runtimes: weakref.WeakKeyDictionary[Any, dict[str, Runtime]] = weakref.WeakKeyDictionary()


def runtime_of(model: Any, proposer: str, k: int, settings: Mapping[str, Any]) -> Runtime:
    """Return the runtime that serves these settings on this model; the first call makes it.

    It lives as long as the model, so that what a proposer learns from one request serves the next.

    Raises:
        SpecplugError: the name, K, a setting or an option is wrong.
    """
    checked = validate(Settings, settings, "the settings of specplug.transformers.generate")
    key = f"{proposer} {k!r} {checked!r}"
    runtimes = _runtimes.get(model)
    if runtimes is None:
        runtimes = _runtimes[model] = {}
        weakref.finalize(model, _close, runtimes)
    if runtimes.get(key) not in running():
        runtimes[key] = Runtime(proposer, engine_info(model, k), checked)
    return runtimes[key]


def _close(runtimes: dict[str, Runtime]) -> None:
    for runtime in runtimes.values():
        runtime.close()


def engine_info(model: Any, k: int) -> EngineInfo:
    """Describe the model to its proposer.

    Raises:
        OptionError: K is wrong.
    """
    text = model.config.get_text_config(decoder=True)
    return EngineInfo(
        backend="transformers",
        vocab_size=text.vocab_size,
        max_model_len=getattr(text, "max_position_embeddings", None) or _UNLIMITED,
        max_num_seqs=1,  # rows of a batch are served one after the other
        num_speculative_tokens=checked_k(k),
        device=str(model.device),
        model_name=model.name_or_path,
        provides=PROVIDES,
        load_tokenizer=functools.partial(_load_tokenizer, model.name_or_path),
    )


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
