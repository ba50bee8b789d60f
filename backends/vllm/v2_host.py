"""A speculator of vLLM's V2 model runner that drafts on the host.

It waits for the tokens just sampled, the only ones that are copied: prompts arrive on the host
anyway, and the speculator keeps its own matrix of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specplug.backends.vllm.adapter import Adapter
from specplug.backends.vllm.v2_base import Speculator, host_buffer
from specplug.proposer import Capability, Drafts
from specplug.runtime import Step


class HostSpeculator(Speculator):
    """A proposer that works on the host.

    Args:
        adapter: the proposer's runtime, guarded.
        device: where the drafts have to be.
        adaptive_verification: whether the user switched that on.

    Attributes:
        draft_token_confidence_probs: float32 ``[max_num_seqs, K]`` on the device, in the order of
            the batch: for vLLM's adaptive verification, which verifies the likeliest slots only.
        enable_adaptive_verification: whether vLLM may do that.
    """

    def __init__(self, adapter: Adapter, device: Any, adaptive_verification: bool) -> None:
        super().__init__(adapter, device)
        engine, k = adapter.runtime.engine, self._k
        most = engine.max_num_seqs
        self._drafts: dict[str, list[int]] = {}
        self._structured: set[str] = set()
        self._targets: Any = None
        # With async scheduling a request may run past its end by one step.
        self._token_ids = np.zeros((most, engine.max_model_len + k + 1), np.int32)
        self._num_tokens = np.zeros(most, np.int32)
        self.enable_adaptive_verification = adaptive_verification
        self.draft_token_confidence_probs = torch.zeros(most, k, device=device)
        self._confidence_buffer = host_buffer(most, k, dtype=torch.float32)
        self._draft_buffer = host_buffer(most, k)
        self._sampled_buffer = host_buffer(most, k + 1)
        self._count_buffer = host_buffer(most, dtype=torch.int32)
        self._target_buffer = host_buffer(most * (k + 1))
        # Sleeps instead of spinning on the driver's lock.
        self._copied = torch.cuda.Event(blocking=True)

    def drafts_of(self, request_ids: list[str]) -> list[list[int]]:
        """Return the latest draft of each request."""
        return [self._drafts.get(request_id, []) for request_id in request_ids]

    def _follow(self, states: Any, scheduler_output: Any) -> None:
        self._targets = None
        self._structured.difference_update(scheduler_output.finished_req_ids)
        super()._follow(states, scheduler_output)

    def _begin(self, new: Any) -> None:
        if getattr(new.sampling_params, "structured_outputs", None) is not None:
            self._structured.add(new.req_id)
        super()._begin(new)

    def _came(self, new: Any) -> None:
        self._drafts.pop(new.req_id, None)
        tokens = new.prefill_token_ids
        row = self._states.req_id_to_index[new.req_id]
        self._token_ids[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)

    def _left(self, request_id: str) -> None:
        self._drafts.pop(request_id, None)

    def look_at(self, logits: Any, input_batch: Any) -> None:
        """Learn the target's own tokens, if the proposer uses them: the logits' arg max.

        Penalties and the like are not applied to them, and sampling may choose others.
        """
        if self._adapter.runtime.uses(Capability.TARGET_TOKENS):
            self._adapter.guarded(self._look_at, logits, input_batch)

    def _look_at(self, logits: Any, input_batch: Any) -> None:
        bounds = input_batch.cu_num_logits_np
        if len(logits) != bounds[-1]:
            return  # this rank samples a part of the batch only
        self._targets = self._target_buffer[: len(logits)]
        self._targets.copy_(logits.argmax(dim=-1), non_blocking=True)

    def _drafted(self, input_batch: Any, num_sampled: Any, most: int | None) -> Any:
        drafts = self._adapter.guarded(self._propose, input_batch, num_sampled, most)
        if drafts is None:
            drafts = Drafts.empty(input_batch.num_reqs)
        self._adapter.share_costs()
        if self._adapter.ranks:
            drafts = self._adapter.ranks.agreed(input_batch.req_ids, drafts)
        self._drafts.update(zip(input_batch.req_ids, drafts.to_lists(), strict=True))
        return self._to_device(drafts, input_batch.idx_mapping_np)

    def _propose(self, input_batch: Any, num_sampled: Any, most: int | None) -> Drafts:
        counts = self._take_in(input_batch, num_sampled)
        rows = np.asarray(input_batch.idx_mapping_np, np.int32)
        verified = {
            request_id: draft
            for request_id, slots in self._scheduled.items()
            if (draft := self._verified(request_id, slots))
        }
        return self._adapter.runtime.step(
            Step(
                request_ids=input_batch.req_ids,
                token_ids=self._token_ids,
                rows=rows,
                num_tokens=self._num_tokens[rows].tolist(),
                sampled=(counts > 0).tolist(),
                verified=verified,
                target_token_ids=self._target_token_ids(input_batch, verified),
                num_speculative_tokens=most,
            )
        )

    def _verified(self, request_id: str, slots: list[int]) -> list[int]:
        """Return what was verified of a request's draft: what the scheduler had room for.

        It knows tokens where a grammar checks them (-1 for what it refused), else only how many.
        """
        draft = self._drafts.get(request_id, [])
        if request_id in self._structured:
            return draft[: sum(token >= 0 for token in slots)]
        return draft[: len(slots)]

    def _take_in(self, input_batch: Any, num_sampled: Any) -> Any:
        """Append the tokens just sampled to the matrix; return how many each request got."""
        num_reqs, width = self.sampled_token_ids.shape
        tokens = self._sampled_buffer[:num_reqs, :width]
        tokens.copy_(self.sampled_token_ids, non_blocking=True)
        self._count_buffer[:num_reqs].copy_(num_sampled, non_blocking=True)
        # Behind everything on this stream: the drafts of the last step have been copied too,
        # and their buffer may be filled again.
        self._copied.record()
        self._copied.synchronize()
        sampled, counts = tokens.numpy(), self._count_buffer[:num_reqs].numpy()
        for i, row in enumerate(input_batch.idx_mapping_np):
            begin = self._num_tokens[row]
            end = min(begin + counts[i], self._token_ids.shape[1])
            self._token_ids[row, begin:end] = sampled[i, : end - begin]
            self._num_tokens[row] = end
        return counts

    def _target_token_ids(
        self, input_batch: Any, verified: dict[str, list[int]]
    ) -> dict[str, list[int]] | None:
        if self._targets is None:
            return None
        tokens, bounds = self._targets.tolist(), input_batch.cu_num_logits_np.tolist()
        return {
            # Slots behind a draft were verified too, but nobody drafted them.
            request_id: tokens[bounds[i] : bounds[i + 1]][: len(verified[request_id]) + 1]
            for i, request_id in enumerate(input_batch.req_ids)
            if request_id in verified
        }

    def _to_device(self, drafts: Drafts, rows: Sequence[int]) -> Any:
        num_reqs, width = drafts.token_ids.shape
        filled = self._draft_buffer[:num_reqs].numpy()
        # The last token, as vLLM's own n-gram does: -1 would crash the embedding.
        last = np.maximum(self._num_tokens[rows] - 1, 0)
        filled[:] = self._token_ids[rows, last][:, None]
        drafted = np.arange(width) < drafts.lengths[:, None]
        filled[:, :width][drafted] = drafts.token_ids[drafted]
        if self.enable_adaptive_verification:
            self._give_confidences(drafted)
        on_device = self._on_device[:num_reqs]
        on_device.copy_(self._draft_buffer[:num_reqs], non_blocking=True)
        return on_device

    def _give_confidences(self, drafted: Any) -> None:
        """Say how likely each slot is accepted: as measured, and not at all if it is empty."""
        num_reqs, width = drafted.shape
        confidences = self._confidence_buffer[:num_reqs]
        rates = self._adapter.runtime.counters.acceptance_rates()
        confidences.zero_()
        confidences.numpy()[:, :width] = np.where(drafted, rates[:width], 0.0)
        self.draft_token_confidence_probs[:num_reqs].copy_(confidences, non_blocking=True)
