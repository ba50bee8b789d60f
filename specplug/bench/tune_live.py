"""``specplug tune`` without recorded requests: short runs of the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from specplug.bench.cells import Cell
from specplug.bench.command import Run, check_batch_sizes, measured, show
from specplug.bench.data import load
from specplug.bench.methods import NO_SPECULATION, Backend, Method, backend_of
from specplug.bench.tune import Choice, TuneSettings
from specplug.bench.verdict import Finding, verdicts
from specplug.demo.model import prepare_model
from specplug.plugins import PluginManager
from specplug.replay.run import parse_candidate

_PROMPTS = 2
"""Of each workload: the run is to be short."""
_MAX_TOKENS = 128
_ROUNDS = 2


def tune_live(settings: TuneSettings, console: Console) -> bool:
    """Look for the best proposer, then for its best K, then for its best length policy.

    Not every combination is measured: each would start an engine.

    Returns:
        whether speculation is worth it.

    Raises:
        SpecplugError: something that was asked for is not there, or an engine ended early.
    """
    backend = backend_of(settings.engine)
    requests = settings.requests
    if settings.concurrency is None:
        requests = min(requests, backend.LARGEST_BATCH or requests)
    check_batch_sizes(settings.engine, backend, [requests])
    candidates = [parse_candidate(text) for text in settings.proposers]
    ks = sorted(settings.num_speculative_tokens)
    policies = settings.length_policies
    run = Run(
        engine=settings.engine,
        model=settings.model or str(prepare_model(console.print)),
        methods=[],
        prompts=load(settings.data, _PROMPTS, _MAX_TOKENS),
        batch_sizes=[requests],
        rounds=_ROUNDS,
        engine_arguments=settings.engine_arguments,
    )
    search = _Search(run, backend, settings.output, console)
    search.measure("proposer", [Choice(one, ks[len(ks) // 2], policies[0]) for one in candidates])
    best = search.best
    search.measure("K", [best._replace(k=k) for k in ks if k != best.k])
    best = search.best
    search.measure("length-policy", [best._replace(length_policy=one) for one in policies[1:]])
    return search.conclude()


@dataclass(slots=True)
class _Search:
    """What was measured so far, one choice after the other, each next to no speculation.

    Attributes:
        run: what every stage has in common.
        backend: of the engine.
        output: the folder; each stage has its own in it.
        console: is told.
    """

    run: Run
    backend: Backend
    output: Path
    console: Console
    _plugins: PluginManager = field(default_factory=PluginManager)
    _plain: Cell | None = None
    _cells: list[tuple[Choice, Cell]] = field(default_factory=list)
    _methods: list[Method] = field(default_factory=lambda: [Method(NO_SPECULATION)])

    def measure(self, stage: str, choices: Sequence[Choice]) -> None:
        """Measure choices that differ in one thing, named by ``stage``."""
        if not choices:
            return
        self.console.print(f"Comparing by {stage}: {'; '.join(map(str, choices))}", markup=False)
        methods = [choice.method(self.backend, self._plugins) for choice in choices]
        self._methods += methods
        run = replace(
            self.run, methods=[Method(NO_SPECULATION), *methods], output=self.output / stage
        )
        report = measured(run, self.console)
        show(replace(report, verdicts=[]), self.console)
        # The first workload is that of all prompts, if there are several.
        plain, *others = (
            cell for cell in report.cells if cell.workload == report.cells[0].workload
        )
        self._plain = self._plain or plain
        self._cells += zip(choices, others, strict=True)

    @property
    def best(self) -> Choice:
        """The fastest so far."""
        return max(self._cells, key=lambda pair: pair[1].ratio.value)[0]

    def conclude(self) -> bool:
        """Say what is advised; return whether that is to speculate."""
        assert self._plain is not None
        compared = [self._plain, *(cell for _, cell in self._cells)]
        [verdict] = verdicts(compared, self._methods)
        self.console.print(verdict.text, markup=False)
        if verdict.flags:
            self.console.print(f"  {verdict.flags}", markup=False)
        return verdict.finding is Finding.KEEP
