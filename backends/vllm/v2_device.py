"""A speculator of vLLM's V2 model runner whose proposer works on the device.

Nothing that a step needs is copied to the host. How much was accepted is read two steps later, when
vLLM itself has had it for long, so that reading does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specplug.backends.vllm.adapter import Adapter
from specplug.backends.vllm.ranks import RankCheck
from specplug.backends.vllm.v2_base import Speculator, host_buffer
from specplug.proposer import DeviceBatch, Drafts

_STEPS_IN_FLIGHT = 2


class DeviceSpeculator(Speculator):
    """A :class:`~specplug.proposer.DeviceProposer`.

    Args:
        adapter: the proposer's runtime, guarded.
        device: where the tokens are and the drafts have to be.
    """

    def __init__(self, adapter: Adapter, device: Any) -> None:
        super().__init__(adapter, device)
        # Of each step: when its copy is done, tokens sampled, draft tokens verified.
        self._uncounted: deque[tuple[Any, Any, Sequence[int | None]]] = deque()

    def _drafted(self, input_batch: Any, num_sampled: Any, most: int | None) -> Any:
        drafts = (
            None if most == 0 else self._adapter.guarded(self._propose, input_batch, num_sampled)
        )
        if (ranks := self._adapter.ranks) is not None:
            drafts = self._agreed(ranks, input_batch.req_ids, drafts)
        last = self._states.last_sampled_tokens.reshape(-1)[input_batch.idx_mapping.long()]
        # A valid token even where there is no draft: anything else would crash the embedding.
        filler = last.unsqueeze(1).expand(-1, self._k)
        if drafts is None:
            return filler.clone()
        vocab_size = self._adapter.runtime.engine.vocab_size
        return torch.where((drafts >= 0) & (drafts < vocab_size), drafts, filler)

    def _propose(self, input_batch: Any, num_sampled: Any) -> Any:
        runtime, request_ids = self._adapter.runtime, input_batch.req_ids
        limits = runtime.limits(request_ids)
        self._count(request_ids, num_sampled, limits)
        rows = input_batch.idx_mapping.long()
        drafts = runtime.step_on_device(
            DeviceBatch(
                request_ids=request_ids,
                token_ids=self._states.all_token_ids.gpu,
                rows=rows,
                num_tokens=self._states.total_len.gpu[rows],
                num_sampled=num_sampled,
                max_draft_tokens=self._k,
            )
        )
        if drafts is None or min(limits) == self._k:
            return drafts
        unwanted = np.arange(self._k) >= np.array(limits)[:, None]
        mask = torch.from_numpy(unwanted).to(drafts.device, non_blocking=True)
        return drafts.masked_fill(mask, -1)

    def _count(self, request_ids: Sequence[str], num_sampled: Any, limits: Sequence[int]) -> None:
        """Count what was accepted two steps ago, and note what to read of this one."""
        counts = host_buffer(len(request_ids), dtype=torch.int32)
        counts.copy_(num_sampled, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record()
        # None during prefill, which verifies nothing.
        verified = [
            min(limit, len(self._scheduled[request_id])) if request_id in self._scheduled else None
            for request_id, limit in zip(request_ids, limits, strict=True)
        ]
        self._uncounted.append((copied, counts, verified))
        if len(self._uncounted) <= _STEPS_IN_FLIGHT:
            return
        copied, counts, earlier = self._uncounted.popleft()
        copied.synchronize()
        for count, drafted in zip(counts.tolist(), earlier, strict=True):
            if count and drafted is not None:
                accepted = min(count - 1, drafted)
                self._adapter.runtime.counters.count_verified(drafted, accepted)

    def _agreed(self, ranks: RankCheck, request_ids: Sequence[str], drafts: Any) -> Any:
        """Compare the drafts among ranks; the one thing here that waits."""
        rows = Drafts.empty(len(request_ids))
        if drafts is not None:
            lengths = np.full(len(request_ids), self._k, np.int32)
            rows = Drafts(drafts.cpu().numpy(), lengths)
        return drafts if ranks.agreed(request_ids, rows) is rows else None
