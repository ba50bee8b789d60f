"""The contract between a proposer and an engine; what a plugin author reads first.

A *proposer* guesses the next few tokens of each running request. The engine's target model
verifies the guesses in one forward pass and keeps those it would have produced itself, so
a proposer can only change speed, never text (Leviathan et al., arXiv 2211.17192; Chen et
al., arXiv 2302.01318).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from specplug.errors import OptionError

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.floating[Any]]

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_name(name: str, what: str) -> None:
    """Refuse what cannot be the name of a plugin, such as a proposer.

    Raises:
        OptionError: saying what is allowed.
    """
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} cannot be the name of a {what}.",
            hint="A name begins with a lower-case letter and goes on with lower-case "
            "letters, digits and underscores: engines accept nothing else in their flag.",
        )


class Capability(StrEnum):
    """Something beyond tokens that an engine can give and a proposer can need."""

    REQUEST_OPTIONS = "request_options"
    """Per-request options reach the proposer."""
    TARGET_TOKENS = "target_tokens"
    """The target's own token at every drafted position, rejected ones too."""
    HIDDEN_STATES = "hidden_states"
    """The target's last hidden states at the sampled positions."""
    LOGITS = "logits"
    """The target's logits at the verified positions."""
    DRAFT_PROBABILITIES = "draft_probabilities"
    """The verifier can use the proposer's own probabilities."""
    DEVICE_TENSORS = "device_tensors"
    """Tokens and drafts can stay on the target's device: see ``DeviceProposer``."""


