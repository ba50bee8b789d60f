"""The drafter that vLLM's V1 model runner builds: translates its steps for the runtime.

vLLM calls ``propose`` without request ids, sampling parameters, or word of requests that begin
and end. The runner knows all of it, and ``wraps`` brings it here as :meth:`Drafter.follow`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from specplug.backends.vllm import wraps
from specplug.config import Settings, validate
from specplug.errors import OptionError
from specplug.plugins import PluginManager
from specplug.proposer import Capability, EngineInfo, Int32Array
from specplug.runtime import Arrival, Runtime, Step

logger = logging.getLogger(__name__)

SECTION = "specplug"
"""The key of specplug's settings in ``--additional-config``."""
PROVIDES = frozenset({Capability.REQUEST_OPTIONS, Capability.TARGET_TOKENS})


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
        _share_log_handlers()
        settings = validate(
            Settings,
            (vllm_config.additional_config or {}).get(SECTION, {}),
            f"the '{SECTION}' section of --additional-config",
        )
        wraps.install(Drafter, vllm_config, allow_untested=settings.allow_untested_engine)
        self._runtime = Runtime(self.proposer_name, _engine_info(vllm_config), settings)
        self._runner: Any = None
        self._scheduled: Any = None
        self._target_token_ids: dict[str, list[int]] | None = None
        self._gave_up = False

    def load_model(self, target_model: Any) -> None:
        """Nothing to load: what a proposer needs, it got in ``prepare``."""

    def follow(self, runner: Any, scheduler_output: Any) -> None:
        """Learn, at the start of a step, which requests end, which begin, what is verified."""
        if not self._gave_up:
            try:
                self._follow(runner, scheduler_output)
            except Exception:
                self._give_up()

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
            self._runtime.end(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            arrival = _arrival(runner.requests[new.req_id], runner.max_model_len)
            if arrival is not None:
                self._runtime.begin(arrival)

    def look_at(self, logits: Any, num_draft_tokens: list[int]) -> None:
        """Learn the target's own tokens, if the proposer uses them: the logits' arg max.

        Penalties and the like are not applied to them, and sampling may choose others.

        Args:
            logits: float ``[sum(num_draft_tokens) + num_reqs, vocab_size]``: for each request
                its drafted positions and the one behind them.
            num_draft_tokens: ``[num_reqs]``, in the order of the runner's batch.
        """
        if self._gave_up or not self._runtime.uses(Capability.TARGET_TOKENS):
            return
        try:
            tokens = iter(logits.argmax(dim=-1).tolist())
            self._target_token_ids = {
                request_id: list(islice(tokens, count + 1))
                for request_id, count in zip(
                    self._runner.input_batch.req_ids, num_draft_tokens, strict=True
                )
            }
        except Exception:
            self._give_up()

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
        if not self._gave_up:
            try:
                return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                self._give_up()
        return [[] for _ in sampled_token_ids]

    def _give_up(self) -> None:
        """Serve on without drafts: vLLM does not guard these calls, so an error ends its engine."""
        self._gave_up = True
        logger.exception("specplug failed and drafts no more; please report this. vLLM goes on.")

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Int32Array,
    ) -> list[list[int]]:
        num_rows = len(sampled_token_ids)
        verified = _verified(self._scheduled.scheduled_spec_decode_tokens)
        targets = self._target_token_ids
        drafts = self._runtime.step(
            Step(
                request_ids=self._runner.input_batch.req_ids,
                token_ids=token_ids_cpu,
                rows=np.arange(num_rows, dtype=np.int32),
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
        return drafts.to_lists()


def _verified(scheduled: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Drop the -1s with which vLLM, from 0.26 on, pads requests: nobody drafted them."""
    return {request_id: draft for request_id, draft in scheduled.items() if draft[0] >= 0}


def _arrival(request: Any, max_model_len: int) -> Arrival | None:
    """Describe a new request; None for those that nothing can be drafted for."""
    sampling = request.sampling_params
    if sampling is None or request.prompt_token_ids is None:
        return None  # pooling, or a prompt that is embeddings
    stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None}
    prompt = request.prompt_token_ids
    most = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    return Arrival(
        id=request.req_id,
        prompt_token_ids=prompt,
        max_num_tokens=min(most, max_model_len),
        stop_token_ids=frozenset(stops),
        min_output_tokens=sampling.min_tokens,
        arguments=sampling.extra_args,
    )


def _engine_info(vllm_config: Any) -> EngineInfo:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    k = vllm_config.speculative_config.num_speculative_tokens
    most = min(MAX_SPEC_LEN, model.max_model_len - 1)
    if not 1 <= k <= most:
        raise OptionError(
            f"num_speculative_tokens is {k}; it must be from 1 to {most}.",
            hint=f"vLLM verifies at most {MAX_SPEC_LEN} draft tokens per request, and the "
            f"model's length is {model.max_model_len}.",
        )
    return EngineInfo(
        backend="vllm",
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_speculative_tokens=k,
        device=str(vllm_config.device_config.device),
        rank=get_tensor_model_parallel_rank(),
        world_size=parallel.tensor_parallel_size,
        provides=PROVIDES,
        load_tokenizer=functools.partial(_load_tokenizer, model),
    )


def _load_tokenizer(model_config: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )


def _share_log_handlers() -> None:
    """Log where vLLM logs: its workers configure no logger but their own."""
    root, theirs = logging.getLogger(), logging.getLogger("vllm")
    ours = logging.getLogger("specplug")
    if theirs.handlers and not (ours.handlers or root.handlers):
        ours.handlers, ours.level = list(theirs.handlers), theirs.getEffectiveLevel()
        ours.propagate = False
