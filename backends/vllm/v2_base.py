"""What speculators of vLLM's V2 model runner share: requests, and what vLLM expects of one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from specplug.backends.vllm.adapter import Adapter, arrival


class Speculator(BaseSpeculator):  # type: ignore[misc]
    """One proposer in one worker of the V2 model runner.

    Args:
        adapter: the proposer's runtime, guarded.
        device: where the drafts have to be.

    Attributes:
        sampled_token_ids: int64 ``[num_reqs, 1 to K + 1]`` on the device; the tokens of this step.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, adapter: Adapter, device: Any) -> None:
        self._adapter = adapter
        engine = adapter.runtime.engine
        self._k = engine.num_speculative_tokens
        self._on_device = torch.zeros(
            engine.max_num_seqs, self._k, dtype=torch.int64, device=device
        )
        self.sampled_token_ids: Any = None
        self._states: Any = None
        self._scheduled: dict[str, list[int]] = {}
        self._preempted: set[str] = set()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to capture."""

    def capture(self, *_: Any) -> None:
        """Nothing to capture."""

    def drafts_of(self, request_ids: list[str]) -> list[list[int]] | None:
        """Return the latest draft of each request; None if they are not on the host."""
        return None

    def look_at(self, logits: Any, input_batch: Any) -> None:
        """See the target's logits, before sampling.

        Args:
            logits: float ``[num_logits, vocab_size]``: for each request its drafted positions
                and the one behind them.
            input_batch: vLLM's ``InputBatch``.
        """

    def follow(self, states: Any, scheduler_output: Any) -> None:
        """Learn, at the start of a step, which requests end, which begin, what is verified.

        Args:
            states: the runner's ``RequestState``.
            scheduler_output: vLLM's ``SchedulerOutput``.
        """
        self._adapter.guarded(self._follow, states, scheduler_output)

    def _follow(self, states: Any, scheduler_output: Any) -> None:
        self._states = states
        self._scheduled = scheduler_output.scheduled_spec_decode_tokens
        # It is a set, whose order differs between ranks.
        for request_id in sorted(scheduler_output.finished_req_ids):
            self._adapter.runtime.end(request_id)
            self._preempted.discard(request_id)
            self._left(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            self._preempted.add(request_id)
            self._left(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            resumed = new.req_id in self._preempted
            self._preempted.discard(new.req_id)
            self._came(new)
            if not resumed:
                self._begin(new)

    def _begin(self, new: Any) -> None:
        request = arrival(
            new.req_id,
            new.prompt_token_ids,
            new.sampling_params,
            self._adapter.runtime.engine.max_model_len,
        )
        if request is not None:
            self._adapter.runtime.begin(request)

    def _came(self, new: Any) -> None:
        """Meet a request in its row: a new one, or one that goes on after preemption."""

    def _left(self, request_id: str) -> None:
        """Forget where a request was: it has ended or is preempted."""

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        *_: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> Any:
        """Return the drafts of a step; called by vLLM after sampling.

        Args:
            input_batch: the batch: ``req_ids``, ``idx_mapping``, its rows.
            attn_metadata: unused, as are the slot mappings and hidden states.
            slot_mappings: unused.
            last_hidden_states: unused.
            aux_hidden_states: unused.
            num_sampled: int32 ``[num_reqs]`` on the device; 0 while a prompt is prefilled.
            dummy_run: whether this is a rehearsal without requests.
            num_speculative_tokens: the most that the next step takes, if less than K.

        Returns:
            int64 ``[num_reqs, K]`` on the device. Slots without a draft hold a valid token.
        """
        if dummy_run:
            return self._on_device[: input_batch.num_reqs]
        return self._drafted(input_batch, num_sampled, num_speculative_tokens)

    @abstractmethod
    def _drafted(self, input_batch: Any, num_sampled: Any, most: int | None) -> Any: ...


def host_buffer(*shape: int, dtype: Any = torch.int64) -> Any:
    """Return zeros on the host that a device can copy from and to without waiting."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=is_pin_memory_available())
