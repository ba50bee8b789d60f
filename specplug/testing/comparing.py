"""Whether two ways of playing a schedule come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from specplug.testing.calls import BrokenRuleError, CallLog, broken
from specplug.testing.examples import Examples
from specplug.testing.results import Fault

_T = TypeVar("_T")
_REPLAYS = 10
"""How often chance could play the same."""


class Run(Protocol):
    """What was played.

    Attributes:
        results: by step and request, what the plugin said.
        faults: what it raised or returned that it should not.
        log: the calls.
    """

    results: dict[tuple[int, str], Any]
    faults: list[Fault]
    log: CallLog


def compare(rule: str, how: str, one: Run, other: Run) -> None:
    """Check that two runs have the same results; faults are for other rules.

    Raises:
        BrokenRuleError: they have not.
    """
    if one.results != other.results and not (one.faults or other.faults):
        columns = [
            sorted((*key, said) for key, said in run.results.items()) for run in (one, other)
        ]
        raise broken(
            rule, f"{how} the result differs: {first_difference(*columns)}", one.log, other.log
        )


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Say where two lists of (step, request, result) part."""
    for (step, request_id, first), (_, _, second) in zip(one, other, strict=False):
        if first != second:
            return f"for {request_id!r} in step {step}, {first} and {second}"
    return "there are results for fewer requests"


def check_same(
    rule: str,
    how: str,
    examples: Examples[_T],
    reference: Callable[[_T], Run],
    other: Callable[[_T], Run],
) -> None:
    """Check that two ways of playing examples come to the same.

    A plugin that does not even say the same when played the same way breaks another rule, not this.

    Raises:
        BrokenRuleError: from the shortest example with a difference.
    """
    __tracebackhide__ = True
    latest: list[tuple[_T, Run]] = []

    def check(example: _T) -> None:
        one = reference(example)
        latest[:] = [(example, one)]
        compare(rule, how, one, other(example))

    try:
        examples.check(check)
    except BrokenRuleError:
        example, one = latest[0]
        if all(reference(example).results == one.results for _ in range(_REPLAYS)):
            raise
