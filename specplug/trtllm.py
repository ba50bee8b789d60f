"""What users of TensorRT-LLM call: a proposer as the engine's own speculative config."""

from __future__ import annotations

from specplug.backends.trtllm.selection import speculative_config, watch_llm

__all__ = ["accept_names", "speculative_config"]


def accept_names() -> None:
    """Let ``drafter: "specplug:suffix"`` in a YAML file name a proposer, in this process.

    For ``trtllm-serve --custom_module_dirs``: see docs/how-to/trtllm.md.
    """
    watch_llm()
