"""The conformance suite of proposers: one test for each rule."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from specplug.plugins import PluginManager
from specplug.proposer import (
    Capability,
    EngineInfo,
    FunctionProposer,
    ProposerSpec,
    RequestOptions,
    Usage,
)
from specplug.testing.calls import broken
from specplug.testing.comparing import check_same, compare, first_difference
from specplug.testing.cost import step_seconds
from specplug.testing.examples import Examples
from specplug.testing.memory import where_held
from specplug.testing.process import play_elsewhere
from specplug.testing.schedules import (
    IDS,
    Begin,
    End,
    Move,
    Prompts,
    Schedule,
    Step,
    prompts,
    schedules,
    unusual_prompts,
)
from specplug.testing.simulation import MakeProposer, Simulation, prepared

_T = TypeVar("_T")
ENGINE = EngineInfo(
    backend="conformance",
    vocab_size=64,
    max_model_len=96,
    max_num_seqs=4,
    num_speculative_tokens=4,
    provides=frozenset({Capability.REQUEST_OPTIONS, Capability.TARGET_TOKENS}),
)
"""The engine that is played; small, so that its limits are met."""
_EXAMPLES: dict[Any, Any] = {}

_TIMES = 8
"""What a step may take with a long context, as a multiple of one with a short context."""
_SECONDS = 200e-6
"""And what it may take more: less is noise, or a copy in compiled code."""
_TRIES = 5


class ProposerConformance:
    """What every proposer has to keep; subclass it, name the class ``Test...``, and set ``spec``.

    Every test is a rule. The attributes say what kind of proposer it is; fixtures and methods may
    be overridden.

    Attributes:
        spec: the proposer's spec, or its function decorated with :func:`specplug.proposer`.
        options: its options, as a user would write them.
        independent: whether a request's drafts are the same whatever other requests there are or
            were. False for a proposer that learns from one request for others.
        resumes_exactly: whether a draft is the same whether or not one was asked for in earlier
            steps. False for a proposer that learns from its own earlier drafts.
        rescans: whether a step may take longer the longer the text is. A function decorated with
            :func:`specplug.proposer` may: it gets the whole text each time.
        kept_bytes: the bytes that ``usage`` may show when no request is alive, such as a cache's.
        long_context: the tokens of a long text, for its cost.
        num_examples: how many schedules each rule is tried on.
    """

    spec: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    independent: ClassVar[bool] = True
    resumes_exactly: ClassVar[bool] = True
    rescans: ClassVar[bool] = False
    kept_bytes: ClassVar[int] = 0
    long_context: ClassVar[int] = 131_072
    num_examples: ClassVar[int] = 50

    # -- what may be overridden -------------------------------------------------------------

    @pytest.fixture
    def engine(self) -> EngineInfo:
        """The engine that is played."""
        return ENGINE

    @pytest.fixture
    def make_proposer(self, engine: EngineInfo) -> MakeProposer:
        """A function that returns a new proposer each time, as the spec makes it."""
        if self._spec is None:
            pytest.fail(
                f"{type(self).__name__} says not what it tests: set the class attribute 'spec', or "
                "override the fixture 'make_proposer'."
            )
        return maker(self._spec, self.options, engine)

    def prompts(self, engine: EngineInfo) -> Prompts:
        """Return a strategy of prompts that the proposer can draft for."""
        return prompts(engine)

    def request_options(self, engine: EngineInfo) -> SearchStrategy[dict[str, Any]]:
        """Return a strategy of what requests set themselves."""
        return st.just({})

    # -- the rules --------------------------------------------------------------------------

    def test_drafts(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """It drafts something in these schedules: else they say nothing about it."""
        __tracebackhide__ = True
        for schedule in self._schedules(engine).values:
            simulation = self._simulate(make_proposer, engine).play(schedule)
            if any(simulation.results.values()) or simulation.faults:
                return  # faults are for other rules
        raise broken(
            "drafts",
            "not one token was drafted in any schedule. Override 'prompts', 'request_options' or "
            "'engine' to make some that it can draft for.",
        )

    def test_determinism(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """Two instances that get the same calls draft the same."""
        __tracebackhide__ = True

        def check(schedule: Schedule) -> None:
            runs = [
                self._player(make_proposer, engine, title)(schedule)
                for title in ("one instance", "another one")
            ]
            compare("determinism", "with the same calls", *runs)

        self._schedules(engine).check(check)

    def test_determinism_across_processes(self, engine: EngineInfo) -> None:
        """Two processes that hash in different ways draft the same."""
        __tracebackhide__ = True
        if self._spec is None:
            pytest.skip("another process needs the class attribute 'spec'")
        examples = self._schedules(engine).values
        arguments = self._spec, self.options, engine, examples
        try:
            pickle.dumps(arguments)
        except Exception as error:
            pytest.skip(f"it cannot be sent to another process, see test_pickling: {error}")
        rule = "determinism_across_processes"
        try:
            elsewhere = play_elsewhere(drafts_of, arguments)
        except RuntimeError as error:
            raise broken(rule, f"a fresh process could not run it:\n{error}") from None
        here = drafts_of(*arguments)
        if here != elsewhere and here != drafts_of(*arguments):
            return  # nor is it within a process: see test_determinism
        for first, second, schedule in zip(here, elsewhere, examples, strict=True):
            if first != second:
                simulation = self._simulate(maker(self._spec, self.options, engine), engine)
                raise broken(
                    rule,
                    "a process with another PYTHONHASHSEED drafts differently: "
                    f"{first_difference(first, second)}. Perhaps the order of a set decides.",
                    simulation.play(schedule).log,
                )

    def test_limits(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """Drafts are integers in the vocabulary, one per request, and not too long."""
        __tracebackhide__ = True

        def check(schedule: Schedule) -> None:
            simulation = self._simulate(make_proposer, engine).play(schedule)
            for fault in simulation.faults:
                if fault.error is None:
                    raise broken("limits", fault.what, simulation.log)

        self._schedules(engine, unusual=True).check(check)

    def test_faults(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """Nothing raises, however unusual the requests are, or the engine that it accepts."""
        __tracebackhide__ = True

        def check(schedule: Schedule, engine: EngineInfo) -> None:
            simulation = self._simulate(make_proposer, engine).play(schedule)
            simulation.end_all()
            for fault in simulation.faults:
                if fault.error is not None:
                    raise broken("faults", fault.what, simulation.log) from fault.error

        self._schedules(engine, unusual=True).check(lambda it: check(it, engine))
        smallest = replace(engine, vocab_size=1, num_speculative_tokens=1)
        if _accepts(make_proposer, smallest):
            self._schedules(smallest, unusual=True).check(lambda it: check(it, smallest))
        long = replace(engine, max_model_len=self.long_context)
        if _accepts(make_proposer, long):
            check(_long_prompt(long), long)

    def test_no_state_after_end(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """When all requests have ended, nothing of them is held."""
        __tracebackhide__ = True

        def check(schedule: Schedule) -> None:
            simulation = self._simulate(make_proposer, engine)
            before = simulation.proposer.usage()
            simulation.play(schedule)
            simulation.end_all()
            after = simulation.proposer.usage()
            if left := self._left(before, after):
                raise broken("no_state_after_end", left, simulation.log)
            if held := where_held("proposer", simulation.proposer, IDS):
                raise broken("no_state_after_end", f"{held}, which has ended", simulation.log)

        self._schedules(engine).check(check)

    def test_new_after_end(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """A request whose id and slot were another's before is drafted for like the first."""
        __tracebackhide__ = True
        self._for_independent()

        def used(lives: tuple[Schedule, Schedule]) -> Simulation:
            simulation = self._simulate(make_proposer, engine, "an instance that was used")
            simulation.play(lives[0])
            simulation.new_life()
            return simulation.play(lives[1])

        def fresh(lives: tuple[Schedule, Schedule]) -> Simulation:
            return self._simulate(make_proposer, engine, "a new instance").play(lives[1])

        check_same(
            "new_after_end",
            "after requests that have ended",
            self._examples(("pairs", engine), self._pairs(engine)),
            fresh,
            used,
        )

    def test_order_independence(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """A batch in another order gets the same drafts."""
        __tracebackhide__ = True
        self._for_independent()
        check_same(
            "order_independence",
            "in another order",
            self._schedules(engine),
            self._player(make_proposer, engine, "in order"),
            self._player(make_proposer, engine, "in another order", grouping=_turned),
        )

    def test_batch_independence(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """Requests in batches of one get the same drafts as in one batch."""
        __tracebackhide__ = True
        self._for_independent()
        check_same(
            "batch_independence",
            "one by one instead of in one batch",
            self._schedules(engine),
            self._player(make_proposer, engine, "in one batch"),
            self._player(make_proposer, engine, "one by one", grouping=_one_by_one),
        )

    def test_resume(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """A request that was not asked for, for a while or from the start, is drafted for as if."""
        __tracebackhide__ = True
        if not self.resumes_exactly:
            pytest.skip("it declares resumes_exactly = False")
        # One by one: or the others would have other neighbours.
        asked = {"grouping": _one_by_one, "ask_always": True}
        check_same(
            "resume",
            "after steps in which it was not asked",
            self._schedules(engine),
            self._player(make_proposer, engine, "asked in every step", **asked),
            self._player(make_proposer, engine, "not asked in some", grouping=_one_by_one),
        )

    def test_reads(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """It reads only the tokens that a batch says are valid, and only during the call."""
        __tracebackhide__ = True
        noise = "other rows, behind num_tokens, and all of it after the call: noise"
        check_same(
            "reads",
            "when what it must not read changes",
            self._schedules(engine),
            self._player(make_proposer, engine, "nothing else there"),
            self._player(make_proposer, engine, noise, scribble=True),
        )

    def test_inputs_unchanged(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """It writes to nothing that it is given."""
        __tracebackhide__ = True

        def check(schedule: Schedule) -> None:
            simulation = self._simulate(make_proposer, engine, watch=True).play(schedule)
            if simulation.changed:
                raise broken(
                    "inputs_unchanged", f"it wrote {simulation.changed[0]}", simulation.log
                )

        self._schedules(engine).check(check)

    def test_cost_growth(self, make_proposer: MakeProposer, engine: EngineInfo) -> None:
        """A step costs what is new, not what is there."""
        __tracebackhide__ = True
        if self.rescans or isinstance(make_proposer(), FunctionProposer):
            pytest.skip("it may read the whole text in each step")
        for _ in range(_TRIES):  # a busy machine makes things slower, never faster
            short, long = step_seconds(make_proposer, engine, self.long_context)
            if long <= _TIMES * short + _SECONDS:
                return
        raise broken(
            "cost_growth",
            f"a step takes {long * 1e6:.0f} µs with {self.long_context} tokens of text and "
            f"{short * 1e6:.0f} µs with a 128th of that. Keep an index, and add to it the "
            "batch.num_new_tokens at the end; or declare rescans = True.",
        )

    def test_pickling(self, engine: EngineInfo) -> None:
        """Spec and options survive being pickled, and still make a proposer."""
        __tracebackhide__ = True
        if self._spec is None:
            pytest.skip("pickling is about the class attribute 'spec'")
        try:
            spec, options = pickle.loads(pickle.dumps((self._spec, self.options)))
        except Exception as error:
            raise broken(
                "pickling",
                f"{type(error).__name__}: {error}. Engines send the spec to their workers: give "
                "its factory as 'package.module:attribute', or define it at a module's top level.",
            ) from error
        if (spec, options) != (self._spec, self.options):
            raise broken("pickling", f"{self._spec} with {self.options} comes back as another")
        maker(spec, options, engine)()

    # -- helpers ----------------------------------------------------------------------------

    @property
    def _spec(self) -> Any:
        return type(self).spec  # looked up in an instance, a function would be a method

    def _schedules(self, engine: EngineInfo, *, unusual: bool = False) -> Examples[Schedule]:
        texts = self.prompts(engine)
        if unusual:
            texts = st.one_of(texts, unusual_prompts(engine))
        strategy = schedules(engine, texts, self.request_options(engine), max_events=16)
        return self._examples((unusual, engine), strategy)

    def _pairs(self, engine: EngineInfo) -> SearchStrategy[tuple[Schedule, Schedule]]:
        options = self.request_options(engine)
        one = schedules(engine, self.prompts(engine), options, max_events=10)
        return st.tuples(one, one)

    def _examples(self, what: object, strategy: SearchStrategy[_T]) -> Examples[_T]:
        """Return the examples of a strategy; classes that override nothing have the same."""
        own = {"prompts", "request_options"} & {
            name for kind in type(self).__mro__[:-2] for name in vars(kind)
        }
        key = type(self) if own else None, what, self.num_examples
        examples: Examples[_T] = _EXAMPLES.setdefault(key, Examples(strategy, self.num_examples))
        return examples

    def _simulate(
        self, make: MakeProposer, engine: EngineInfo, title: str = "", **how: Any
    ) -> Simulation:
        return Simulation(make, engine, title, request_options=options_model(self._spec), **how)

    def _for_independent(self) -> None:
        if not self.independent:
            pytest.skip("it declares independent = False")

    def _player(
        self, make: MakeProposer, engine: EngineInfo, title: str, **how: Any
    ) -> Callable[[Schedule], Simulation]:
        return lambda schedule: self._simulate(make, engine, title, **how).play(schedule)

    def _left(self, before: Usage | None, after: Usage | None) -> str:
        if before is None or after is None:
            return ""
        if after.num_requests != before.num_requests:
            return f"usage() counts {after.num_requests} requests, and {before.num_requests} before"
        if after.num_bytes > before.num_bytes + self.kept_bytes:
            return (
                f"usage() counts {after.num_bytes} bytes and {before.num_bytes} before; "
                f"kept_bytes is {self.kept_bytes}"
            )
        return ""


def options_model(spec: Any) -> type[RequestOptions]:
    """Return the model of a spec's per-request options."""
    spec = getattr(spec, "specplug_spec", spec)
    return spec.request_options if isinstance(spec, ProposerSpec) else RequestOptions


def maker(spec: Any, options: Mapping[str, Any], engine: EngineInfo) -> MakeProposer:
    """Return a function that makes a spec's proposer as an engine would."""
    plugins = PluginManager(discover=False)
    plugins.add(spec)
    name = getattr(spec, "specplug_spec", spec).name
    return lambda: plugins.create(name, options, engine.provides)[0]


def draft(
    spec: Any,
    tokens: Sequence[int],
    *,
    max_tokens: int = ENGINE.num_speculative_tokens,
    options: Mapping[str, Any] | None = None,
    engine: EngineInfo = ENGINE,
) -> list[int]:
    """Return what a new proposer drafts behind a text, for tests of what it drafts.

    Args:
        spec: the proposer's spec or decorated function.
        tokens: the text, two tokens or more; its last token is the first of the output.
        max_tokens: the longest draft.
        options: the proposer's options.
        engine: what it is told about the engine.

    Raises:
        BrokenRuleError: it raised, or returned what is no draft.
    """
    engine = replace(engine, num_speculative_tokens=max_tokens)
    simulation = Simulation(maker(spec, options or {}, engine), engine)
    *prompt, last = tokens
    simulation.play(
        [
            Begin(IDS[0], tuple(prompt), engine.max_model_len, max_tokens),
            Step((Move(IDS[0], accepted=0, token=last, verified=0),)),
        ]
    )
    for fault in simulation.faults:
        raise broken("faults", fault.what, simulation.log) from fault.error
    return [token for drafted in simulation.results.values() for token in drafted]


def drafts_of(
    spec: Any, options: Mapping[str, Any], engine: EngineInfo, examples: Sequence[Schedule]
) -> list[list[Any]]:
    """Return what is drafted in some schedules, as valid JSON."""
    make = maker(spec, options, engine)
    return [
        [
            [step, request_id, draft]
            for (step, request_id), draft in Simulation(
                make, engine, request_options=options_model(spec)
            )
            .play(schedule)
            .results.items()
        ]
        for schedule in examples
    ]


def _turned(moves: Sequence[Any]) -> Sequence[Sequence[Any]]:
    return [moves[::-1]]


def _one_by_one(moves: Sequence[Any]) -> Sequence[Sequence[Any]]:
    return [[move] for move in moves]


def _accepts(make: MakeProposer, engine: EngineInfo) -> bool:
    """Return whether it prepares for an engine: refusing is allowed."""
    try:
        prepared(make, engine)
    except Exception:
        return False
    return True


def _long_prompt(engine: EngineInfo) -> Schedule:
    """Return a schedule with a prompt that takes most of the longest sequence."""
    size, k = engine.max_model_len * 3 // 4, engine.num_speculative_tokens
    prompt = tuple(i * i % 31 % engine.vocab_size for i in range(size))
    step = Step((Move(IDS[0], accepted=k, token=0, verified=k),))
    return [Begin(IDS[0], prompt, size, k), step, step, step, End(IDS[0])]
