"""An engine without a model: plays a schedule to one proposer, as the runtime would.

What the proposer raises or returns is handled as the runtime handles it (the request goes on
without a draft), and noted for the rules that are about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np

from specplug.plugins import PluginManager
from specplug.proposer import (
    Acceptance,
    Batch,
    Capability,
    DeviceProposer,
    EngineInfo,
    Int32Array,
    Proposer,
    Request,
    RequestOptions,
)
from specplug.testing.calls import CallLog, show_acceptance, show_batch, show_request, show_tokens
from specplug.testing.results import Fault, checked
from specplug.testing.schedules import Begin, End, Move, Rewind, Schedule, Step

MakeProposer = Callable[[], Proposer]
Grouping = Callable[[Sequence[Any]], Sequence[Sequence[Any]]]
_T = TypeVar("_T")
_RAISED = object()


@cache
def _installed() -> PluginManager:
    return PluginManager()


def prepared(make: MakeProposer, engine: EngineInfo) -> tuple[Proposer, EngineInfo]:
    """Return a new proposer, ready to draft, and its engine, which shares nothing with others."""
    engine = engine if engine.make_proposer else _installed().with_parts(engine)
    engine = replace(engine, shared={})
    proposer = make()
    if isinstance(proposer, DeviceProposer):
        raise TypeError(
            f"{type(proposer).__name__} is a DeviceProposer, and this kit has no device: it calls "
            "propose, which such a proposer does not have."
        )
    proposer.prepare(engine)
    return proposer, engine


@dataclass
class _State:
    request: Request
    text: list[int]
    num_prompt_tokens: int
    num_shown: int = 0
    draft: list[int] = field(default_factory=list)
    failed: bool = False


def one_batch(moves: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Take all requests into one batch."""
    return [moves]