class Options(BaseModel):
    """Base class of a proposer's options: immutable, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestOptions(Options):
    """What one request may set; a proposer may subclass it to take more.

    Attributes:
        num_speculative_tokens: the most draft tokens per step for this request; 0 turns
            speculation off, values above the engine's own limit mean that limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_speculative_tokens: NonNegativeInt | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a proposer is told about the engine before the first request.

    Attributes:
        backend: the backend's name, such as ``"vllm"``.
        vocab_size: draft tokens must be in ``[0, vocab_size)``.
        max_model_len: the longest sequence in tokens, prompt included.
        max_num_seqs: the most requests in one batch. More can be alive at a time:
            preempted requests keep their state.
        num_speculative_tokens: K, the most draft tokens per request and step.
        device: where the target model runs, such as ``"cpu"`` or ``"cuda:0"``.
        rank: this worker's tensor-parallel rank. Every rank must draft the same tokens.
        world_size: the number of tensor-parallel ranks.
        replica: which data-parallel replica of the model this worker is of, from 0.
        model_name: the name that the model is served under.
        provides: what the engine can give.
        load_tokenizer: returns the target's tokenizer; may be slow, call it once.
        make_proposer: makes another registered proposer from its name and options, for
            proposers that are made of others; who asks for it prepares and drives it.
        shared: for what proposers of this worker hold in common, such as an index.
    """

    backend: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_speculative_tokens: int
    device: str = "cpu"
    rank: int = 0
    world_size: int = 1
    replica: int = 0
    model_name: str = ""
    provides: frozenset[Capability] = frozenset()
    load_tokenizer: Callable[[], Any] | None = field(default=None, compare=False)
    make_proposer: Callable[[str, Mapping[str, Any]], tuple[Proposer, ProposerSpec]] | None = field(
        default=None, compare=False
    )
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)

    def for_parts(self) -> EngineInfo:
        """Return the engine as it is for the proposers that another one is made of.

        They are handed what is on the host, and of their drafts only the tokens are passed on.
        """
        lacking = {Capability.DEVICE_TENSORS, Capability.DRAFT_PROBABILITIES}
        return replace(self, provides=self.provides - lacking)


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as the proposer meets it in ``begin``.

    Attributes:
        id: the engine's id; unique among the requests that are alive.
        slot: a small integer, unique among the requests that are alive and reused
            afterwards; made for indexing columns of per-request state.
        prompt_token_ids: the prompt, as the engine holds it; do not change it.
        max_num_tokens: the length, prompt included, at which generation stops at the latest.
        num_speculative_tokens: the most draft tokens per step for this request; 0 when
            speculation is off for it.
        options: the validated per-request options.
    """

    id: str
    slot: int
    prompt_token_ids: Sequence[int]
    max_num_tokens: int
    num_speculative_tokens: int
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests that can use a draft in this step, in columns.

    Row ``i`` of every column belongs to ``request_ids[i]``. ``token_ids`` is the engine's own
    matrix, shared and read-only; row ``rows[i]`` of it holds request ``i``, so that a
    compiled kernel can serve the whole batch in one call.

    Attributes:
        request_ids: ``n`` ids.
        slots: int32 ``[n]``, see ``Request``.
        token_ids: int32 ``[max_rows, width]``, read-only; prompt and output so far.
        rows: int32 ``[n]``, the row of ``token_ids`` of each request.
        num_tokens: int32 ``[n]``, how much of that row is valid. Always at least 1.
        num_new_tokens: int32 ``[n]``, how many tokens at its end this proposer has not been
            shown before in ``propose``.
        num_prompt_tokens: int32 ``[n]``.
        max_draft_tokens: int32 ``[n]``, the longest useful draft, at least 1.
    """

    request_ids: Sequence[str]
    slots: Int32Array
    token_ids: Int32Array
    rows: Int32Array
    num_tokens: Int32Array
    num_new_tokens: Int32Array
    num_prompt_tokens: Int32Array
    max_draft_tokens: Int32Array

    def __len__(self) -> int:
        return len(self.request_ids)

    def tokens(self, i: int) -> Int32Array:
        """Return all tokens of request ``i``: an int32 view ``[num_tokens[i]]``, read-only."""
        return self.token_ids[self.rows[i], : self.num_tokens[i]]

    def only(self, index: NDArray[np.integer[Any]]) -> Batch:
        """Return some of the requests, for a proposer that leaves them to another.

        Args:
            index: integers ``[m]``, which.
        """
        return Batch(
            request_ids=[self.request_ids[i] for i in index.tolist()],
            slots=self.slots[index],
            token_ids=self.token_ids,
            rows=self.rows[index],
            num_tokens=self.num_tokens[index],
            num_new_tokens=self.num_new_tokens[index],
            num_prompt_tokens=self.num_prompt_tokens[index],
            max_draft_tokens=self.max_draft_tokens[index],
        )


@dataclass(frozen=True, slots=True)
class Drafts:
    """The proposed tokens of a batch, padded.

    Attributes:
        token_ids: integers ``[n, width]``; row ``i`` is the draft of request ``i``.
        lengths: integers ``[n]``; what lies behind ``lengths[i]`` is ignored.
        scores: optional floats ``[n, width]``: the proposer's own estimate, in [0, 1], that
            a token is accepted given that those before it were.
        probabilities: optional floats ``[n, width, vocab_size]``: what each token was drawn from,
            given those before it; for engines that provide ``Capability.DRAFT_PROBABILITIES``. The
            verifier has to believe it: sampled text keeps the target's distribution only if the
            token was really drawn from it, and if whether it stays in the draft does not depend
            on which token it is.
    """

    token_ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    scores: FloatArray | None = None
    probabilities: FloatArray | None = None

    @classmethod
    def empty(cls, num_requests: int, width: int = 0) -> Drafts:
        """Return drafts of length 0 for ``num_requests`` requests, with room for ``width``."""
        return cls(np.zeros((num_requests, width), np.int32), np.zeros(num_requests, np.int32))

    def to_lists(self) -> list[list[int]]:
        """Return one list of token ids per request."""
        rows = zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What verification made of earlier drafts, in columns.

    Holds the requests that got new tokens in this step. Tokens that follow a stop token are
    left out: the engine throws them away.

    Attributes:
        request_ids: ``n`` ids.
        slots: int32 ``[n]``, see ``Request``.
        draft_token_ids: for each request, the tokens that were verified; may be empty.
        num_accepted: int32 ``[n]``, how many of them were accepted.
        new_token_ids: for each request, the tokens that were added to the sequence: the
            accepted ones, then the target's own.
        target_token_ids: for each request, the target's own token at every verified position
            and the one behind them, or nothing if nothing was verified. None unless the proposer
            uses ``Capability.TARGET_TOKENS`` and the engine provides it.
        logits: for each request, floats ``[verified + 1, vocab_size]``: the target's own, before
            anything that a request asks for changes them, at every verified position and the one
            behind them. None unless the proposer uses ``Capability.LOGITS`` and the engine
            provides it.
    """

    request_ids: Sequence[str]
    slots: Int32Array
    draft_token_ids: Sequence[Sequence[int]]
    num_accepted: Int32Array
    new_token_ids: Sequence[Sequence[int]]
    target_token_ids: Sequence[Sequence[int]] | None = None
    logits: Sequence[FloatArray] | None = None


class Usage(NamedTuple):
    """What a proposer holds at the moment: see ``Proposer.usage``."""

    num_requests: int
    num_bytes: int


