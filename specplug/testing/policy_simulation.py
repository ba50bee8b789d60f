"""An engine without a model and without a proposer: plays a schedule to one length policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specplug.length import LengthPolicy, Lengths, Load, Outcome, StepCosts
from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Request
from specplug.testing.calls import CallLog, show_batch, show_load, show_outcome, show_request
from specplug.testing.results import Fault
from specplug.testing.schedules import IDS, KINDS, MOSTLY, Begin, End

MakePolicy = Callable[[], LengthPolicy]
_RAISED = object()
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class DraftMove:
    """What happens to one request in a step.

    Attributes:
        id: the request.
        right: how many tokens of its latest draft come true, if it has that many.
        drafted: how many tokens the proposer drafts, if it is asked for so many.
        score: of each of them.
    """

    id: str
    right: int
    drafted: int
    score: float


@dataclass(frozen=True)
class LoadedStep:
    """A step of the engine.

    Attributes:
        moves: the requests that got tokens, and what was drafted for them.
        costs: what steps cost.
        max_draft_tokens: the most draft tokens that the step may verify.
        scored: whether the proposer gives scores.
    """

    moves: tuple[DraftMove, ...]
    costs: StepCosts
    max_draft_tokens: int
    scored: bool


PolicySchedule = list[Begin | LoadedStep | End]

_COSTS = [
    StepCosts.line(base=0.02, per_token=0.001, per_draft_token=1e-5),
    StepCosts.line(base=0.001, per_token=0.02),
    StepCosts.line(base=0.0, per_token=0.0),
    StepCosts.line(base=0.02, per_token=0.0, per_draft_token=0.01, per_draft=0.005),
    StepCosts(num_tokens=(1.0, 2.0, 5.0), seconds=(0.02, 0.04, 0.03)),
]


@st.composite
def policy_schedules(
    draw: Callable[[SearchStrategy[Any]], Any], engine: EngineInfo, max_events: int = 16
) -> PolicySchedule:
    """Draw a schedule.

    Args:
        draw: given by hypothesis.
        engine: the engine that is played.
        max_events: the longest schedule.
    """
    counts = st.integers(0, engine.num_speculative_tokens)
    move = st.tuples(counts, counts, st.sampled_from([1.0, 0.5, 0.1, 0.0]))
    begin = st.tuples(st.sampled_from([engine.max_model_len, 4]), counts)
    load = st.tuples(st.sampled_from(_COSTS), st.sampled_from([_UNLIMITED, 3]), MOSTLY)
    schedule: PolicySchedule = []
    alive: list[str] = []
    first = ["begin"] * draw(st.integers(1, 3))
    for kind in first + draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=max_events)):
        if not alive or (kind == "begin" and len(alive) < len(IDS)):
            alive.append(next(name for name in IDS if name not in alive))
            schedule.append(Begin(alive[-1], (0, 1), *draw(begin)))
        elif kind == "end":
            name = draw(st.sampled_from(alive))
            alive.remove(name)
            schedule.append(End(name))
        else:
            moving = [name for name in alive if draw(MOSTLY)]
            moves = tuple(DraftMove(name, *draw(move)) for name in moving)
            schedule.append(LoadedStep(moves, *draw(load)))
    return schedule


@dataclass
class _State:
    request: Request
    num_tokens: int
    num_shown: int = 0
    proposed: int = 0
    verified: int = 0


class PolicySimulation:
    """Plays schedules to a length policy.

    Args:
        make: makes the policy.
        engine: what it is told about the engine.
        title: what the run is called where it is shown.
        turned: whether batches come in the opposite order.
        watch: whether it is noted what the policy changes.

    Attributes:
        policy: the policy.
        results: by step and request, how much was asked for and verified.
        faults: what the policy raised or returned that it should not.
        changed: which arguments it changed, if that is watched.
        log: the calls.
    """

    def __init__(
        self,
        make: MakePolicy,
        engine: EngineInfo,
        title: str = "",
        *,
        turned: bool = False,
        watch: bool = False,
    ) -> None:
        self.log = CallLog(title)
        self.policy = make()
        self.policy.prepare(engine)
        k = engine.num_speculative_tokens
        self.log.add("policy = make_policy()")
        self.log.add(f"policy.prepare(EngineInfo(num_speculative_tokens={k}))")
        self.results: dict[tuple[int, str], Any] = {}
        self.faults: list[Fault] = []
        self.changed: list[str] = []
        self._engine, self._turned, self._watch = engine, turned, watch
        self._states: dict[str, _State] = {}
        self._free_slots: list[int] = []
        self._num_steps = 0

    def play(self, schedule: PolicySchedule) -> PolicySimulation:
        """Play all events of a schedule."""
        for event in schedule:
            match event:
                case Begin():
                    self._begin(event)
                case LoadedStep():
                    self._step(event)
                case End():
                    self.end(event.id)
        return self

    def new_life(self) -> None:
        """End all requests, and count steps and results anew."""
        for request_id in list(self._states):
            self.end(request_id)
        self.results.clear()
        self._num_steps = 0

    def end(self, request_id: str) -> None:
        """End a request if it is alive."""
        state = self._states.pop(request_id, None)
        if state is not None:
            heappush(self._free_slots, state.request.slot)
            self._call(f"end({request_id!r})", "end", request_id)

    def _begin(self, event: Begin) -> None:
        size = len(event.prompt)
        request = Request(
            id=event.id,
            slot=heappop(self._free_slots) if self._free_slots else len(self._states),
            prompt_token_ids=list(event.prompt),
            max_num_tokens=min(size + event.max_new_tokens, self._engine.max_model_len),
            num_speculative_tokens=event.num_speculative_tokens,
        )
        self._call(show_request(request), "begin", request)
        self._states[event.id] = _State(request, size)

    def _step(self, step: LoadedStep) -> None:
        self._num_steps += 1
        moves = [move for move in step.moves if self._left(move) > 0]
        if self._turned:
            moves.reverse()
        self._observe(moves)
        moves = [move for move in moves if self._limit(move) > 0]
        if not moves:
            return
        load = Load(len(self._states), len(step.moves), step.max_draft_tokens, step.costs)
        batch = self._batch(moves)
        text = f"ask(batch, {show_load(load)})   # {show_batch(batch)}"
        asked = self._lengths(batch.max_draft_tokens, text, "ask", batch, load)
        for i, move in enumerate(moves):
            self.results[self._num_steps, move.id] = [int(asked[i]), 0]
        kept = np.flatnonzero(asked)
        if len(kept):
            batch = replace(batch.only(kept), max_draft_tokens=asked[kept].astype(np.int32))
            self._choose(batch, [moves[i] for i in kept.tolist()], load, step.scored)

    def _choose(self, batch: Batch, moves: Sequence[DraftMove], load: Load, scored: bool) -> None:
        for move in moves:
            state = self._states[move.id]
            state.num_shown = state.num_tokens
        lengths = np.minimum([move.drafted for move in moves], batch.max_draft_tokens)
        shape = len(moves), int(lengths.max())
        scores = np.array([[move.score] for move in moves], np.float32) * np.ones(shape, np.float32)
        drafts = Drafts(
            np.zeros(shape, np.int32), lengths.astype(np.int32), scores if scored else None
        )
        shown = f"drafts of {lengths.tolist()} tokens" + (
            f" with scores {[move.score for move in moves]}" if scored else ""
        )
        text = f"choose(batch, drafts, load)   # {shown}"
        chosen = self._lengths(drafts.lengths, text, "choose", batch, drafts, load)
        for i, move in enumerate(moves):
            state = self._states[move.id]
            state.proposed, state.verified = int(lengths[i]), int(chosen[i])
            self.results[self._num_steps, move.id][1] = state.verified

    def _observe(self, moves: Sequence[DraftMove]) -> None:
        judged: list[tuple[Request, int, int, int, int]] = []
        for move in moves:
            state = self._states[move.id]
            accepted = min(move.right, state.verified)
            if state.proposed:
                # The token behind the verified ones is judged too: see Outcome.
                matched = min(move.right, state.verified + 1, state.proposed)
                known = min(matched + (matched <= accepted), state.proposed)
                judged.append((state.request, state.proposed, state.verified, matched, known))
            state.num_tokens += accepted + 1
            state.proposed = state.verified = 0
        if not judged:
            return
        requests, *columns = zip(*judged, strict=True)
        outcome = Outcome(
            [request.id for request in requests],
            np.array([request.slot for request in requests], np.int32),
            *(np.array(column, np.int32) for column in columns),
        )
        self._call(f"observe(outcome)   # {show_outcome(outcome)}", "observe", outcome)

    def _left(self, move: DraftMove) -> int:
        state = self._states.get(move.id)
        return 0 if state is None else state.request.max_num_tokens - state.num_tokens

    def _limit(self, move: DraftMove) -> int:
        return min(self._states[move.id].request.num_speculative_tokens, self._left(move) - 1)

    def _batch(self, moves: Sequence[DraftMove]) -> Batch:
        states = [self._states[move.id] for move in moves]
        token_ids: Int32Array = np.zeros((len(moves), self._engine.max_model_len), np.int32)
        token_ids.flags.writeable = False

        def column(values: Sequence[int]) -> Int32Array:
            return np.array(values, np.int32)

        return Batch(
            request_ids=[move.id for move in moves],
            slots=column([state.request.slot for state in states]),
            token_ids=token_ids,
            rows=column(range(len(moves))),
            num_tokens=column([state.num_tokens for state in states]),
            num_new_tokens=column([state.num_tokens - state.num_shown for state in states]),
            num_prompt_tokens=column([len(state.request.prompt_token_ids) for state in states]),
            max_draft_tokens=column([self._limit(move) for move in moves]),
        )

    # -- what came back ---------------------------------------------------------------------

    def _call(self, text: str, method: str, *arguments: Any) -> Any:
        self.log.add(f"policy.{text}")
        before = deepcopy(arguments) if self._watch else arguments
        try:
            result = getattr(self.policy, method)(*arguments)
        except Exception as error:
            self.faults.append(Fault(f"{method} raised {type(error).__name__}: {error}", error))
            self.log.result(f"raises {type(error).__name__}: {error}")
            return _RAISED
        self._compare(method, before, arguments)
        return result

    def _lengths(self, most: Lengths, text: str, method: str, *arguments: Any) -> Lengths:
        """Return what the runtime would make of the lengths that a method returns."""
        most = most.copy()
        result = self._call(text, method, *arguments)
        if result is _RAISED:
            return most
        self.log.result(str(result))
        if not (isinstance(result, np.ndarray) and result.dtype.kind in "iu"):
            found = f"{type(result).__name__} {getattr(result, 'dtype', '')}".strip()
            self.faults.append(Fault(f"{method} returned {found}, not an array of integers"))
            return most
        if result.shape != most.shape:
            self.faults.append(Fault(f"{method} returned {result.shape} for {len(most)} requests"))
            return most
        if (result < 0).any() or (result > most).any():
            self.faults.append(Fault(f"{method} returned {result}, outside 0 to {most}"))
        return np.clip(result, 0, most)

    def _compare(self, method: str, before: Any, after: Any) -> None:
        for one, other in zip(before, after, strict=True):
            for name in getattr(one, "__dataclass_fields__", ()):
                if not np.array_equal(getattr(one, name), getattr(other, name)):
                    self.changed.append(f"{type(one).__name__.lower()}.{name} in {method}")
