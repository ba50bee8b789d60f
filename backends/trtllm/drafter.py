"""The two objects that TensorRT-LLM's executor drives; imported only where the engine is.

Written for ``tensorrt_llm._torch.speculative.drafter.Drafter`` of 1.0 to 1.3.
"""

from __future__ import annotations

import time
from typing import Any

from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm._torch.speculative.drafter import Drafter

from specplug.backends.trtllm.adapter import Adapter

EXECUTOR_PADS = hasattr(Drafter, "pad_draft_tokens_for_cuda_graph")
"""From 1.1 on. Before, each drafter fills its drafts up to the length that CUDA graphs have."""


class SpecplugDrafter(Drafter):  # type: ignore[misc]  # the engine has no types here
    """Puts drafts on the executor's requests, between scheduling and the forward pass.

    Attributes:
        last_draft_latency_ms: of the latest call; the engine's statistics read it.
    """

    # The sampler takes back as many KV tokens as were padded to: they must have been allocated.
    _needs_padding_kv_extension = True

    def __init__(self, adapter: Adapter) -> None:
        k = adapter.num_speculative_tokens
        try:
            super().__init__(max_draft_len=k, max_total_draft_tokens=k)
        except TypeError:  # before 1.2
            super().__init__()
        # The executor reads all of these; which the constructor set depends on the release.
        self.max_draft_len = self.max_total_draft_tokens = self._static_max_total_draft_tokens = k
        # Once speculation toggles, requests lose their draft pages.
        self.max_concurrency = self.draft_len_schedule = None
        self.adapter = adapter
        self.last_draft_latency_ms = 0.0

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Replace each request's ``py_draft_tokens``, which scheduling set to zeros, by a draft.

        Zeros would be verified like any draft. Dummy requests keep theirs: CUDA graphs are
        recorded with them.
        """
        started = time.perf_counter()
        requests = scheduled_requests.generation_requests
        drafts = self.adapter.draft(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if request.is_dummy:
                request.py_draft_tokens = list(request.py_draft_tokens or ())
            else:
                request.py_draft_tokens = draft if EXECUTOR_PADS else padded(draft, request)
        self.last_draft_latency_ms = (time.perf_counter() - started) * 1e3


def padded(draft: list[int], request: Any) -> list[int]:
    """Fill a draft that is not empty up to the tokens that memory was allocated for."""
    if draft:
        filler = max(0, request.py_end_id or 0)
        draft.extend([filler] * (request.py_draft_pages_allocated - len(draft)))
    return draft


class SpecplugResourceManager(BaseResourceManager):  # type: ignore[misc]
    """Holds nothing: the executor tells it, and no drafter, that requests end."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def free_resources(self, request: Any) -> None:
        """Forget a request: finished, aborted or evicted."""
        self.adapter.free(request)

    def shutdown(self) -> None:
        """Forget all; while it estimates its memory, the engine makes a second executor."""
        self.adapter.close()

    def get_max_resource_count(self) -> int:
        """Limit nothing."""
        return 2**31 - 1

    def get_needed_resource_to_completion(self, request: Any) -> int:
        """Need nothing."""
        return 0

    def prepare_resources(self, scheduled_batch: Any) -> None:
        """Nothing to prepare."""

    def update_resources(self, scheduled_batch: Any) -> None:
        """Nothing to update."""

    def add_dummy_requests(self, request_ids: list[int]) -> None:
        """Nothing is kept of dummy requests."""
