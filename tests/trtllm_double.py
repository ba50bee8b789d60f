"""A double of TensorRT-LLM (docs/explanation/engines.md): modules, ``LLM``, executor.

Six generations, A to F, differ in the drafter's base class, in padding and in request lists. The
rules that a drafter must keep are checked where the engine would go wrong without a word.
"""

from __future__ import annotations

import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

GENERATIONS = "ABCDEF"
VERSIONS = {
    "A": "1.0.0", "B": "1.1.0", "C": "1.2.1", "D": "1.3.0rc9", "E": "1.3.0rc20", "F": "1.3.0"
}  # fmt: skip
VOCAB_SIZE = 24
END = 23


class CorruptedError(AssertionError):
    """A rule is broken that the engine does not check and cannot survive."""


class State(Enum):
    """``LlmRequestState``, as far as drafters meet it."""

    CONTEXT_INIT = auto()
    GENERATION_IN_PROGRESS = auto()
    GENERATION_COMPLETE = auto()


class ToyTarget:
    """A target model whose next token follows from the last two: its text soon repeats."""

    def __init__(self, seed: int = 0, *, ends: bool = True) -> None:
        random = np.random.default_rng(seed)
        self._next = random.integers(0, END + ends, (VOCAB_SIZE, VOCAB_SIZE)).tolist()

    def next_token(self, tokens: list[int]) -> int:
        """Return the greedy token behind these."""
        return self._next[tokens[-2] if len(tokens) > 1 else 0][tokens[-1]]

    def text(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Return what the engine answers without speculation."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            tokens.append(self.next_token(tokens))
            if tokens[-1] == END:
                break
        return tokens[len(prompt) :]


@dataclass(eq=False)
class LlmRequest:
    """The attributes of the engine's request that a drafter may read."""

    py_request_id: int
    tokens: list[int]
    py_max_new_tokens: int
    py_end_id: int | None = END
    py_disable_speculative_decoding: bool = False
    is_dummy: bool = False
    state: State = State.CONTEXT_INIT
    py_draft_tokens: Any = None
    py_draft_pages_allocated: int = 0
    py_num_accepted_draft_tokens: int = 0
    py_draft_logits: Any = None
    py_batch_idx: int | None = None
    num_computed: int = 0
    num_kv_tokens: int = 0
    num_whole_copies: int = 0
    py_orig_prompt_len: int = field(init=False)
    py_prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.py_orig_prompt_len = self.py_prompt_len = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        self.num_whole_copies += 1
        return list(self.tokens)

    def get_num_tokens(self, beam: int) -> int:
        assert beam == 0
        return len(self.tokens)

    def get_token(self, beam: int, position: int) -> int:
        assert beam == 0
        return self.tokens[position]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.py_orig_prompt_len :]


class ScheduledRequests:
    """The batch of an iteration; from E on its lists cannot be changed."""

    def __init__(self, generation: str, context: list[LlmRequest], running: list[LlmRequest]):
        kind = list if generation < "E" else tuple
        self.generation_requests = kind(running)
        if generation < "E":
            self.context_requests = context
        else:
            done = [request.num_computed >= len(request.tokens) for request in context]
            self.context_requests_chunking = tuple(
                request for request, last in zip(context, done, strict=True) if not last
            )
            self.context_requests_last_chunk = tuple(
                request for request, last in zip(context, done, strict=True) if last
            )


# -- modules --------------------------------------------------------------------------------


def _drafter_class(generation: str) -> type:
    class Drafter(ABC):
        @abstractmethod
        def prepare_draft_tokens(self, scheduled_requests, resource_manager=None): ...

    def bare(self, max_concurrency=None):
        self.max_concurrency = max_concurrency

    def whole(
        self, max_draft_len=None, max_total_draft_tokens=None, max_concurrency=None,
        draft_len_schedule=None,
    ):  # fmt: skip
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self._static_max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency, self.draft_len_schedule = max_concurrency, draft_len_schedule

    def pad(self, scheduled_requests, resource_manager=None):
        most = self.max_draft_len if generation == "B" else self._static_max_total_draft_tokens
        for request in scheduled_requests.generation_requests:
            before = request.py_draft_tokens
            request.py_draft_tokens_effective_len = len(before)
            before.extend([0] * (most - len(before)))  # AttributeError for None and tuples

    if generation >= "B":
        Drafter.__init__ = bare if generation == "B" else whole
        Drafter.pad_draft_tokens_for_cuda_graph = pad
    if generation >= "D":
        Drafter._needs_padding_kv_extension = False
    return Drafter