class Proposer(ABC):
    """Guesses the next tokens of running requests. One instance lives in each engine worker.

    Only ``propose`` must be written. Whatever a method raises is caught, counted and
    logged by the runtime; the request then goes on without a draft. What is drafted must
    follow from the tokens alone (no clock, no unseeded randomness), because every
    tensor-parallel rank drafts for itself.

    Attributes:
        uses: what the engine should give if it can; read after ``prepare``. What a proposer
            cannot do without stands in its spec instead.
        request_options: the model of its per-request options, where only ``prepare`` finds
            it out; None for the one of its spec.
    """

    uses: frozenset[Capability] = frozenset()
    request_options: type[RequestOptions] | None = None

    def prepare(self, engine: EngineInfo) -> None:  # noqa: B027
        """Get ready: called once, before the first request. Compile and allocate here.

        An exception raised here stops the engine's start-up: it is the place to refuse.
        """

    def begin(self, request: Request) -> None:  # noqa: B027
        """Meet a new request. Called once for it, before its first draft."""

    @abstractmethod
    def propose(self, batch: Batch) -> Drafts | Sequence[Sequence[int]]:
        """Return a draft for each request of the batch, in order; any may be empty.

        The result is a ``Drafts`` or, for short, one sequence of token ids per request.
        Drafts longer than ``batch.max_draft_tokens`` are cut.
        """

    def observe(self, acceptance: Acceptance) -> None:  # noqa: B027
        """Learn what became of earlier drafts; called before ``propose`` of the same step."""

    def end(self, request_id: str) -> None:  # noqa: B027
        """Forget a request: finished or aborted. Called once for each ``begin``."""

    def close(self) -> None:  # noqa: B027
        """Release what ``prepare`` took; called when the engine shuts down."""

    def usage(self) -> Usage | None:
        """Return the requests known and the bytes held for them, or None if not counted."""
        return None


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """All requests of a step, with their tokens on the target model's device.

    The tensors are the engine's own (torch): do not change them.

    Attributes:
        request_ids: ``n`` ids, on the host like ``max_draft_tokens``.
        token_ids: int32 ``[max_rows, width]``; prompt and output so far.
        rows: integers ``[n]``, the row of ``token_ids`` of each request.
        num_tokens: int32 ``[n]``, how much of that row is valid.
        num_sampled: int32 ``[n]``, how many tokens this step brought; what is drafted for
            requests with 0, which are still in prefill, is thrown away.
        max_draft_tokens: K, the width of the drafts.
    """

    request_ids: Sequence[str]
    token_ids: Any
    rows: Any
    num_tokens: Any
    num_sampled: Any
    max_draft_tokens: int

    def __len__(self) -> int:
        return len(self.request_ids)


class DeviceProposer(Proposer):
    """A proposer that works on the target model's device: tensors in, a tensor out.

    Nothing is copied to the host, so with async scheduling the host never waits for a draft.
    Its spec's ``needs`` must hold ``Capability.DEVICE_TENSORS``. ``begin`` and ``end`` are called
    as for any proposer, ``propose`` and ``observe`` are not. Acceptance is counted late, and a
    draft cannot be shorter than K: slots without a token are verified too.
    """

    @abstractmethod
    def propose_on_device(self, batch: DeviceBatch) -> Any:
        """Return an int64 tensor ``[n, K]`` on the device of ``batch.token_ids``.

        Slots that hold no token of the vocabulary, such as -1, are taken as not drafted. Do not
        read a value on the host: that waits for the device.
        """

    def propose(self, batch: Batch) -> Drafts:
        """Not called where tokens stay on the device."""
        raise NotImplementedError


ProposeFunction = Callable[[Int32Array, int], Sequence[int]]
_F = TypeVar("_F", bound=ProposeFunction)


@dataclass(frozen=True, slots=True)
class ProposerSpec:
    """Registers a proposer: what it is called, how to make it, what it needs.

    Attributes:
        name: lower-case identifier; what users write in the engine's flag.
        factory: called with the options to make a ``Proposer``; a callable or, to keep
            imports light and pickles small, ``"package.module:attribute"``.
        options: the model of its options; ``specplug list`` and errors are made from it.
        request_options: the model of its per-request options.
        needs: what it cannot work without.
        summary: one line for ``specplug list``.
        install_hint: what to do when the factory's imports fail.
    """

    name: str
    factory: Callable[[Any], Proposer] | str
    options: type[Options] = Options
    request_options: type[RequestOptions] = RequestOptions
    needs: frozenset[Capability] = frozenset()
    summary: str = ""
    install_hint: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "proposer")
        try:
            self.request_options()
        except ValidationError as error:
            raise OptionError(
                f"The per-request options of '{self.name}' need defaults: {error}",
                hint="Most requests set none.",
            ) from None


def proposer(*, name: str = "", summary: str = "") -> Callable[[_F], _F]:
    """Turn ``f(tokens, max_tokens) -> token ids`` into a whole proposer.

    ``tokens`` is the request's int32 array ``[num_tokens]`` (read-only), ``max_tokens`` the
    longest useful draft. The function stays an ordinary function; an entry point of the
    group ``specplug`` may point at it, or it may be passed to ``PluginManager.add``.

    Args:
        name: what users write in the engine's flag; the function's own name if left out.
        summary: one line for ``specplug list``; the first line of the docstring if left out.
    """

    def decorate(function: _F) -> _F:
        lines = (function.__doc__ or "").strip().splitlines()
        spec = ProposerSpec(
            name=name or function.__name__,
            factory=lambda _options: FunctionProposer(function),
            summary=summary or (lines[0] if lines else ""),
        )
        function.specplug_spec = spec  # type: ignore[attr-defined]
        return function

    return decorate


class FunctionProposer(Proposer):
    """A proposer made of a function of one request; see ``proposer``."""

    def __init__(self, function: ProposeFunction) -> None:
        self._function = function

    def propose(self, batch: Batch) -> Sequence[Sequence[int]]:
        """Call the function once per request; a failure costs only that request its draft."""
        return [self._row(batch, i) for i in range(len(batch))]

    def _row(self, batch: Batch, i: int) -> Any:
        try:
            return self._function(batch.tokens(i), int(batch.max_draft_tokens[i]))
        except Exception as error:
            return error  # the runtime counts an exception in a row as that row's fault
