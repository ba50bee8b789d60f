"""The one loop that every backend drives: requests in, drafts out, acceptance back.

A backend says which requests began and ended and, once per engine step, what the batch looks
like. The runtime follows each request by its id, wherever its row moves, calls the proposer,
and hands back drafts that the engine can take as they are.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import repeat
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from specplug.config import Settings, request_options
from specplug.drafts import shown, validated
from specplug.errors import DependencyError, OptionError
from specplug.length import Load, Outcome
from specplug.length_control import Clock, LengthControl
from specplug.metrics import Counters
from specplug.plugins import PluginManager
from specplug.prometheus import Publisher
from specplug.proposer import (
    Acceptance,
    Batch,
    Capability,
    DeviceBatch,
    DeviceProposer,
    Drafts,
    EngineInfo,
    FloatArray,
    Int32Array,
    Proposer,
    Request,
    RequestOptions,
)
from specplug.recording import Recorder

logger = logging.getLogger(__name__)

_RAISED = object()
_running: weakref.WeakSet[Runtime] = weakref.WeakSet()


def running() -> list[Runtime]:
    """Return the runtimes that serve in this process."""
    return list(_running)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new request, as a backend reports it.

    Attributes:
        id: the engine's id.
        prompt_token_ids: the prompt.
        max_num_tokens: the length, prompt included, at which generation stops at the latest.
        stop_token_ids: tokens that end the output, end of sequence included where it counts.
        min_output_tokens: a stop token among the first ``min_output_tokens - 1`` does not end it.
        arguments: the engine's free-form per-request arguments.
    """

    id: str
    prompt_token_ids: Sequence[int]
    max_num_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_output_tokens: int = 0
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, as a backend reports it after sampling.

    Attributes:
        request_ids: the requests of the batch, in the engine's order.
        token_ids: int32 ``[max_rows, width]``, the engine's matrix of all tokens.
        rows: int32 ``[n]``, the row of each request in it.
        num_tokens: ``[n]``, the valid tokens of each row, those just sampled included.
        sampled: ``[n]``, whether a request got tokens in this step; False during prefill.
        verified: the drafts that the engine verified in this step, by request id.
        target_token_ids: for them, the target's own token at every verified position and the
            one behind them, if the proposer uses that and the engine has it.
        logits: for every request that got tokens, the target's logits at its verified positions and
            the one behind them, floats ``[verified + 1, vocab_size]``; on the same terms.
        num_speculative_tokens: the most draft tokens per request the engine can take in the
            next step; None for K.
    """

    request_ids: Sequence[str]
    token_ids: Int32Array
    rows: Int32Array
    num_tokens: Sequence[int]
    sampled: Sequence[bool]
    verified: Mapping[str, Sequence[int]]
    target_token_ids: Mapping[str, Sequence[int]] | None = None
    logits: Mapping[str, FloatArray] | None = None
    num_speculative_tokens: int | None = None


@dataclass(slots=True)
class _State:
    request: Request
    arrival: Arrival
    num_prompt_tokens: int
    num_tokens: int  # committed so far
    num_shown: int = 0  # of them, shown to the proposer
    proposed: list[int] = field(default_factory=list)  # the latest draft, as it was before a cut
    begun: bool = False  # the proposer knows it and is owed an end
    failed: bool = False  # its begin raised: the proposer does not know it
    complete: bool = False  # a stop token or the last token was committed


@dataclass(slots=True)
class _Wanted:
    """The rows of one step that can use a draft, in columns."""

    states: list[_State] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)

    def only(self, index: Sequence[int]) -> _Wanted:
        """Return some of them."""
        return _Wanted(
            [self.states[i] for i in index],
            [self.positions[i] for i in index],
            [self.limits[i] for i in index],
        )


@dataclass(slots=True)
class _Verified:
    """The rows of one step that got new tokens, in columns."""

    states: list[_State] = field(default_factory=list)
    drafts: list[Sequence[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class _Judged:
    """The rows of one step whose drafts can be compared with what followed, in columns."""

    states: list[_State] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)

    def add(self, state: _State, num_verified: int, new: list[int]) -> None:
        """Compare a request's draft, whether it was verified or not, with what followed."""
        draft, state.proposed = state.proposed, []
        if not draft:
            return
        matched = _num_equal(draft, new)
        self.states.append(state)
        self.proposed.append(len(draft))
        self.verified.append(min(num_verified, len(draft)))
        self.matched.append(matched)
        self.judged.append(min(matched + (matched < len(new)), len(draft)))

    def outcome(self) -> Outcome:
        """Return it as a length policy gets it."""
        return Outcome(
            request_ids=[state.request.id for state in self.states],
            slots=np.array([state.request.slot for state in self.states], np.int32),
            num_proposed=np.array(self.proposed, np.int32),
            num_verified=np.array(self.verified, np.int32),
            num_matched=np.array(self.matched, np.int32),
            num_judged=np.array(self.judged, np.int32),
        )