class BaseResourceManager(ABC):
    """The interface of everything that holds something for requests."""

    @abstractmethod
    def get_max_resource_count(self): ...

    @abstractmethod
    def get_needed_resource_to_completion(self, request): ...

    @abstractmethod
    def free_resources(self, request): ...


class UserProvidedDecodingConfig(BaseModel):
    """The engine's config: nothing in it is checked."""

    model_config = ConfigDict(extra="forbid")

    max_draft_len: int | None = None
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    drafter: object
    resource_manager: object = None


class BaseLLM:
    """The engine as its users see it; serves a :class:`ToyTarget`, whatever the model."""

    generation = "A"
    single_process = False

    def __init__(
        self, model, tokenizer=None, tensor_parallel_size=1, trust_remote_code=False, **kwargs: Any
    ):
        self.kwargs = kwargs
        self.target = ToyTarget()
        self._serving = None
        config = kwargs.get("speculative_config")
        if isinstance(config, dict):
            config = UserProvidedDecodingConfig(
                **{key: value for key, value in config.items() if key != "decoding_type"}
            )
        if self.single_process or config is None:
            self.ranks = [config] * tensor_parallel_size
        else:
            self.pickled = pickle.dumps(config)
            self.ranks = [pickle.loads(self.pickled) for _ in range(tensor_parallel_size)]

    def executor(self, rank: int = 0, **options: Any) -> Executor:
        """Return the executor of a rank; the first of two only estimates the memory."""
        estimating = Executor(self.generation, self.target, self.ranks[rank], **options)
        estimating.add([7, 3, 1], 4)
        estimating.run()
        estimating.shutdown()
        return Executor(self.generation, self.target, self.ranks[rank], **options)

    def generate(self, prompts, sampling_params=None):
        """Return one output for each prompt of token ids."""
        executor = self._serving = self._serving or self.executor()
        requests = [
            executor.add(tokenized(prompt), sampling_params.max_tokens) for prompt in prompts
        ]
        executor.run()
        return [
            types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=request.output)])
            for request in requests
        ]

    def shutdown(self):
        """End the executor."""
        if self._serving is not None:
            self._serving.shutdown()


def tokenized(prompt):
    """Return a prompt of text as tokens of the toy vocabulary."""
    return [ord(letter) % END for letter in prompt] if isinstance(prompt, str) else prompt


@dataclass
class SamplingParams:
    """The engine's, as far as the double knows it."""

    max_tokens: int = 32
    temperature: float = 0.0


def install(generation: str, patch: Any) -> types.ModuleType:
    """Put the modules of a generation into ``sys.modules`` for the time of a test."""
    llm = type("LLM", (type("BaseLLM", (BaseLLM,), {"__init__": BaseLLM.__init__}),), {})
    llm.generation = generation
    drafter = _drafter_class(generation)
    contents = {
        "": {"__version__": VERSIONS[generation], "LLM": llm, "SamplingParams": SamplingParams},
        ".llmapi": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig, "LLM": llm},
        ".llmapi.llm": {"BaseLLM": llm.__base__},
        ".llmapi.llm_args": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig},
        "._torch": {},
        "._torch.speculative": {},
        "._torch.speculative.drafter": {"Drafter": drafter},
        "._torch.pyexecutor": {},
        "._torch.pyexecutor.resource_manager": {"BaseResourceManager": BaseResourceManager},
        "._utils": {"mpi_rank": lambda: 0},
    }
    for suffix, names in contents.items():
        module = types.ModuleType(f"tensorrt_llm{suffix}")
        module.__path__ = []
        vars(module).update(names)
        patch.setitem(sys.modules, module.__name__, module)
    # It is bound to the base class of one generation.
    patch.delitem(sys.modules, "specplug.backends.trtllm.drafter", raising=False)
    return sys.modules["tensorrt_llm"]


