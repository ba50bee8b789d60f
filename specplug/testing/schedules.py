"""What an engine may do to a plugin, as data, and hypothesis strategies that make it.

A schedule is a list of events. Those about requests that are not alive are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specplug.proposer import EngineInfo

IDS = tuple(f"request-{letter}" for letter in "abcdef")
"""What requests are called: names that are nowhere else, more than a batch of the kit has."""


@dataclass(frozen=True)
class Begin:
    """A request arrives; one of this id that is alive ends first.

    Attributes:
        id: its id.
        prompt: its tokens.
        max_new_tokens: the most tokens it may get.
        num_speculative_tokens: the most draft tokens per step.
        options: what the request sets itself.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    num_speculative_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Move:
    """What happens to one request in a step.

    Attributes:
        id: the request.
        accepted: how many tokens of its draft are accepted, if it has that many.
        token: the target's own token behind them.
        verified: how many tokens of its draft are verified at most: length policies cut drafts.
        asked: whether the proposer is asked for its next draft.
    """

    id: str
    accepted: int
    token: int
    verified: int
    asked: bool = True


@dataclass(frozen=True)
class Step:
    """A step of the engine; alive requests without a move are preempted, or still in prefill."""

    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Rewind:
    """The engine takes back all but ``keep`` tokens of a request's output: it begins afresh."""

    id: str
    keep: int


@dataclass(frozen=True)
class End:
    """A request has finished or was aborted."""

    id: str


KINDS = ["step"] * 4 + ["begin"] * 2 + ["end", "rewind"]
MOSTLY = st.sampled_from([True, True, True, False])

Event = Begin | Step | Rewind | End
Schedule = list[Event]
Prompts = SearchStrategy[list[int]]


def tokens(engine: EngineInfo) -> SearchStrategy[int]:
    """Return a strategy of tokens: a few that come often, so that texts repeat themselves."""
    last = engine.vocab_size - 1
    return st.sampled_from(sorted({min(token, last) for token in (0, 1, 2, 3, last)}))


def prompts(engine: EngineInfo) -> Prompts:
    """Return a strategy of prompts that repeat themselves here and there."""
    some = st.lists(tokens(engine), min_size=1, max_size=8)
    return st.builds(lambda text, times: text * times, some, st.integers(1, 3))


def unusual_prompts(engine: EngineInfo) -> Prompts:
    """Return a strategy of prompts of one token, of one token over and over, and very long ones."""
    longest = engine.max_model_len
    lengths = st.sampled_from([1, 2, longest // 2, longest - 2, longest - 1, longest])
    repeated = st.builds(lambda token, length: [token] * length, tokens(engine), lengths)
    return st.one_of(repeated, prompts(engine))


@st.composite
def schedules(
    draw: Callable[[SearchStrategy[Any]], Any],
    engine: EngineInfo,
    prompts: Prompts,
    options: SearchStrategy[dict[str, Any]],
    max_events: int,
) -> Schedule:
    """Draw a schedule; what shows a mistake in fewer and simpler events is found by hypothesis.

    Args:
        draw: given by hypothesis.
        engine: the engine that is played.
        prompts: what requests begin with.
        options: what requests set themselves.
        max_events: the longest schedule.
    """
    k = engine.num_speculative_tokens
    # Examples are shortened towards what comes first: here, all of a draft, and no gaps.
    counts = st.sampled_from([k, k, k, k // 2, 1, 0])
    lengths = st.sampled_from([engine.max_model_len] * 3 + [8, 1])
    begin = st.tuples(prompts.map(tuple), lengths, counts, options)
    move = st.tuples(counts, tokens(engine), counts, MOSTLY)
    schedule: Schedule = []
    alive: list[str] = []
    first = ["begin"] * draw(st.integers(1, 3))
    then = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=max_events))
    for kind in first + then:
        if not alive or (kind == "begin" and len(alive) < len(IDS)):
            alive.append(next(name for name in IDS if name not in alive))
            schedule.append(Begin(alive[-1], *draw(begin)))
        elif kind == "end":
            name = draw(st.sampled_from(alive))
            alive.remove(name)
            schedule.append(End(name))
        elif kind == "rewind":
            schedule.append(Rewind(draw(st.sampled_from(alive)), draw(st.integers(0, 3))))
        else:
            moving = [name for name in alive if draw(MOSTLY)]
            schedule.append(Step(tuple(Move(name, *draw(move)) for name in moving)))
    return schedule
