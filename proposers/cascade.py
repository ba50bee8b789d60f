"""``cascade``: several proposers behind one name; each request takes one's draft.

A part that fails is left out from then on; the failure is the cascade's and is counted as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, create_model, field_validator, model_validator

from specplug.drafts import validated
from specplug.errors import CapabilityError
from specplug.proposer import (
    Acceptance,
    Batch,
    Drafts,
    EngineInfo,
    Int32Array,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    RequestOptions,
    Usage,
)
from specplug.proposers._columns import with_room

_PART_DEFAULTS: dict[str, dict[str, Any]] = {"prediction": {"fallback": None}}
"""The next part is its fallback."""
_MEMORY = 0.9
"""What a measurement still counts after the next one."""
_CLEARLY = 1.15
"""A later part is taken if it is expected to be better by this factor: less is chance."""
_PRIOR = 2.0
"""How many measurements of a request's own the worker's average counts as."""


class CascadeOptions(Options):
    """Which proposers, and which of their drafts is taken."""

    parts: tuple[str, ...] = Field(
        ("prediction", "suffix", "lookahead"), description="Registered proposers, best first."
    )
    part_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="The options of each part, by its name."
    )
    by: Literal["order", "expected"] = Field(
        "order",
        description="Which draft a request takes: of the first part that has one, or of the part "
        "that would have had most tokens accepted so far, in this request.",
    )

    @field_validator("parts")
    @classmethod
    def _some_and_different(cls, parts: tuple[str, ...]) -> tuple[str, ...]:
        if not parts or len(set(parts)) < len(parts):
            raise ValueError("name at least one part, and each only once")
        return parts

    @model_validator(mode="after")
    def _of_parts(self) -> CascadeOptions:
        if strange := self.part_options.keys() - set(self.parts):
            raise ValueError(f"part_options has options for {sorted(strange)}, which are no parts")
        return self


@dataclass(frozen=True, slots=True)
class Part:
    """One of the proposers, and the model of what requests may set for it."""

    name: str
    proposer: Proposer
    request_options: type[RequestOptions]


class Cascade(Proposer):
    """Asks its parts and takes one draft for each request.

    In order, a part is asked only for the requests that those before it have no draft for;
    by what is expected, all parts are asked for all requests.

    Args:
        parts: proposers that are there already.
        names: registered proposers to be made behind them, with their options.
        by: which draft is taken; see :class:`CascadeOptions`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        names: Mapping[str, Mapping[str, Any]],
        by: Literal["order", "expected"] = "order",
    ) -> None:
        self._parts = list(parts)
        self._names = names
        self._expectations = Expectations() if by == "expected" else None
        self._vocab_size = 0
        self._requests: set[str] = set()
        self._shown: dict[str, Int32Array] = {}  # by part, [slots]: tokens that it has seen

    def prepare(self, engine: EngineInfo) -> None:
        """Make and prepare the parts.

        Raises:
            SpecplugError: a part's name or options are wrong, or it refuses.
        """
        if engine.make_proposer is None:
            raise CapabilityError("This backend makes no proposers for others.")
        self._vocab_size = engine.vocab_size
        for name, options in self._names.items():
            proposer, spec = engine.make_proposer(name, options)
            self._parts.append(Part(name, proposer, spec.request_options))
        for part in self._parts:
            part.proposer.prepare(engine.for_parts())
            self._shown[part.name] = np.zeros(0, np.int32)
        self.uses = frozenset().union(*(part.proposer.uses for part in self._parts))
        models = [part.proposer.request_options or part.request_options for part in self._parts]
        self.request_options = create_model("CascadeRequestOptions", __base__=_leaves(models))

    def begin(self, request: Request) -> None:
        """Let every part meet the request."""
        self._requests.add(request.id)
        for name, shown in self._shown.items():
            self._shown[name] = with_room(shown, request.slot)
            self._shown[name][request.slot] = 0
        self._each(lambda part: part.begin(request))

    def observe(self, acceptance: Acceptance) -> None:
        """Let every part learn, whoever drafted."""
        if self._expectations:
            self._expectations.measure(acceptance)
        self._each(lambda part: part.observe(acceptance))

    def propose(self, batch: Batch) -> Drafts:
        """Take, for each request, one of the parts' drafts."""
        drafts = Drafts.empty(len(batch), int(batch.max_draft_tokens.max()))
        if self._expectations:
            self._take_best(batch, drafts, self._expectations)
        else:
            self._take_first(batch, drafts)
        return drafts

    def _take_first(self, batch: Batch, drafts: Drafts) -> None:
        def ask(part: Part) -> None:
            left = np.flatnonzero(drafts.lengths == 0)
            if len(left):
                _copy(self._offer(part, batch.only(left)), np.arange(len(left)), drafts, left)

        self._every(ask)

    def _take_best(self, batch: Batch, drafts: Drafts, expectations: Expectations) -> None:
        offers: list[tuple[str, Drafts]] = []
        self._every(lambda part: offers.append((part.name, self._offer(part, batch))))
        if not offers:
            return
        lengths = np.stack([offer.lengths for _, offer in offers])
        chosen = expectations.choose(batch, offers, lengths)
        for i, (_, offer) in enumerate(offers):
            rows = np.flatnonzero(chosen == i)
            _copy(offer, rows, drafts, rows)

    def _offer(self, part: Part, batch: Batch) -> Drafts:
        """Let a part draft; what is new to it may be more than what this step brought."""
        shown = self._shown[part.name]
        new = batch.num_tokens - shown[batch.slots]
        shown[batch.slots] = batch.num_tokens
        result = part.proposer.propose(replace(batch, num_new_tokens=new))
        return validated(result, batch, self._vocab_size, _refuse)

    def end(self, request_id: str) -> None:
        """Let every part forget the request."""
        self._requests.discard(request_id)
        if self._expectations:
            self._expectations.forget(request_id)
        self._each(lambda part: part.end(request_id))

    def close(self) -> None:
        """Let every part release what it holds."""
        self._each(lambda part: part.close())

    def usage(self) -> Usage:
        """Return the requests known and the bytes of all parts that count theirs."""
        usages = [part.proposer.usage() for part in self._parts]
        return Usage(len(self._requests), sum(one.num_bytes for one in usages if one))

    def _each(self, act: Callable[[Proposer], None]) -> None:
        self._every(lambda part: act(part.proposer))

    def _every(self, act: Callable[[Part], None]) -> None:
        """Act on every part; one that fails is left out, and the others are not affected."""
        errors: list[Exception] = []
        for part in list(self._parts):
            try:
                act(part)
            except Exception as error:
                error.add_note(f"The part '{part.name}' failed and is left out from now on.")
                self._parts.remove(part)
                errors.append(error)
        if errors:
            raise errors[0]