# -- the executor ---------------------------------------------------------------------------


class Executor:
    """One rank's loop: schedule, preset drafts, prepare, pad, verify, accept, rewind, free.

    Args:
        generation: whose rules.
        target: what verifies.
        config: the speculative config as this rank unpickled it; None for no speculation.
        max_batch_size: how many requests run at a time.
        chunk: how many prompt tokens are computed in an iteration.
        has_pages: whether a request gets memory for drafts in an iteration.
        has_dummies: whether dummy requests fill the batch, as with CUDA graphs.
    """

    def __init__(
        self, generation, target, config, max_batch_size=8, chunk=1 << 20,
        has_pages=lambda request, iteration: True, has_dummies=False,
    ):  # fmt: skip
        self.generation, self.target, self.config = generation, target, config
        self.max_batch_size, self.chunk = max_batch_size, chunk
        self.has_pages, self.has_dummies = has_pages, has_dummies
        self.waiting: deque[LlmRequest] = deque()
        self.running: list[LlmRequest] = []
        self.iteration = 0
        self.num_drafted = self.num_accepted = 0
        self.drafts: dict[int, list[int]] = {}
        self._next_id = 1
        self.drafter = config.drafter if config else None
        self.manager = config.resource_manager if config else None
        if self.drafter is not None:
            self._probe()

    def _probe(self) -> None:
        for name in ("draft_model_engine", "guided_decoder"):
            assert not hasattr(self.drafter, name)
        for name in ("spec_tree_manager", "process_and_save"):
            assert not hasattr(self.manager, name)
        assert self.drafter.max_concurrency is None
        assert self.drafter.draft_len_schedule is None
        assert self.drafter.max_total_draft_tokens == self.config.max_draft_len
        assert self.manager.get_max_resource_count() > 0
        assert self.manager.get_needed_resource_to_completion(None) == 0
        if self.generation >= "D":
            assert self.drafter._needs_padding_kv_extension

    def add(self, prompt, max_new_tokens, *, disagg=False, **attributes) -> LlmRequest:
        """Queue a request; with ``disagg`` another server has computed its prompt."""
        request = LlmRequest(self._next_id, list(prompt), max_new_tokens, **attributes)
        self._next_id += 1
        if disagg:
            request.num_computed = request.num_kv_tokens = len(prompt)
            self._first_token(request)
            self.running.append(request)
        else:
            self.waiting.append(request)
        return request

    def run(self) -> None:
        """Serve until nothing is left."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Run one iteration."""
        self.iteration += 1
        while self.waiting and len(self.running) < self.max_batch_size:
            self.running.append(self.waiting.popleft())
        context = [one for one in self.running if one.state is State.CONTEXT_INIT]
        running = [one for one in self.running if one.state is State.GENERATION_IN_PROGRESS]
        dummies = [self._dummy(i) for i in range(2 * self.has_dummies)]
        if self.drafter is None:
            for request in running:
                self._append(request, self.target.next_token(request.tokens))
        elif running or dummies:
            self._speculate(ScheduledRequests(self.generation, context, running + dummies))
        for request in context:
            self._compute(request)
        for i, request in enumerate(self.running):
            request.py_batch_idx = i
        for request in [one for one in self.running if one.state is State.GENERATION_COMPLETE]:
            self.end(request)

    def end(self, request: LlmRequest) -> None:
        """Free a request: finished, or aborted by its client."""
        self.running.remove(request)
        if self.manager is not None:
            self.manager.free_resources(request)

    def evict(self, request: LlmRequest) -> None:
        """Take a running request's memory; its prompt is now all that it has."""
        self.end(request)
        request.py_prompt_len = len(request.tokens)
        request.num_computed = request.num_kv_tokens = 0
        request.state, request.py_batch_idx = State.CONTEXT_INIT, None
        self.waiting.appendleft(request)

    def shutdown(self) -> None:
        """End this executor; another may follow with the same drafter."""
        if self.manager is not None:
            self.manager.shutdown()

    def _dummy(self, i: int) -> LlmRequest:
        dummy = LlmRequest(10**6 + i, [1], 1, is_dummy=True)
        dummy.state = State.GENERATION_IN_PROGRESS
        return dummy

    def _compute(self, request: LlmRequest) -> None:
        request.num_computed = min(request.num_computed + self.chunk, len(request.tokens))
        if request.num_computed == len(request.tokens):
            request.num_kv_tokens = len(request.tokens)
            self._first_token(request)

    def _first_token(self, request: LlmRequest) -> None:
        request.state = State.GENERATION_IN_PROGRESS
        self._append(request, self.target.next_token(request.tokens))

    def _append(self, request: LlmRequest, token: int) -> bool:
        request.tokens.append(token)
        if token == request.py_end_id or len(request.output) == request.py_max_new_tokens:
            request.state = State.GENERATION_COMPLETE
        return request.state is State.GENERATION_IN_PROGRESS

    def _preset(self, request: LlmRequest) -> None:
        k = self.config.max_draft_len
        on = request.is_dummy or (
            not request.py_disable_speculative_decoding and self.has_pages(request, self.iteration)
        )
        request.py_draft_pages_allocated = k if on else 0
        request.py_draft_tokens = [0] * k if on else (None if self.generation < "C" else [])
        request.num_kv_tokens += 1 + request.py_draft_pages_allocated

    def _speculate(self, scheduled: ScheduledRequests) -> None:
        for request in scheduled.generation_requests:
            self._preset(request)
        self.drafter.prepare_draft_tokens(scheduled, None)
        for request in scheduled.generation_requests:
            self._check(request)
        if self.generation in "BC":
            self.drafter.pad_draft_tokens_for_cuda_graph(scheduled)
        elif self.generation > "C":
            self.drafter.pad_draft_tokens_for_cuda_graph(scheduled, None)
        for request in scheduled.generation_requests:
            if not request.py_draft_pages_allocated:
                request.py_draft_tokens = []  # what was padded has no memory
            if not request.is_dummy:
                self._verify(request)

    def _check(self, request: LlmRequest) -> None:
        """Check what the engine takes on trust."""
        draft, k = request.py_draft_tokens, self.config.max_draft_len
        if type(draft) is not list:
            raise CorruptedError(f"padding needs a list, not {draft!r}")
        if request.is_dummy:
            if len(draft) != k:
                raise CorruptedError("a CUDA graph was recorded with K tokens for each dummy")
            return
        if not all(type(token) is int and 0 <= token < VOCAB_SIZE for token in draft):
            raise CorruptedError(f"not tokens of the model: {draft}")
        if len(draft) > request.py_draft_pages_allocated:
            raise CorruptedError(f"{len(draft)} tokens, {request.py_draft_pages_allocated} pages")
        filled = self.generation == "A"
        if filled and len(draft) not in (0, request.py_draft_pages_allocated):
            raise CorruptedError("no CUDA graph was recorded for this length")
        longest = request.py_orig_prompt_len + request.py_max_new_tokens - 1
        if not filled and draft and len(request.tokens) + len(draft) >= longest:
            raise CorruptedError("the draft is longer than what the request may still generate")
        if request.py_draft_logits is not None:
            raise CorruptedError("draft logits of a wrong number of rows")
        self.drafts[request.py_request_id] = list(draft)
        self.num_drafted += len(draft)

    def _verify(self, request: LlmRequest) -> None:
        accepted, goes_on = 0, True
        real = len(self.drafts[request.py_request_id])
        for token in request.py_draft_tokens:  # with its padding, which is as good a draft
            if not goes_on or self.target.next_token(request.tokens) != token:
                break
            goes_on = self._append(request, token)
            accepted += 1
        if goes_on:
            goes_on = self._append(request, self.target.next_token(request.tokens))
        self.num_accepted += min(accepted, real)
        request.py_num_accepted_draft_tokens = accepted
        request.num_kv_tokens -= max(0, request.py_draft_pages_allocated - accepted)
        if goes_on and request.num_kv_tokens != len(request.tokens) - 1:
            raise CorruptedError("the KV cache does not hold the request's tokens")
