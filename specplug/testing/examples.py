"""Examples of a hypothesis strategy: made once, checked by every rule, shortened when one fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from specplug.testing.calls import BrokenRuleError

_T = TypeVar("_T")


class Examples(Generic[_T]):
    """Examples of a strategy, always the same ones.

    ``@given`` stands on a function in here and not on the tests: on a method that several classes
    inherit it would fail, and no state is left from one example to the next. Making examples takes
    longer than checking them, so all rules share them.

    Args:
        strategy: makes them.
        count: how many.
    """

    def __init__(self, strategy: SearchStrategy[_T], count: int) -> None:
        self._strategy, self._count = strategy, count

    @cached_property
    def values(self) -> list[_T]:
        """All of them."""
        values: list[_T] = []
        self._run(values.append, Phase.generate)
        return values

    def check(self, check: Callable[[_T], None]) -> None:
        """Call ``check`` with each example.

        Raises:
            BrokenRuleError: from the shortest example that was found; ``check`` raised it.
        """
        __tracebackhide__ = True
        broken: BrokenRuleError | None = None
        for value in self.values:
            try:
                check(value)
            except BrokenRuleError as error:
                broken = self._shortened(check, error)
                break
        if broken is not None:
            raise type(broken)(*broken.args) from broken.__cause__

    def _shortened(self, check: Callable[[_T], None], found: BrokenRuleError) -> BrokenRuleError:
        latest = found

        def noting(value: _T) -> None:
            nonlocal latest
            try:
                check(value)
            except BrokenRuleError as error:
                latest = error
                raise

        try:
            self._run(noting, Phase.generate, Phase.shrink)
        except (BrokenRuleError, Flaky):
            # Flaky: a plugin that follows no rule at all may keep this one the second time.
            return latest
        return found

    def _run(self, function: Callable[[_T], None], *phases: Phase) -> None:
        @settings(
            max_examples=self._count,
            phases=phases,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(self._strategy)
        def run(example: _T) -> None:
            function(example)

        run()
