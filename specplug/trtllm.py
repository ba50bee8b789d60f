"""What users of TensorRT-LLM call: a proposer as the engine's own speculative config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def speculative_config(
    proposer: str | Any,
    *,
    num_speculative_tokens: int,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return TensorRT-LLM's own speculative config for a proposer.

    Args:
        proposer: a registered name (``specplug list`` shows them), a ``ProposerSpec`` or a
            decorated function that the workers can import.
        num_speculative_tokens: K, the most draft tokens per request and step.
        settings: specplug's own settings; see docs/trtllm.md.
        options: the proposer's options.

    Raises:
        SpecplugError: something of it is wrong; the message says what to do.
    """
    from specplug.backends.trtllm import selection

    return selection.speculative_config(
        proposer, num_speculative_tokens=num_speculative_tokens, settings=settings, **options
    )


def accept_names() -> None:
    """Let ``drafter: "specplug:suffix"`` in a YAML file name a proposer, in this process.

    For ``trtllm-serve --custom_module_dirs``: see docs/trtllm.md.
    """
    from specplug.backends.trtllm import selection

    selection.watch_llm()
