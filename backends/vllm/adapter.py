"""What both model runners of vLLM share: making the runtime, arrivals, and the last guard."""

from __future__ import annotations

import functools
import logging
from typing import Any

from specplug.backends.vllm.compat import RELEASES
from specplug.backends.vllm.ranks import RankCheck
from specplug.backends.vllm.settings import VllmSettings
from specplug.config import checked_k, validate
from specplug.errors import OptionError
from specplug.guard import Guard
from specplug.proposer import Capability, EngineInfo
from specplug.runtime import Arrival, Runtime

SECTION = "specplug"
"""The key of specplug's settings in ``--additional-config``."""
FLAG_MODULE = "specplug.vllm."
"""What the ``model`` of a ``--speculative-config`` begins with that selects specplug."""
_STEPS_PER_SHARING = 32
PROVIDES = frozenset({Capability.REQUEST_OPTIONS, Capability.TARGET_TOKENS})


def selected(vllm_config: Any) -> str | None:
    """Return the name of the proposer that this engine is to use, None if it is not ours."""
    speculative = vllm_config.speculative_config
    model = getattr(speculative, "model", None) or ""
    if getattr(speculative, "method", None) == "custom_class" and model.startswith(FLAG_MODULE):
        return str(model.removeprefix(FLAG_MODULE))
    return None


def settings_of(vllm_config: Any) -> VllmSettings:
    """Return the user's settings.

    Raises:
        OptionError: naming every wrong option.
    """
    return validate(
        VllmSettings,
        (vllm_config.additional_config or {}).get(SECTION, {}),
        f"the '{SECTION}' section of --additional-config",
    )


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse what could only fail later, in other words.

    Raises:
        OptionError: the engine is pipeline-parallel.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise OptionError(
            f"pipeline_parallel_size is {stages}; specplug works with 1 only.",
            hint="Use tensor or data parallelism, or leave speculation off.",
        )


def check_release(vllm_config: Any) -> None:
    """Refuse releases of vLLM that specplug does not know, unless the user wants to try.

    Raises:
        EngineSupportError: naming the version found and the range.
    """
    import vllm

    allow_untested = settings_of(vllm_config).allow_untested_engine
    RELEASES.check(vllm.__version__, allow_untested=allow_untested)


class Adapter:
    """One proposer in one worker: the runtime, and a guard that keeps the engine alive.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        proposer: the proposer's name.
        provides: what the model runner can give.

    Raises:
        SpecplugError: the name, a setting or an option is wrong.
    """

    def __init__(
        self, vllm_config: Any, proposer: str, provides: frozenset[Capability] = PROVIDES
    ) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        _share_log_handlers()
        refuse_unsupported(vllm_config)
        settings = settings_of(vllm_config)
        engine = engine_info(vllm_config, provides, get_tensor_model_parallel_rank())
        self.runtime = Runtime(proposer, engine, settings)
        self.ranks = RankCheck.make(self.runtime.engine.world_size, settings)
        self.guarded = Guard("vLLM")
        self._steps = 0

    def share_costs(self) -> None:
        """Let all tensor-parallel ranks decide by what rank 0 has measured.

        Every rank must call this in every step: now and then it is a collective.
        """
        if self.runtime.engine.world_size == 1:
            return
        self._steps += 1
        if self._steps % _STEPS_PER_SHARING == 0:
            from vllm.distributed import get_tp_group

            costs = self.runtime.length.costs
            costs.adopt(get_tp_group().broadcast_object(costs.learnt(), src=0))


def arrival(
    request_id: str, prompt_token_ids: Any, sampling: Any, max_model_len: int
) -> Arrival | None:
    """Describe a new request; None for those that nothing can be drafted for.

    Args:
        request_id: vLLM's id.
        prompt_token_ids: the prompt, None if it is embeddings.
        sampling: its ``SamplingParams``, None for pooling.
        max_model_len: the engine's limit.
    """
    if sampling is None or prompt_token_ids is None:
        return None
    stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None}
    prompt_len = len(prompt_token_ids)
    most = max_model_len if sampling.max_tokens is None else prompt_len + sampling.max_tokens
    return Arrival(
        id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_num_tokens=min(most, max_model_len),
        stop_token_ids=frozenset(stops),
        min_output_tokens=sampling.min_tokens,
        arguments=sampling.extra_args,
    )


def engine_info(vllm_config: Any, provides: frozenset[Capability], rank: int) -> EngineInfo:
    """Describe the engine to its proposer.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        provides: what the model runner can give.
        rank: the worker's tensor-parallel rank.

    Raises:
        OptionError: K is wrong.
    """
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    k = checked_k(
        vllm_config.speculative_config.num_speculative_tokens,
        min(MAX_SPEC_LEN, model.max_model_len - 1),
        f"vLLM verifies at most {MAX_SPEC_LEN} draft tokens per request, and the model's length "
        f"is {model.max_model_len}.",
    )
    return EngineInfo(
        backend="vllm",
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_speculative_tokens=k,
        device=str(vllm_config.device_config.device),
        rank=rank,
        world_size=parallel.tensor_parallel_size,
        replica=parallel.data_parallel_index,  # its rank is 0 in all replicas of a dense model
        model_name=model.served_model_name,
        provides=provides,
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
