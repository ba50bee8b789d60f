"""One proposer in one worker of TensorRT-LLM: requests in, drafts out, ends seen.

Nothing of the engine is imported here: its objects are only read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specplug.backends.trtllm.pickling import refuse_to_stay
from specplug.backends.trtllm.tokens import BEAM, TokenTable
from specplug.config import Settings
from specplug.guard import Guard
from specplug.metrics import Counters
from specplug.plugins import PluginManager
from specplug.proposer import Capability, EngineInfo
from specplug.runtime import Arrival, Runtime, Step

logger = logging.getLogger(__name__)

PROVIDES: frozenset[Capability] = frozenset()
"""The engine has no free-form request arguments, and shows only tokens that it keeps."""
_COMPLETE = "GENERATION_COMPLETE"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What the ``LLM`` was asked for, as far as proposers need it.

    Attributes:
        model: the checkpoint's folder or name.
        tokenizer: the tokenizer's, where it is another.
        trust_remote_code: whether code of theirs may be run.
        vocab_size: the model's.
        max_seq_len: the longest sequence in tokens.
        max_batch_size: the most requests in one batch.
        tensor_parallel_size: the number of ranks.
    """

    model: str
    tokenizer: str
    trust_remote_code: bool
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    tensor_parallel_size: int


class Adapter:
    """A proposer by name until the first step in a worker, then its runtime.

    The drafter and the resource manager share one; it is pickled with both, once for every rank,
    and carries only what was asked for.

    Args:
        name: the proposer's name.
        num_speculative_tokens: K.
        settings: the user's.
        plugin: where the name is registered by hand: what to register.

    Attributes:
        deployment: None until the ``LLM`` is made.
    """

    def __init__(
        self, name: str, num_speculative_tokens: int, settings: Settings, plugin: Any = None
    ) -> None:
        self.name = name
        self.num_speculative_tokens = num_speculative_tokens
        self.settings = settings
        self.plugin = plugin
        self.deployment: Deployment | None = None
        self._counted = Counters()
        self._start_afresh()

    @property
    def counters(self) -> Counters:
        """What is counted in this process, also after the executor was shut down."""
        return self._runtime.counters if self._runtime else self._counted

    def _start_afresh(self) -> None:
        self._runtime: Runtime | None = None
        self._tokens = TokenTable()
        self._drafted: dict[str, list[int]] = {}
        self._guarded = Guard("TensorRT-LLM")

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to the workers.

        Raises:
            PluginError: a part of it would not be found there.
        """
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        refuse_to_stay(self.plugin, f"The proposer '{self.name}'")
        refuse_to_stay(self.settings.options, f"An option of the proposer '{self.name}'")
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._counted = Counters()
        self._start_afresh()

    def draft(self, requests: Sequence[Any]) -> list[list[int]]:
        """Return a draft for each of the executor's generation requests, empty where there is none.

        Args:
            requests: ``LlmRequest`` objects, in the executor's order.
        """
        return self._guarded(self._draft, requests) or [[] for _ in requests]

    def free(self, request: Any) -> None:
        """Take in what a request ended with and forget it: finished, aborted or evicted."""
        self._guarded(self._free, request)

    def close(self) -> None:
        """Forget everything; the executor that comes next starts anew."""
        if self._runtime is not None:
            self._counted = self._runtime.counters
            self._guarded(self._runtime.close)
        self._start_afresh()

    @property
    def runtime(self) -> Runtime:
        """The proposer's runtime, made at its first use.

        Raises:
            SpecplugError: the name, a setting or an option is wrong.
        """
        if self._runtime is None:
            self._runtime = Runtime(self.name, self.engine_info(), self.settings, self.plugins())
        return self._runtime

    def plugins(self) -> PluginManager:
        """Return what is installed, and what was registered by hand."""
        plugins = PluginManager()
        if self.plugin is not None:
            plugins.add(self.plugin)
        return plugins

    def _draft(self, requests: Sequence[Any]) -> list[list[int]]:
        served = [i for i, request in enumerate(requests) if can_use_a_draft(request)]
        proposed = self._step([requests[i] for i in served])
        drafts: list[list[int]] = [[] for _ in requests]
        for i, draft in zip(served, proposed, strict=True):
            request = requests[i]
            drafts[i] = draft[: room(request)]
            # A copy: the executor pads its own in place.
            self._drafted[str(request.py_request_id)] = list(drafts[i])
        return drafts

    def _step(self, requests: Sequence[Any], most: int | None = None) -> list[list[int]]:
        """Bring requests up to date, and draft at most ``most`` tokens for each, K if None."""
        ids = [str(request.py_request_id) for request in requests]
        lengths = [self._follow(*pair) for pair in zip(ids, requests, strict=True)]
        step = Step(
            request_ids=ids,
            token_ids=self._tokens.token_ids,
            rows=np.array([self._tokens.row(id_) for id_ in ids], np.int32),
            num_tokens=lengths,
            sampled=[True] * len(ids),
            verified={id_: self._drafted.pop(id_) for id_ in ids if id_ in self._drafted},
            num_speculative_tokens=most,
        )
        return self.runtime.step(step).to_lists()

    def _follow(self, request_id: str, request: Any) -> int:
        length = self._tokens.follow(request_id, request)
        if not self.runtime.knows(request_id):
            row = self._tokens.row(request_id)
            prompt = self._tokens.token_ids[row, : request.py_orig_prompt_len].tolist()
            self.runtime.begin(arrival(request_id, prompt, request))
        return length

    def _free(self, request: Any) -> None:
        request_id = str(request.py_request_id)
        if self._runtime is not None and self._runtime.knows(request_id):
            self._step([request], most=0)
            self._runtime.end(request_id)
            self._tokens.drop(request_id)

    def engine_info(self) -> EngineInfo:
        """Describe the engine to its proposer."""
        of = self.deployment
        if of is None:
            raise RuntimeError("the speculative config was not given to an LLM")
        return EngineInfo(
            backend="trtllm",
            vocab_size=of.vocab_size,
            max_model_len=of.max_seq_len,
            max_num_seqs=of.max_batch_size,
            num_speculative_tokens=self.num_speculative_tokens,
            device="cuda",
            rank=_rank() % of.tensor_parallel_size,
            world_size=of.tensor_parallel_size,
            model_name=of.model,
            provides=PROVIDES,
            load_tokenizer=functools.partial(_load_tokenizer, of),
        )


def can_use_a_draft(request: Any) -> bool:
    """Return whether the executor verifies a draft of this request in this iteration."""
    return not (
        request.is_dummy
        or getattr(request.state, "name", "") == _COMPLETE
        or request.py_disable_speculative_decoding
        or not request.py_draft_pages_allocated
    )


def room(request: Any) -> int:
    """Return the longest draft that the executor has memory and length for."""
    longest: int = request.py_orig_prompt_len + request.py_max_new_tokens - 2
    length: int = request.get_num_tokens(BEAM)
    pages: int = request.py_draft_pages_allocated
    return max(0, min(longest - length, pages))


def arrival(request_id: str, prompt_token_ids: list[int], request: Any) -> Arrival:
    """Describe a new request."""
    end = request.py_end_id
    return Arrival(
        id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_num_tokens=request.py_orig_prompt_len + request.py_max_new_tokens,
        # The engine sets -1 where the end of sequence is to be ignored.
        stop_token_ids=frozenset(() if end is None or end < 0 else (end,)),
    )


def _rank() -> int:
    try:
        from tensorrt_llm._utils import mpi_rank
    except ImportError:
        return 0
    rank: int = mpi_rank()
    return rank


def _load_tokenizer(of: Deployment) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(of.tokenizer, trust_remote_code=of.trust_remote_code)