class Expectations:
    """How many tokens of each part's drafts would have been accepted, per request.

    Every part drafts in every step, so each is measured against what came, chosen or not. An
    average that forgets, which for a new request begins at the worker's.
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[str, list[int]]] = {}
        self._sums: dict[str, dict[str, tuple[float, float]]] = {}
        self._worker: dict[str, tuple[float, float]] = {}

    def choose(
        self, batch: Batch, offers: list[tuple[str, Drafts]], lengths: Int32Array
    ) -> Int32Array:
        """Return which offer each request takes, ``[n]``, and remember all of them."""
        lists = {name: offer.to_lists() for name, offer in offers}
        chosen = np.zeros(len(batch), np.int32)
        for i, request_id in enumerate(batch.request_ids):
            drafts = {name: rows[i] for name, rows in lists.items() if rows[i]}
            self._open[request_id] = drafts
            if drafts:
                chosen[i] = list(lists).index(self._best(request_id, drafts))
        return chosen

    def _best(self, request_id: str, names: Iterable[str]) -> str:
        best, most = "", -1.0
        for name in names:
            expected = self._expected(request_id, name)
            if expected > _CLEARLY * most:
                best, most = name, expected
        return best

    def measure(self, acceptance: Acceptance) -> None:
        """Compare what was on offer with what came."""
        for request_id, new in zip(acceptance.request_ids, acceptance.new_token_ids, strict=True):
            sums = self._sums.setdefault(request_id, {})
            for name, draft in self._open.pop(request_id, {}).items():
                right = 0
                while right < min(len(draft), len(new)) and draft[right] == new[right]:
                    right += 1
                sums[name] = _averaged(sums.get(name), right)
                self._worker[name] = _averaged(self._worker.get(name), right)

    def forget(self, request_id: str) -> None:
        """Free what belongs to the request."""
        self._open.pop(request_id, None)
        self._sums.pop(request_id, None)

    def _expected(self, request_id: str, name: str) -> float:
        total, count = self._sums.get(request_id, {}).get(name, (0.0, 0.0))
        worker_total, worker_count = self._worker.get(name, (1.0, 1.0))
        return (total + _PRIOR * worker_total / worker_count) / (count + _PRIOR)


def _copy(offer: Drafts, of: NDArray[np.intp], drafts: Drafts, to: NDArray[np.intp]) -> None:
    """Take the drafts in the rows ``of`` of an offer for the rows ``to``."""
    drafts.token_ids[to, : offer.token_ids.shape[1]] = offer.token_ids[of]
    drafts.lengths[to] = offer.lengths[of]


def _averaged(so_far: tuple[float, float] | None, value: int) -> tuple[float, float]:
    total, count = so_far or (0.0, 0.0)
    return total * _MEMORY + value, count * _MEMORY + 1


def _refuse(kind: str, detail: str) -> None:
    raise ValueError(f"{kind}: {detail}")


def _leaves(models: Sequence[type[RequestOptions]]) -> tuple[type[RequestOptions], ...]:
    """Return the models without those that others inherit from, each once."""
    different = list(dict.fromkeys(models))
    return tuple(
        model
        for model in different
        if not any(other is not model and issubclass(other, model) for other in different)
    )


class CascadeProposer(Cascade):
    """A cascade of the parts that the options name."""

    def __init__(self, options: CascadeOptions) -> None:
        names = {
            name: _PART_DEFAULTS.get(name, {}) | options.part_options.get(name, {})
            for name in options.parts
        }
        super().__init__([], names, options.by)


SPEC = ProposerSpec(
    name="cascade",
    factory="specplug.proposers.cascade:CascadeProposer",
    options=CascadeOptions,
    summary="Several proposers: each request takes the first draft, or the one expected best.",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
