"""Drives the real runtime through recorded requests, as an engine would that says the same."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn

import numpy as np

from specplug.config import REQUEST_PREFIX, Settings
from specplug.errors import OptionError
from specplug.metrics import Counters
from specplug.plugins import PluginManager
from specplug.proposer import Batch, Capability, EngineInfo, Int32Array
from specplug.replay.records import Record
from specplug.runtime import Arrival, Runtime, Step

PROVIDES = frozenset({Capability.REQUEST_OPTIONS})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposer to measure.

    Attributes:
        proposer: its registered name.
        options: its options; those left out have their defaults.
    """

    proposer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{name}={_shown(value)}" for name, value in self.options.items())
        return f"{self.proposer}:{options}" if options else self.proposer


@dataclass(frozen=True, slots=True)
class Result:
    """What one proposer did at one K.

    Attributes:
        candidate: the proposer and its options.
        num_speculative_tokens: K.
        num_tokens: output tokens, the first of each record left out.
        counters: as the runtime counted.
        drafted_per_pos: how many drafts reached each position, ``[K]``.
        call_seconds: each call of ``propose``, ``[calls]``.
        call_requests: for how many requests each call was, ``[calls]``.
        state_bytes: the most that the proposer held, or None if it does not count.
        num_records: requests.
        length_policy: what decided how much of a draft was verified.
        speed: as a multiple of no speculation, under the assumed cost of a token.
    """

    candidate: Candidate
    num_speculative_tokens: int
    num_tokens: int
    counters: Counters
    drafted_per_pos: list[int]
    call_seconds: list[float]
    call_requests: list[int]
    state_bytes: int | None
    num_records: int
    length_policy: str = "fixed"
    speed: float = 1.0


def parse_candidate(text: str) -> Candidate:
    """Read ``name`` or ``name:option=value,...``; a value is JSON or, failing that, text.

    Raises:
        OptionError: an option has no value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in _split(rest):
        option, equals, value = part.partition("=")
        if not (option and equals):
            raise OptionError(
                f"'{part}' in --proposer {text} is no option.",
                hint="Options are written as in --proposer suffix:min_confidence=0.1,cache_bytes=0",
            )
        options[option.strip()] = _value(value)
    return Candidate(name, options)


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_json)
    except ValueError:
        return text


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is Python's, not JSON's")


def _split(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets or quotes."""
    depth, quoted, begin = 0, False, 0
    for i, letter in enumerate(text):
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            yield text[begin:i]
            begin = i + 1
    if text[begin:]:
        yield text[begin:]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def replay(
    records: Sequence[Record],
    candidate: Candidate,
    num_speculative_tokens: int,
    *,
    concurrency: int = 1,
    length_policy: str = "fixed",
    token_cost: float = 0.0,
    vocab_size: int | None = None,
    plugins: PluginManager | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Result:
    """Serve every record again, through the real runtime, and count.

    The first output token comes from prefill and is no step. A step verifies the draft against
    what was recorded: the tokens up to the first difference are accepted, and one more follows
    if the record goes on. What a draft has beyond the record's end is not accepted.

    Args:
        records: what was served.
        candidate: the proposer.
        num_speculative_tokens: K.
        concurrency: how many records are served at a time; a finished one makes room for the
            next.
        length_policy: what decides how much of a draft is verified.
        token_cost: what each token adds to a step, as a share of a step without any; the time that
            drafting takes is left out.
        vocab_size: of the model; by default what the records need.
        plugins: where to look the proposer up; by default everything installed.
        progress: called after each record.

    Raises:
        SpecplugError: an unknown name, wrong options, a vocabulary too small for the records.
    """
    needed = _vocab_size(records)
    if vocab_size is not None and vocab_size < needed:
        raise OptionError(
            f"The vocabulary size is {vocab_size}, but the records hold the token {needed - 1}.",
            hint="Give the model's own, or none.",
        )
    longest = max(len(record.token_ids) for record in records)
    engine = EngineInfo(
        backend="replay",
        vocab_size=vocab_size or needed,
        # An engine does not know where the output will end: no draft is cut to that.
        max_model_len=longest + num_speculative_tokens + 1,
        max_num_seqs=concurrency,
        num_speculative_tokens=num_speculative_tokens,
        provides=PROVIDES,
    )
    settings = Settings(
        options=dict(candidate.options), length_policy=length_policy, log_interval_seconds=0
    )
    time_ = _AssumedTime(token_cost)
    runtime = Runtime(candidate.proposer, engine, settings, plugins, clock=lambda: time_.now)
    served = _Served(runtime, time_)
    try:
        served.serve(records, progress)
    finally:
        served.runtime.close()
    return Result(
        candidate,
        num_speculative_tokens,
        sum(len(record.token_ids) - record.num_prompt_tokens - 1 for record in records),
        served.runtime.counters,
        served.drafted_per_pos,
        served.call_seconds,
        served.call_requests,
        served.state_bytes,
        len(records),
        length_policy,
        _seconds_without(records, concurrency, token_cost) / time_.now if time_.now else 1.0,
    )


@dataclass(slots=True)
class _AssumedTime:
    """The engine's clock: a step takes 1 and what its tokens cost."""

    token_cost: float
    now: float = 0.0

    def step(self, num_tokens: int) -> None:
        """Let a step pass that computes so many tokens; with none there is no step."""
        if num_tokens:
            self.now += 1 + self.token_cost * num_tokens


def _seconds_without(records: Sequence[Record], concurrency: int, token_cost: float) -> float:
    """Return the time in which the engine would have served the records without speculation."""
    waiting = deque(len(record.token_ids) - record.num_prompt_tokens - 1 for record in records)
    assumed, running = _AssumedTime(token_cost), list[int]()
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.popleft())
        running = [left - 1 for left in running if left]
        assumed.step(len(running))
    return assumed.now


