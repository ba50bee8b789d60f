"""Which TensorRT-LLM releases are supported, and what of the engine specplug relies on."""

from __future__ import annotations

from specplug.compat import Hook, Releases

RELEASES = Releases(
    engine="TensorRT-LLM",
    oldest=(1, 0),
    newest=(1, 3),
    how_to_try="settings={'allow_untested_engine': True} to specplug.trtllm.speculative_config",
)
"""Their source was read; see docs/explanation/limits.md for what was run of them."""
HOOKS = (
    Hook(
        "tensorrt_llm._torch.speculative.drafter",
        "Drafter.prepare_draft_tokens",
        ("self", "scheduled_requests", "resource_manager"),
    ),
    Hook(
        "tensorrt_llm._torch.pyexecutor.resource_manager",
        "BaseResourceManager.free_resources",
        ("self", "request"),
    ),
    Hook(
        "tensorrt_llm.llmapi.llm_args",
        "UserProvidedDecodingConfig",
        fields=("drafter", "resource_manager"),
    ),
    Hook("tensorrt_llm.llmapi.llm", "BaseLLM.__init__", ("self", "model")),
)
