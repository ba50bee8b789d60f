"""Runs a check on many examples and reports the shortest that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from specplug.testing.calls import BrokenRuleError

_T = TypeVar("_T")


def _settings(num_examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=num_examples,
        phases=phases,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )


def for_all(examples: SearchStrategy[_T], check: Callable[[_T], None], num_examples: int) -> None:
    """Call ``check`` with examples, always the same ones.

    ``@given`` stands on a function in here and not on the tests: on a method that several classes
    inherit it would fail, and no state is left from one example to the next.

    Raises:
        BrokenRuleError: from the shortest example that was found.
    """
    __tracebackhide__ = True
    latest: BrokenRuleError | None = None

    @_settings(num_examples, Phase.generate, Phase.shrink)
    @given(examples)
    def run(example: _T) -> None:
        nonlocal latest
        try:
            check(example)
        except BrokenRuleError as error:
            latest = error
            raise

    try:
        run()
    except BrokenRuleError as error:
        latest = error
    except Flaky:
        # A plugin that follows no rule at all may keep this one the second time.
        if latest is None:
            raise
    if latest is not None:
        raise type(latest)(*latest.args) from latest.__cause__


def some(examples: SearchStrategy[_T], num_examples: int) -> list[_T]:
    """Return some examples, always the same ones."""
    found: list[_T] = []

    @_settings(num_examples, Phase.generate)
    @given(examples)
    def run(example: _T) -> None:
        found.append(example)

    run()
    return found