class Simulation:
    """Plays schedules to a proposer.

    Args:
        make: makes the proposer.
        engine: what it is told about the engine.
        title: what the run is called where it is shown.
        request_options: the model of per-request options, unless the proposer has its own.
        grouping: how the moves of a step are put into batches, and in which order.
        ask_always: whether also those requests are shown whose draft is not asked for; it is
            thrown away then.
        scribble: whether all that the proposer has no business to read is overwritten, before and
            after each call, and requests change their rows.
        watch: whether it is noted what the proposer changes.

    Attributes:
        proposer: the proposer.
        results: by step and request, what was drafted.
        faults: what it raised or returned that it should not.
        changed: which arguments it changed, if that is watched.
        log: the calls.
    """

    def __init__(
        self,
        make: MakeProposer,
        engine: EngineInfo,
        title: str = "",
        *,
        request_options: type[RequestOptions] = RequestOptions,
        grouping: Grouping = one_batch,
        ask_always: bool = False,
        scribble: bool = False,
        watch: bool = False,
    ) -> None:
        self.log = CallLog(title)
        self.proposer, self.engine = prepared(make, engine)
        self.log.add("proposer = make_proposer()")
        self.log.add(
            f"proposer.prepare(EngineInfo(vocab_size={engine.vocab_size}, "
            f"max_model_len={engine.max_model_len}, max_num_seqs={engine.max_num_seqs}, "
            f"num_speculative_tokens={engine.num_speculative_tokens}))"
        )
        self.results: dict[tuple[int, str], list[int]] = {}
        self.faults: list[Fault] = []
        self.changed: list[str] = []
        self._request_options = self.proposer.request_options or request_options
        self._grouping, self._ask_always = grouping, ask_always
        self._scribble, self._watch = scribble, watch
        self._targets = Capability.TARGET_TOKENS in (self.proposer.uses & engine.provides)
        self._states: dict[str, _State] = {}
        self._free_slots: list[int] = []
        self._num_steps = 0

    def play(self, schedule: Schedule) -> Simulation:
        """Play all events of a schedule."""
        for event in schedule:
            match event:
                case Begin():
                    self.begin(event)
                case Step():
                    self._step(event)
                case Rewind():
                    self._rewind(event)
                case End():
                    self.end(event.id)
        return self

    def end_all(self) -> None:
        """End all requests that are alive."""
        for request_id in list(self._states):
            self.end(request_id)

    def new_life(self) -> None:
        """End all requests, and count steps and drafts anew."""
        self.end_all()
        self.results.clear()
        self._num_steps = 0

    # -- requests ---------------------------------------------------------------------------

    def begin(self, event: Begin) -> None:
        """Begin a request, as long as the engine can take it."""
        self.end(event.id)
        prompt = list(event.prompt[: self.engine.max_model_len])
        self._begin(
            Request(
                id=event.id,
                slot=heappop(self._free_slots) if self._free_slots else len(self._states),
                prompt_token_ids=prompt,
                max_num_tokens=min(len(prompt) + event.max_new_tokens, self.engine.max_model_len),
                num_speculative_tokens=event.num_speculative_tokens,
                options=self._request_options(**event.options),
            ),
            list(prompt),
        )

    def _begin(self, request: Request, text: list[int]) -> None:
        before = list(request.prompt_token_ids)
        self.log.add(f"proposer.{show_request(request)}")
        failed = self._call("begin", request) is _RAISED
        if list(request.prompt_token_ids) != before:
            self.changed.append("request.prompt_token_ids")
        state = _State(request, text, len(request.prompt_token_ids), failed=failed)
        self._states[request.id] = state

    def end(self, request_id: str) -> None:
        """End a request if it is alive."""
        state = self._states.pop(request_id, None)
        if state is not None:
            heappush(self._free_slots, state.request.slot)
            self.log.add(f"proposer.end({request_id!r})")
            self._call("end", request_id)

    def _rewind(self, event: Rewind) -> None:
        state = self._states.get(event.id)
        if state is None or len(state.text) <= state.num_prompt_tokens + event.keep:
            return
        text = state.text[: state.num_prompt_tokens + event.keep]
        self.end(event.id)
        self._begin(replace(state.request, slot=heappop(self._free_slots)), text)

    # -- steps ------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        self._num_steps += 1
        moves = [move for move in step.moves if self._moves(move)][: self.engine.max_num_seqs]
        for group in self._grouping(moves):
            self._observe(group)
            self._propose([move for move in group if move.asked or self._ask_always])

    def _moves(self, move: Move) -> bool:
        state = self._states.get(move.id)
        return state is not None and len(state.text) < state.request.max_num_tokens

    def _observe(self, moves: Sequence[Move]) -> None:
        taken = [(self._states[move.id], *self._take_in(move)) for move in moves]
        taken = [one for one in taken if not one[0].failed]
        if not taken:
            return
        states, drafts, accepted, new, targets = map(list, zip(*taken, strict=True))
        acceptance = Acceptance(
            request_ids=[state.request.id for state in states],
            slots=np.array([state.request.slot for state in states], np.int32),
            draft_token_ids=drafts,
            num_accepted=np.array(accepted, np.int32),
            new_token_ids=new,
            target_token_ids=targets if self._targets and any(targets) else None,
        )
        if type(self.proposer).observe is Proposer.observe:
            return
        before = self._copy(acceptance)
        self.log.add(f"proposer.observe(acceptance)   # {show_acceptance(acceptance)}")
        self._call("observe", acceptance)
        self._compare("acceptance", before, acceptance)

    def _take_in(self, move: Move) -> tuple[list[int], int, list[int], list[int]]:
        """Return what was verified, how much accepted, what is new, what the target said."""
        state = self._states[move.id]
        draft, state.draft = state.draft[: move.verified], []
        accepted = min(move.accepted, len(draft))
        while accepted < len(draft) and draft[accepted] == move.token:
            accepted += 1  # or it would not be the target's
        new = [*draft[:accepted], move.token]
        state.text += new
        guesses = [(move.token + i) % self.engine.vocab_size for i in range(1, len(draft) + 1)]
        targets = [*new, *guesses][: len(draft) + 1] if draft else []
        return draft, accepted, new, targets

    def _propose(self, moves: Sequence[Move]) -> None:
        wanted = [(self._states[move.id], move.asked) for move in moves]
        wanted = [one for one in wanted if self._limit(one[0]) > 0 and not one[0].failed]
        if not wanted:
            return
        states = [state for state, _ in wanted]
        matrix, batch = self._batch(states)
        before, matrix_before = self._copy(batch), self._copy(matrix)
        self.log.add(f"proposer.propose(batch)   # {show_batch(batch)}")
        drafts = self._result(self._call("propose", batch), before)
        self._compare("batch", before, batch)
        if not np.array_equal(matrix_before, matrix):
            self.changed.append("batch.token_ids")
        if self._scribble:
            matrix[:] = _noise(matrix.shape, self.engine.vocab_size, self._num_steps + 1)
        for (state, asked), draft in zip(wanted, drafts, strict=True):
            state.num_shown = len(state.text)
            state.draft = draft if asked else []
            if asked:
                self.results[self._num_steps, state.request.id] = draft

    def _limit(self, state: _State) -> int:
        left = state.request.max_num_tokens - len(state.text) - 1
        return min(state.request.num_speculative_tokens, left)

    def _batch(self, states: Sequence[_State]) -> tuple[Int32Array, Batch]:
        n, width = len(states), self.engine.max_model_len
        matrix: Int32Array = np.zeros((n, width), np.int32)
        rows = np.arange(n, dtype=np.int32)
        if self._scribble:
            matrix = _noise((2 * n + 1, width + 3), self.engine.vocab_size, self._num_steps)
            rows = np.roll(2 * rows + 1, self._num_steps).astype(np.int32)
        for row, state in zip(rows, states, strict=True):
            matrix[row, : len(state.text)] = state.text
        view = matrix.view()
        view.flags.writeable = False

        def column(values: Iterator[int]) -> Int32Array:
            return np.fromiter(values, np.int32, n)

        return matrix, Batch(
            request_ids=[state.request.id for state in states],
            slots=column(state.request.slot for state in states),
            token_ids=view,
            rows=rows,
            num_tokens=column(len(state.text) for state in states),
            num_new_tokens=column(len(state.text) - state.num_shown for state in states),
            num_prompt_tokens=column(state.num_prompt_tokens for state in states),
            max_draft_tokens=column(self._limit(state) for state in states),
        )

    # -- what came back ---------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.proposer, method)(*arguments)
        except Exception as error:
            self.faults.append(Fault(f"{method} raised {type(error).__name__}: {error}", error))
            self.log.result(f"raises {type(error).__name__}: {error}")
            return _RAISED

    def _result(self, result: Any, batch: Batch) -> list[list[int]]:
        """Return the drafts that the runtime would make of what ``propose`` returned."""
        if result is _RAISED:
            return [[]] * len(batch)
        drafts, faults = checked(result, batch, self.engine.vocab_size)
        self.faults += faults
        self.log.result(repr(result) if faults else ", ".join(map(show_tokens, drafts)))
        return drafts

    def _copy(self, what: _T) -> _T:
        return deepcopy(what) if self._watch else what

    def _compare(self, what: str, before: Any, after: Any) -> None:
        for name in before.__dataclass_fields__:
            if not _same(getattr(before, name), getattr(after, name)):
                self.changed.append(f"{what}.{name}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _noise(shape: tuple[int, ...], vocab_size: int, seed: int) -> Int32Array:
    """Return valid tokens that mean nothing."""
    size = int(np.prod(shape))
    noise: Int32Array = ((np.arange(size) + seed) % min(vocab_size, 4)).astype(np.int32)
    return noise.reshape(shape)
