"""The conformance suite of length policies: one test for each rule."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

from specplug.length import Load, Outcome, StepCosts
from specplug.plugins import PluginManager
from specplug.proposer import Batch, Drafts, EngineInfo, Int32Array, Request
from specplug.testing.calls import broken
from specplug.testing.comparing import check_same, compare, first_difference
from specplug.testing.examples import Examples
from specplug.testing.memory import where_held
from specplug.testing.policy_simulation import (
    MakePolicy,
    PolicySchedule,
    PolicySimulation,
    policy_schedules,
)
from specplug.testing.process import play_elsewhere
from specplug.testing.proposers import ENGINE
from specplug.testing.schedules import IDS

_LARGE_BATCH = 256
_TRIES = 10


class LengthPolicyConformance:
    """What every length policy has to keep; subclass it, name it ``Test...``, and set ``spec``.

    Attributes:
        spec: the policy's spec.
        options: its options, as a user would write them.
        independent: whether what a request gets is the same in whatever order a batch is, and
            whatever requests there were before. False for a policy that shares out a step among
            its requests, or learns from one request for others.
        max_seconds: the most that one step of 256 requests may take.
        num_examples: how many schedules each rule is tried on.
    """

    spec: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    independent: ClassVar[bool] = True
    max_seconds: ClassVar[float] = 0.01
    num_examples: ClassVar[int] = 50

    @pytest.fixture
    def engine(self) -> EngineInfo:
        """The engine that is played."""
        return ENGINE

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """A function that returns a new policy each time, as the spec makes it."""
        if self.spec is None:
            pytest.fail(
                f"{type(self).__name__} says not what it tests: set the class attribute 'spec', or "
                "override the fixture 'make_policy'."
            )
        return maker(self.spec, self.options)

    # -- the rules --------------------------------------------------------------------------

    def test_determinism(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """Two instances that get the same calls decide the same."""
        __tracebackhide__ = True

        def check(schedule: PolicySchedule) -> None:
            runs = [
                PolicySimulation(make_policy, engine, title).play(schedule)
                for title in ("one instance", "another one")
            ]
            compare("determinism", "with the same calls", *runs)

        self._schedules(engine).check(check)

    def test_determinism_across_processes(self, engine: EngineInfo) -> None:
        """Two processes that hash in different ways decide the same."""
        __tracebackhide__ = True
        rule = "determinism_across_processes"
        if self.spec is None:
            pytest.skip("another process needs the class attribute 'spec'")
        examples = self._schedules(engine).values
        arguments = self.spec, self.options, engine, examples
        try:
            pickle.dumps(arguments)
        except Exception as error:
            pytest.skip(f"it cannot be sent to another process: {error}")
        try:
            elsewhere = play_elsewhere(lengths_of, arguments)
        except RuntimeError as error:
            raise broken(rule, f"a fresh process could not run it:\n{error}") from None
        here = lengths_of(*arguments)
        if here != elsewhere and here == lengths_of(*arguments):
            at = next(i for i, one in enumerate(here) if one != elsewhere[i])
            log = PolicySimulation(maker(self.spec, self.options), engine).play(examples[at]).log
            difference = first_difference(here[at], elsewhere[at])
            raise broken(rule, f"with another PYTHONHASHSEED: {difference}", log)

    def test_limits(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """Lengths are integers, one per request, and neither negative nor above their limit."""
        __tracebackhide__ = True

        def check(schedule: PolicySchedule) -> None:
            simulation = PolicySimulation(make_policy, engine).play(schedule)
            for fault in simulation.faults:
                if fault.error is None:
                    raise broken("limits", fault.what, simulation.log)

        self._schedules(engine).check(check)

    def test_faults(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """Nothing raises: not without drafts or scores, with costs of 0, or for K = 1."""
        __tracebackhide__ = True

        def check(schedule: PolicySchedule, engine: EngineInfo) -> None:
            simulation = PolicySimulation(make_policy, engine).play(schedule)
            simulation.new_life()
            for fault in simulation.faults:
                if fault.error is not None:
                    raise broken("faults", fault.what, simulation.log) from fault.error

        smallest = replace(engine, num_speculative_tokens=1)
        self._schedules(engine).check(lambda it: check(it, engine))
        self._schedules(smallest).check(lambda it: check(it, smallest))

    def test_no_state_after_end(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """When all requests have ended, none of them is held."""
        __tracebackhide__ = True

        def check(schedule: PolicySchedule) -> None:
            simulation = PolicySimulation(make_policy, engine).play(schedule)
            simulation.new_life()
            if held := where_held("policy", simulation.policy, IDS):
                raise broken("no_state_after_end", f"{held}, which has ended", simulation.log)

        self._schedules(engine).check(check)

    def test_new_after_end(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """A request whose id and slot were another's before is treated like the first."""
        __tracebackhide__ = True
        self._for_independent()

        def used(lives: tuple[PolicySchedule, PolicySchedule]) -> PolicySimulation:
            simulation = PolicySimulation(make_policy, engine, "an instance that was used")
            simulation.play(lives[0])
            simulation.new_life()
            return simulation.play(lives[1])

        def fresh(lives: tuple[PolicySchedule, PolicySchedule]) -> PolicySimulation:
            return PolicySimulation(make_policy, engine, "a new instance").play(lives[1])

        check_same(
            "new_after_end",
            "after requests that have ended",
            _pairs(engine, self.num_examples),
            fresh,
            used,
        )

    def test_order_independence(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """A batch in another order gets the same lengths."""
        __tracebackhide__ = True
        self._for_independent()

        def player(title: str, turned: bool) -> Callable[[PolicySchedule], PolicySimulation]:
            return lambda schedule: PolicySimulation(
                make_policy, engine, title, turned=turned
            ).play(schedule)

        check_same(
            "order_independence",
            "in another order",
            self._schedules(engine),
            player("in order", False),
            player("in another order", True),
        )

    def test_inputs_unchanged(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """It writes to nothing that it is given."""
        __tracebackhide__ = True

        def check(schedule: PolicySchedule) -> None:
            simulation = PolicySimulation(make_policy, engine, watch=True).play(schedule)
            if simulation.changed:
                raise broken(
                    "inputs_unchanged", f"it wrote {simulation.changed[0]}", simulation.log
                )

        self._schedules(engine).check(check)

    def test_cost(self, make_policy: MakePolicy, engine: EngineInfo) -> None:
        """A step of 256 requests takes no longer than ``max_seconds``."""
        __tracebackhide__ = True
        seconds = min(step_seconds(make_policy, engine) for _ in range(_TRIES))
        if seconds > self.max_seconds:
            raise broken(
                "cost",
                f"a step of {_LARGE_BATCH} requests takes {seconds * 1e3:.1f} ms, and "
                f"max_seconds allows {self.max_seconds * 1e3:g}",
            )

    def _schedules(self, engine: EngineInfo) -> Examples[PolicySchedule]:
        return _schedules(engine, self.num_examples)

    def _for_independent(self) -> None:
        if not self.independent:
            pytest.skip("it declares independent = False")


@cache
def _schedules(engine: EngineInfo, count: int) -> Examples[PolicySchedule]:
    return Examples(policy_schedules(engine), count)


@cache
def _pairs(engine: EngineInfo, count: int) -> Examples[tuple[PolicySchedule, PolicySchedule]]:
    one = policy_schedules(engine, max_events=10)
    return Examples(st.tuples(one, one), count)


def maker(spec: Any, options: Mapping[str, Any]) -> MakePolicy:
    """Return a function that makes a spec's length policy as an engine would."""
    plugins = PluginManager(discover=False)
    plugins.add(spec)
    return lambda: plugins.create_length_policy(spec.name, options)


def lengths_of(
    spec: Any, options: Mapping[str, Any], engine: EngineInfo, examples: Sequence[PolicySchedule]
) -> list[list[Any]]:
    """Return what is decided in some schedules, as valid JSON."""
    make = maker(spec, options)
    return [
        [[*key, lengths] for key, lengths in run.results.items()]
        for run in (PolicySimulation(make, engine).play(schedule) for schedule in examples)
    ]


def step_seconds(make: MakePolicy, engine: EngineInfo) -> float:
    """Return the seconds that all calls of a step of a large batch take."""
    n, k = _LARGE_BATCH, engine.num_speculative_tokens
    policy = make()
    policy.prepare(replace(engine, max_num_seqs=n))
    ids = [f"request-{i}" for i in range(n)]
    slots: Int32Array = np.arange(n, dtype=np.int32)

    def column(value: int) -> Int32Array:
        return np.full(n, value, np.int32)

    for i, name in enumerate(ids):
        policy.begin(Request(name, i, [0], engine.max_model_len, k))
    tokens: Int32Array = np.zeros((n, engine.max_model_len), np.int32)
    batch = Batch(ids, slots, tokens, slots, column(2), column(1), column(1), column(k))
    drafts = Drafts(np.zeros((n, k), np.int32), column(k), np.full((n, k), 0.5, np.float32))
    load = Load(n, n, n * k, StepCosts.line(0.02, 0.0001, 1e-6))
    outcome = Outcome(ids, slots, column(k), column(k), column(k // 2), column(k // 2 + 1))
    began = perf_counter()
    policy.ask(batch, load)
    policy.choose(batch, drafts, load)
    policy.observe(outcome)
    return perf_counter() - began
