"""The calls that a plugin got, as lines that a person can read, and what broken rules look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specplug.length import Load, Outcome
from specplug.proposer import Acceptance, Batch, Drafts, Request

_SHOWN = 24
"""Longer lists of tokens are shortened in the middle."""


class BrokenRuleError(AssertionError):
    """A plugin does not keep a rule: says which one, how, and with which calls it can be seen."""


class CallLog:
    """Notes the calls of one run."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Note a call."""
        self._lines.append(line)

    def result(self, text: str) -> None:
        """Note what the latest call returned or raised."""
        self._lines[-1] += f"  ->  {text}"

    def __str__(self) -> str:
        title = [f"# {self.title}"] if self.title else []
        return "\n".join(f"    {line}" for line in [*title, *self._lines])


def broken(rule: str, what: str, *logs: CallLog) -> BrokenRuleError:
    """Return the error that says that a rule is broken, and shows the calls that led to it."""
    calls = "\n\n".join(map(str, logs))
    shown = f"\n\nThe shortest sequence of calls that shows it:\n\n{calls}\n" if calls else ""
    return BrokenRuleError(f"rule '{rule}' is broken: {what}{shown}")


def show_tokens(tokens: Sequence[int] | Any) -> str:
    """Return a list of tokens as text, of a long one its ends."""
    values = [int(token) for token in tokens]
    if len(values) <= _SHOWN:
        return str(values)
    ends = f"{values[: _SHOWN // 2]}"[:-1], f"{values[-_SHOWN // 2 :]}"[1:]
    return f"{ends[0]}, ..., {ends[1]} ({len(values)} tokens)"


def show_request(request: Request) -> str:
    """Return the call ``begin(request)``."""
    options = request.options.model_dump(exclude_defaults=True)
    return (
        f"begin(Request({request.id!r}, slot={request.slot}, "
        f"prompt_token_ids={show_tokens(request.prompt_token_ids)}, "
        f"max_num_tokens={request.max_num_tokens}, "
        f"num_speculative_tokens={request.num_speculative_tokens}"
        + (f", options={options}" if options else "")
        + "))"
    )


def show_batch(batch: Batch) -> str:
    """Return what a batch holds, request by request."""
    return "; ".join(
        f"{request_id!r}: {show_tokens(batch.tokens(i))}, {batch.num_new_tokens[i]} new, "
        f"at most {batch.max_draft_tokens[i]}"
        for i, request_id in enumerate(batch.request_ids)
    )


def show_acceptance(acceptance: Acceptance) -> str:
    """Return what an acceptance holds, request by request."""
    targets = acceptance.target_token_ids or [()] * len(acceptance.request_ids)
    columns = zip(
        acceptance.request_ids,
        acceptance.draft_token_ids,
        acceptance.num_accepted,
        acceptance.new_token_ids,
        targets,
        strict=True,
    )
    return "; ".join(
        f"{request_id!r}: {accepted} of {list(draft)} accepted, new {list(new)}"
        + (f", target {list(target)}" if target else "")
        for request_id, draft, accepted, new, target in columns
    )


def show_outcome(outcome: Outcome) -> str:
    """Return what an outcome holds, request by request."""
    return "; ".join(
        f"{request_id!r}: {outcome.num_proposed[i]} proposed, {outcome.num_verified[i]} verified, "
        f"{outcome.num_matched[i]} of {outcome.num_judged[i]} judged came true"
        for i, request_id in enumerate(outcome.request_ids)
    )


def show_load(load: Load) -> str:
    """Return what the next step has to do."""
    costs = load.costs
    known = zip(costs.num_tokens, costs.seconds, strict=True)
    steps = ", ".join(f"{seconds:g} for {num_tokens:g}" for num_tokens, seconds in known)
    return (
        f"Load({load.num_running} running, {load.num_tokens} tokens, at most "
        f"{load.max_draft_tokens} draft tokens, costs by tokens: {steps}; to draft "
        f"{costs.per_draft:g} and {costs.per_draft_token:g} a token)"
    )


def show_drafts(drafts: Drafts) -> str:
    """Return drafts as one list per request."""
    return str(drafts.to_lists())