class Runtime:
    """Drives one proposer in one engine worker.

    Args:
        name: the proposer's registered name.
        engine: what the engine is.
        settings: the user's settings.
        plugins: where to look the name up; by default everything installed.
        clock: returns seconds; what steps cost is measured with it.

    Attributes:
        request_options: the model of what requests may set.
        length: the length policy and its limits.

    Raises:
        SpecplugError: the name, an option, a capability or a dependency is wrong. Whatever the
            proposer's own ``prepare`` raises passes through: start-up is the time to refuse.
    """

    def __init__(
        self,
        name: str,
        engine: EngineInfo,
        settings: Settings | None = None,
        plugins: PluginManager | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name = name
        self.settings = settings or Settings()
        self._clock = clock
        self.counters = Counters(num_accepted_tokens_per_pos=[0] * engine.num_speculative_tokens)
        plugins = plugins or PluginManager()
        self.proposer, spec = plugins.create(name, self.settings.options, engine.provides)
        self.engine = plugins.with_parts(engine)
        self._observers = {
            hook: plugins.observers(f"specplug_{hook}")
            for hook in (
                "started", "request_begin", "request_end", "drafts_proposed", "drafts_verified"
            )
        }  # fmt: skip
        self._learns = type(self.proposer).observe is not Proposer.observe or bool(
            self._observers["drafts_verified"]
        )
        self._recorder: Recorder | None = None
        if self.settings.record_folder and isinstance(self.proposer, DeviceProposer):
            raise OptionError(
                f"record_folder is set, and the proposer '{name}' works on the device: tokens that "
                "are not copied to the host cannot be recorded.",
                hint="Record with another proposer.",
            )
        if self.settings.record_folder and engine.rank == 0:
            self._recorder = Recorder(self.settings.record_folder, self.settings.record_max_bytes)
        self._states: dict[str, _State] = {}
        self._free_slots: list[int] = []
        self._faults_seen: set[str] = set()
        self._step_faults = 0
        self._failed_steps = 0
        self._last_log = time.monotonic()

        try:
            self.proposer.prepare(self.engine)
        except ImportError as error:
            raise DependencyError(
                f"The proposer '{name}' needs a package that is not installed: {error}.",
                hint=spec.install_hint,
            ) from error
        self.length = LengthControl(self.engine, self.settings, plugins, clock)
        self.request_options = self.proposer.request_options or spec.request_options
        self._uses = (spec.needs | self.proposer.uses) & engine.provides
        self._notify("started", engine=self.engine)
        # Engine workers end in ways that skip atexit; multiprocessing's own finalizers run.
        Finalize(self, _close, args=(weakref.ref(self),), exitpriority=10)
        _running.add(self)
        self._publisher = Publisher(name, self.engine)
        self._publish()

    # -- requests ---------------------------------------------------------------------------

    def uses(self, capability: Capability) -> bool:
        """Return whether the proposer would make use of something that the engine can give."""
        return capability in self._uses

    @property
    def num_requests(self) -> int:
        """How many requests are alive."""
        return len(self._states)

    def knows(self, request_id: str) -> bool:
        """Return whether a request is alive."""
        return request_id in self._states

    def begin(self, arrival: Arrival) -> None:
        """Take in a new request. An id that is still alive is ended first."""
        if arrival.id in self._states:
            self.end(arrival.id)
        options = self._options_of(arrival)
        most = self.engine.num_speculative_tokens
        wanted = options.num_speculative_tokens
        request = Request(
            id=arrival.id,
            slot=heappop(self._free_slots) if self._free_slots else len(self._states),
            prompt_token_ids=arrival.prompt_token_ids,
            max_num_tokens=min(arrival.max_num_tokens, self.engine.max_model_len),
            num_speculative_tokens=most if wanted is None else max(0, min(wanted, most)),
            options=options,
        )
        num_prompt_tokens = len(arrival.prompt_token_ids)
        state = _State(request, arrival, num_prompt_tokens, num_tokens=num_prompt_tokens)
        self._states[arrival.id] = state
        self.counters.num_requests += 1
        if self._recorder:
            self._recorder.begin(arrival.id, arrival.prompt_token_ids)
        if not self.counters.switched_off:
            state.begun = True
            state.failed = self._call_proposer(self.proposer.begin, request) is _RAISED
        self.length.begin(request)
        self._notify("request_begin", request=request)

    def end(self, request_id: str) -> None:
        """Forget a request; ids that are not alive are ignored."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        heappush(self._free_slots, state.request.slot)
        if self._recorder:
            self._recorder.end(request_id)
        if state.begun:
            self._call_proposer(self.proposer.end, request_id)
        self.length.end(request_id)
        self._notify("request_end", request_id=request_id)
        self._publish()

    def _options_of(self, arrival: Arrival) -> RequestOptions:
        try:
            return request_options(self.request_options, arrival.arguments)
        except Exception as error:  # a proposer's own model may fail in any way
            logger.warning("specplug serves request %s without its options: %s", arrival.id, error)
            return self.request_options()

    # -- steps ------------------------------------------------------------------------------

    def step(self, step: Step) -> Drafts:
        """Take in what the engine sampled and return drafts for the next step.

        Returns:
            Valid drafts, one row per request of ``step``, in its order.
        """
        seconds = self.length.step_began()
        wanted, verified, judged = self._follow(step, seconds)
        self._observe(verified, step)
        if judged.states:
            self.length.observe(judged.outcome())
        drafts = self._propose(step, wanted)
        self._report()
        self.length.step_done()
        return drafts

    def step_on_device(self, batch: DeviceBatch) -> Any:
        """Return the drafts of a :class:`DeviceProposer`; None if there are none.

        They are as the proposer made them: what they hold is not on the host to be looked at.

        Args:
            batch: all requests of the step.

        Returns:
            int64 tensor ``[n, K]``; values outside the vocabulary are no drafts.
        """
        self._report()
        if self.counters.switched_off:
            return None
        assert isinstance(self.proposer, DeviceProposer)
        started = time.perf_counter()
        result = self._call_proposer(self.proposer.propose_on_device, batch)
        self.counters.count_propose(time.perf_counter() - started)
        if result is not _RAISED:
            found = f"{getattr(result, 'dtype', type(result).__name__)} " + str(
                list(getattr(result, "shape", ()))
            )
            wanted = f"torch.int64 {[len(batch), batch.max_draft_tokens]}"
            if found != wanted:
                self._fault("wrong tensor", f"propose_on_device returned {found}, not {wanted}")
                result = _RAISED
        self._judge(result is not _RAISED)
        return None if result is _RAISED else result

    def limits(self, request_ids: Iterable[str]) -> list[int]:
        """Return the most draft tokens per step that each request wants; 0 for unknown ones."""
        states = map(self._states.get, request_ids)
        return [
            0 if state is None or state.failed else state.request.num_speculative_tokens
            for state in states
        ]

    def _follow(self, step: Step, seconds: float | None) -> tuple[_Wanted, _Verified, _Judged]:
        """Bring every request up to date and find out which of them can use a draft."""
        wanted, verified, judged = _Wanted(), _Verified(), _Judged()
        most = step.num_speculative_tokens
        num_tokens_computed, only_generating = 0, True
        for i, request_id in enumerate(step.request_ids):
            state = self._states.get(request_id)
            # An engine that schedules ahead may sample once more for a complete request.
            if state is None or state.complete or not step.sampled[i]:
                only_generating = False
                continue
            num_tokens = int(step.num_tokens[i])
            draft = step.verified.get(request_id, ())
            num_tokens_computed += 1 + len(draft)
            only_generating &= state.num_tokens > state.num_prompt_tokens
            if num_tokens < state.num_tokens:
                state = self._rewound(state, num_tokens)
            new = step.token_ids[step.rows[i], state.num_tokens : num_tokens].tolist()
            new = self._take_in(state, new, draft, verified)
            judged.add(state, len(draft), new)
            limit = _limit(state, most)
            if limit > 0 and not (state.failed or state.complete):
                wanted.states.append(state)
                wanted.positions.append(i)
                wanted.limits.append(limit)
        if seconds and only_generating and num_tokens_computed:
            self.length.costs.count_step(len(step.request_ids), num_tokens_computed, seconds)
        return wanted, verified, judged

    def _rewound(self, state: _State, num_tokens: int) -> _State:
        """Start a request afresh whose engine took tokens back (a failed KV transfer does)."""
        self.end(state.request.id)
        self.begin(state.arrival)
        fresh = self._states[state.request.id]
        fresh.num_tokens = num_tokens
        if self._recorder:
            self._recorder.drop(state.request.id)  # its beginning is recorded already
        return fresh

    def _take_in(
        self, state: _State, new: list[int], draft: Sequence[int], verified: _Verified
    ) -> list[int]:
        """Add a request's new tokens; return those that count."""
        if not new:
            return new
        new = _kept(new, state)
        accepted = _num_equal(draft, new)
        # The first output token comes from prefill, which verifies nothing.
        if state.num_tokens > state.num_prompt_tokens:
            self.counters.count_verified(len(draft), accepted)
        state.num_tokens += len(new)
        if self._recorder:
            self._recorder.add(state.request.id, new)
        if self._learns and not state.failed:
            verified.states.append(state)
            verified.drafts.append(list(draft))
            verified.accepted.append(accepted)
            verified.new.append(new)
        return new

    def _observe(self, verified: _Verified, step: Step) -> None:
        if not verified.states:
            return
        target, logits = step.target_token_ids, step.logits
        request_ids = [state.request.id for state in verified.states]
        acceptance = Acceptance(
            request_ids=request_ids,
            slots=np.array([state.request.slot for state in verified.states], np.int32),
            draft_token_ids=verified.drafts,
            num_accepted=np.array(verified.accepted, np.int32),
            new_token_ids=verified.new,
            target_token_ids=[target.get(one, ()) for one in request_ids] if target else None,
            logits=[logits[one] for one in request_ids] if logits else None,
        )
        if not self.counters.switched_off:
            self._call_proposer(self.proposer.observe, acceptance)
        self._notify("drafts_verified", acceptance=acceptance)

    def _propose(self, step: Step, wanted: _Wanted) -> Drafts:
        num_rows = len(step.request_ids)
        if self.counters.switched_off or not wanted.states:
            if self._step_faults and not self.counters.switched_off:
                self._judge(False)
            return Drafts.empty(num_rows)
        load = self.length.load(num_rows, sum(map(bool, step.sampled)))
        batch, wanted = self._asked(_batch(step, wanted), wanted, load)
        if not wanted.states:
            return Drafts.empty(num_rows)
        started = self._clock()
        result = self._call_proposer(self.proposer.propose, batch)
        seconds = self._clock() - started
        self.counters.count_propose(seconds)
        self.length.costs.count_draft(int(batch.max_draft_tokens.sum()), seconds)
        if result is _RAISED:
            drafts = Drafts.empty(len(batch))
        else:
            drafts = validated(result, batch, self.engine.vocab_size, self._fault)
            drafts = _without_tail(drafts, wanted.states)
        self._judge(bool(drafts.lengths.any()))
        self._note_proposed(wanted.states, drafts)
        drafts = self.length.choose(batch, drafts, load)
        drafts.token_ids.flags.writeable = drafts.lengths.flags.writeable = False
        self._notify("drafts_proposed", batch=batch, drafts=drafts)
        return _spread(drafts, wanted.positions, num_rows)

    def _asked(self, batch: Batch, wanted: _Wanted, load: Load) -> tuple[Batch, _Wanted]:
        """Leave out the requests that the length policy does not want drafts for."""
        kept, most = self.length.ask(batch, load)
        if len(kept) == len(batch):
            return replace(batch, max_draft_tokens=most), wanted
        return replace(batch.only(kept), max_draft_tokens=most), wanted.only(kept.tolist())

    def _note_proposed(self, states: Iterable[_State], drafts: Drafts) -> None:
        self.counters.num_proposed_tokens += int(drafts.lengths.sum())
        rows = drafts.to_lists() if self.length.learns else repeat([])
        for state, draft in zip(states, rows, strict=False):
            state.num_shown = state.num_tokens
            state.proposed = draft

    # -- faults -----------------------------------------------------------------------------

    def _call_proposer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            name = getattr(method, "__name__", "proposer")
            self._fault(f"{name} raised {type(error).__name__}", shown(error), error)
            return _RAISED

    def _fault(self, kind: str, detail: str, error: BaseException | None = None) -> None:
        """Count a fault; log the first of each kind, so that a log cannot be flooded."""
        self._step_faults += 1
        self.counters.num_faults += 1
        if kind not in self._faults_seen:
            self._faults_seen.add(kind)
            logger.error(
                "specplug proposer '%s': %s: %s. The request goes on without a draft; further "
                "faults of this kind are counted, not logged.",
                self.name, kind, detail, exc_info=error,
            )  # fmt: skip

    def _judge(self, drafted: bool) -> None:
        """Switch off a proposer that only fails: a step with a usable draft is no failure."""
        failed = self._step_faults > 0 and not drafted
        self._failed_steps = self._failed_steps + 1 if failed else 0
        self._step_faults = 0
        if self._failed_steps >= self.settings.max_consecutive_faults:
            self.counters.switched_off = True
            logger.error(
                "specplug proposer '%s' failed in %d steps in a row and is switched off for this "
                "process; the engine goes on without speculation.",
                self.name, self._failed_steps,
            )  # fmt: skip

    # -- reporting --------------------------------------------------------------------------

    def _notify(self, event: str, **arguments: Any) -> None:
        for observer in self._observers[event]:
            try:
                observer(proposer=self.name, **arguments)
            except Exception as error:
                kind = f"hook specplug_{event} raised {type(error).__name__}"
                if kind not in self._faults_seen:
                    self._faults_seen.add(kind)
                    logger.exception("%s; it is called again, but not logged again.", kind)

    def _report(self) -> None:
        self._publish()
        interval = self.settings.log_interval_seconds
        now = time.monotonic()
        if interval and now - self._last_log >= interval:
            self._last_log = now
            self.log()

    def _publish(self) -> None:
        self._publisher.publish(self.counters, self.num_requests, self.proposer.usage)

    def log(self) -> None:
        """Log the counters; only rank 0 does, for the others count the same."""
        if self.engine.rank == 0:
            logger.info(
                "specplug proposer '%s': %s, %d running",
                self.name, self.counters, self.num_requests,
            )  # fmt: skip

    def close(self) -> None:
        """Log the counters a last time and let the proposer release what it holds."""
        if self not in _running:
            return
        self.log()
        for request_id in list(self._states):
            self.end(request_id)
        self._call_proposer(self.proposer.close)
        if self._recorder:
            self._recorder.close()
        self._publisher.close()
        _running.discard(self)


def _close(reference: weakref.ref[Runtime]) -> None:
    runtime = reference()
    if runtime is not None:
        runtime.close()


def _limit(state: _State, most: int | None) -> int:
    """Return how many draft tokens a request can use in the next step; 0 or less for none.

    One less than what is left, as a step always yields a token of the target's own behind a draft.
    """
    limits = [
        state.request.num_speculative_tokens,
        state.request.max_num_tokens - state.num_tokens - 1,
    ]
    if most is not None:
        limits.append(most)
    not_to_end = state.num_prompt_tokens + state.arrival.min_output_tokens - state.num_tokens
    if not_to_end > 0:
        # Whether that token may be a stop token, vLLM's V1 runner decides by the length before
        # the draft. So it must not be the first that may.
        limits.append(not_to_end - 1)
    return min(limits)


def _kept(new: list[int], state: _State) -> list[int]:
    """Cut behind the first stop token or the last token: the engine throws away what follows."""
    stops = state.arrival.stop_token_ids
    if stops and not stops.isdisjoint(new):
        first_that_counts = state.num_prompt_tokens + state.arrival.min_output_tokens - 1
        for i, token in enumerate(new):
            if token in stops and state.num_tokens + i >= first_that_counts:
                state.complete = True
                new = new[: i + 1]
                break
    left = max(0, state.request.max_num_tokens - state.num_tokens)
    if len(new) >= left:
        state.complete = True
    return new[:left]


def _num_equal(draft: Sequence[int], new: Sequence[int]) -> int:
    """Return how many tokens at the beginning are the same."""
    count = 0
    for drafted, actual in zip(draft, new, strict=False):
        if drafted != actual:
            break
        count += 1
    return count


def _without_tail(drafts: Drafts, states: Iterable[_State]) -> Drafts:
    """Cut drafts behind a stop token: nothing after it can be kept."""
    for i, state in enumerate(states):
        stops = state.arrival.stop_token_ids
        length = int(drafts.lengths[i])
        if stops and length:
            for j, token in enumerate(drafts.token_ids[i, :length].tolist()):
                if token in stops:
                    drafts.lengths[i] = j + 1
                    break
    return drafts


def _batch(step: Step, wanted: _Wanted) -> Batch:
    states = wanted.states
    token_ids = step.token_ids.view()
    token_ids.flags.writeable = False

    def column(values: Iterable[int]) -> Int32Array:
        return np.fromiter(values, np.int32, len(states))

    return Batch(
        request_ids=[state.request.id for state in states],
        slots=column(state.request.slot for state in states),
        token_ids=token_ids,
        rows=np.asarray(step.rows, np.int32)[wanted.positions],
        num_tokens=column(state.num_tokens for state in states),
        num_new_tokens=column(state.num_tokens - state.num_shown for state in states),
        num_prompt_tokens=column(state.num_prompt_tokens for state in states),
        max_draft_tokens=column(wanted.limits),
    )


def _spread(drafts: Drafts, positions: list[int], num_rows: int) -> Drafts:
    """Put the drafts of some rows in their places among all rows of the engine's batch."""
    if len(positions) == num_rows:
        return drafts
    spread = Drafts.empty(num_rows, drafts.token_ids.shape[1])
    spread.token_ids[positions] = drafts.token_ids
    spread.lengths[positions] = drafts.lengths
    if drafts.probabilities is None:
        return spread
    shape = num_rows, *drafts.probabilities.shape[1:]
    probabilities = np.zeros(shape, drafts.probabilities.dtype)
    probabilities[positions] = drafts.probabilities
    return replace(spread, probabilities=probabilities)