def _vocab_size(records: Sequence[Record]) -> int:
    texts = [(record.token_ids, record.reference_token_ids) for record in records]
    return 1 + max(int(ids.max()) for pair in texts for ids in pair if ids is not None and len(ids))


@dataclass(slots=True)
class _Running:
    """A record that is being served, and its row of the engine's matrix: what was said so far."""

    id: str
    record: Record
    row: Int32Array
    num_tokens: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.num_tokens == len(self.record.token_ids)

    def say(self, count: int) -> None:
        """Add the next ``count`` tokens, or as many as there are."""
        said = slice(self.num_tokens, self.num_tokens + count)
        tokens = self.record.token_ids[said]
        self.row[said.start : said.start + len(tokens)] = tokens
        self.num_tokens += len(tokens)

    def verify(self) -> None:
        """Accept what is as recorded, and take one token more."""
        rest = self.record.token_ids[self.num_tokens : self.num_tokens + len(self.draft)]
        accepted = 0
        for drafted, recorded in zip(self.draft, rest.tolist(), strict=False):
            if drafted != recorded:
                break
            accepted += 1
        self.say(accepted + 1)


class _Served:
    """The engine's side: rows of a matrix, each of which serves one record after another."""

    def __init__(self, runtime: Runtime, assumed: _AssumedTime) -> None:
        engine = runtime.engine
        self.runtime = runtime
        self._assumed = assumed
        self.call_seconds: list[float] = []
        self.call_requests: list[int] = []
        self.drafted_per_pos = [0] * engine.num_speculative_tokens
        self.state_bytes: int | None = None
        self._matrix: Int32Array = np.zeros((engine.max_num_seqs, engine.max_model_len), np.int32)
        timed = self._timed(runtime.proposer.propose)
        runtime.proposer.propose = timed  # type: ignore[assignment, method-assign]

    def serve(self, records: Sequence[Record], progress: Callable[[], None]) -> None:
        """Serve all of them."""
        waiting = deque(enumerate(records))
        rows: dict[int, _Running] = {}
        while waiting or rows:
            for row in range(len(self._matrix)):
                if waiting and row not in rows:
                    rows[row] = self._begin(row, *waiting.popleft())
            self._step(rows)
            self._assumed.step(sum(1 + len(one.draft) for one in rows.values() if not one.finished))
            for row, running in list(rows.items()):
                if running.finished:
                    self.runtime.end(running.id)
                    del rows[row]
                    progress()
                else:
                    running.verify()

    def _begin(self, row: int, number: int, record: Record) -> _Running:
        # Two records may have one id.
        running = _Running(f"{number}:{record.id}", record, self._matrix[row])
        arguments, reference = {}, record.reference_token_ids
        known = self.runtime.request_options.model_fields
        if reference is not None and "prediction_token_ids" in known:
            arguments[f"{REQUEST_PREFIX}prediction_token_ids"] = reference.tolist()
        prompt = record.token_ids[: record.num_prompt_tokens].tolist()
        longest = self.runtime.engine.max_model_len
        self.runtime.begin(Arrival(running.id, prompt, longest, arguments=arguments))
        running.say(record.num_prompt_tokens + 1)
        return running

    def _step(self, rows: Mapping[int, _Running]) -> None:
        """Let the runtime take in what was said, and draft."""
        all_running = list(rows.values())
        drafts = self.runtime.step(
            Step(
                request_ids=[running.id for running in all_running],
                token_ids=self._matrix,
                rows=np.array(list(rows), np.int32),
                num_tokens=[running.num_tokens for running in all_running],
                sampled=[True] * len(rows),
                verified={running.id: running.draft for running in all_running if running.draft},
            )
        )
        usage = self.runtime.proposer.usage()
        if usage is not None:
            self.state_bytes = max(self.state_bytes or 0, usage.num_bytes)
        for running, draft in zip(all_running, drafts.to_lists(), strict=True):
            if not running.finished:
                running.draft = draft
                for position in range(len(draft)):
                    self.drafted_per_pos[position] += 1

    def _timed(self, propose: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        @wraps(propose)
        def timed(batch: Batch) -> Any:
            started = time.perf_counter()
            try:
                return propose(batch)
            finally:
                self.call_seconds.append(time.perf_counter() - started)
                self.call_requests.append(len(batch))

        return timed
