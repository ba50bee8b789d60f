"""vLLM's V2 model runner: making a speculator, and what is wrapped for it.

The runner keeps tokens on the device and asks for drafts as a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from specplug.backends.vllm import compat
from specplug.backends.vllm.adapter import PROVIDES, Adapter, check_release
from specplug.backends.vllm.v2_base import Speculator
from specplug.backends.vllm.v2_device import DeviceSpeculator
from specplug.backends.vllm.v2_host import HostSpeculator
from specplug.proposer import Capability, DeviceProposer


def make_speculator(vllm_config: Any, device: Any, proposer: str) -> Speculator:
    """Check the installed vLLM, wrap what speculators need, and make one.

    Raises:
        SpecplugError: the engine is not one that specplug knows; the name or an option is wrong.
    """
    check_release(vllm_config)
    if not hasattr(GPUModelRunner.add_requests, "__wrapped__"):
        compat.RELEASES.check_hooks(compat.V2_HOOKS)
        _wrap()
    adapter = Adapter(vllm_config, proposer, PROVIDES | {Capability.DEVICE_TENSORS})
    if isinstance(adapter.runtime.proposer, DeviceProposer):
        return DeviceSpeculator(adapter, device)
    speculative = vllm_config.speculative_config
    adaptive = bool(getattr(speculative, "enable_adaptive_verification", False))
    return HostSpeculator(adapter, device, adaptive)


def _wrap() -> None:
    GPUModelRunner.add_requests = followed(GPUModelRunner.add_requests)
    GPUModelRunner.postprocess_sampled = sampled(GPUModelRunner.postprocess_sampled)
    GPUModelRunner.take_draft_token_ids = taken(GPUModelRunner.take_draft_token_ids)
    RejectionSampler.__call__ = shown(RejectionSampler.__call__)


def followed(add_requests: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_requests``, with which every step begins, so that speculators learn of it."""

    @functools.wraps(add_requests)
    def wrapper(self: Any, scheduler_output: Any) -> Any:
        result = add_requests(self, scheduler_output)
        if (ours := _of(self)) is not None:
            self.rejection_sampler.specplug = ours  # it is made after the speculator
            ours.follow(self.req_states, scheduler_output)
        return result

    return wrapper


def sampled(postprocess_sampled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``postprocess_sampled``, which alone gets the sampled tokens."""

    @functools.wraps(postprocess_sampled)
    def wrapper(self: Any, idx_mapping: Any, sampled_tokens: Any, *more: Any, **named: Any) -> Any:
        if (ours := _of(self)) is not None:
            ours.sampled_token_ids = sampled_tokens
        return postprocess_sampled(self, idx_mapping, sampled_tokens, *more, **named)

    return wrapper


def taken(take_draft_token_ids: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``take_draft_token_ids``: the scheduler gets each request's real draft.

    vLLM tells it of K tokens for every request, whatever was drafted, and verifies as many.
    """

    @functools.wraps(take_draft_token_ids)
    def wrapper(self: Any) -> Any:
        result = take_draft_token_ids(self)
        ours = _of(self)
        if result is None or ours is None:
            return result
        drafts = ours.drafts_of(result.req_ids)
        return result if drafts is None else type(result)(result.req_ids, drafts)

    return wrapper


def shown(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the rejection sampler's call: show speculators the target's logits."""

    @functools.wraps(sample)
    def wrapper(self: Any, logits: Any, input_batch: Any, *more: Any, **named: Any) -> Any:
        ours = getattr(self, "specplug", None)
        if ours is not None:
            # Before sampling, which may change the logits in place.
            ours.look_at(logits, input_batch)
        return sample(self, logits, input_batch, *more, **named)

    return wrapper


def _of(runner: Any) -> Speculator | None:
    ours = getattr(runner, "speculator", None)
    return ours if isinstance(ours, Speculator) else None
