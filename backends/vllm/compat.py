"""Which vLLM releases are supported, and everything of vLLM that specplug wraps or relies on."""

from __future__ import annotations

from specplug.compat import Hook, Releases

RELEASES = Releases(
    engine="vLLM",
    oldest=(0, 22),
    newest=(0, 33),
    how_to_try='--additional-config \'{"specplug": {"allow_untested_engine": true}}\'',
)
"""Their source was checked; see docs/explanation/limits.md for those that were run."""
OLDEST_V2 = (0, 28)
"""The first release whose V2 runner takes a speculator that has no model."""

_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
_V2_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_STEP = ("self", "scheduler_output")

V1_HOOKS = (
    Hook(_V1_RUNNER, "GPUModelRunner._update_states", _STEP),
    Hook(_V1_RUNNER, "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata")),
)
CONFIG_HOOKS = (
    Hook("vllm.config.vllm", "VllmConfig.__post_init__", ("self",)),
    Hook("vllm.config.vllm", "VllmConfig.use_v2_model_runner", ("self",)),
    Hook("vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features", ("self",)),
)
V2_HOOKS = (
    Hook(_V2_SPECULATORS, "init_speculator", ("vllm_config", "device")),
    Hook(
        f"{_V2_SPECULATORS}.speculator",
        "BaseSpeculator.propose",
        (
            "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states",
            "aux_hidden_states", "num_sampled",
        ),
    ),
    Hook(
        f"{_V2_SPECULATORS}.rejection_sampler",
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch"),
    ),
    Hook(_V2_RUNNER, "GPUModelRunner.add_requests", _STEP),
    Hook(
        _V2_RUNNER,
        "GPUModelRunner.postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled"),
    ),
    Hook(_V2_RUNNER, "GPUModelRunner.take_draft_token_ids", ("self",)),
    Hook(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        fields=("req_ids", "num_reqs", "idx_mapping_np", "cu_num_logits_np"),
    ),
    Hook(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        fields=("req_id", "prompt_token_ids", "prefill_token_ids", "sampling_params"),
    ),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", fields=("num_spec_tokens_to_schedule",)),
)  # fmt: skip
