"""``specplug bench``: what to compare, the measuring, and what is said about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

import specplug
from specplug.bench import grids, pages
from specplug.bench.cells import ALL, UNSTEADY, Cell, cells, unsteadiness
from specplug.bench.chart import chart
from specplug.bench.data import load
from specplug.bench.engines import Engines
from specplug.bench.measure import Measurement
from specplug.bench.methods import Backend, Method, backend_of, compared, module_of
from specplug.bench.pages import Report
from specplug.bench.store import Store
from specplug.bench.verdict import verdicts
from specplug.bench.work import Prompt, units
from specplug.demo.model import cache_folder, prepare_model
from specplug.errors import OptionError
from specplug.installed import installed
from specplug.replay.run import parse_candidate


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured.

    Attributes:
        engine: the backend's name.
        model: a folder, a file, or a name that the engine knows.
        methods: no speculation first.
        prompts: what is asked.
        batch_sizes: how many requests are served at once.
        rounds: how often each prompt is answered.
        engine_arguments: passed on to the engine.
        tokenizer: in place of the model's own.
        at_once: how many engines live at a time; None for as many as fit.
        output: the folder that keeps everything; None for none.
    """

    engine: str
    model: str
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    batch_sizes: Sequence[int]
    rounds: int
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    at_once: int | None = None
    output: Path | None = None

    def configuration(self) -> dict[str, Any]:
        """Return what a run that goes on has to have in common with what was measured."""
        contents = dumps([[one.content, one.max_tokens] for one in self.prompts], sort_keys=True)
        return {
            "engine": self.engine,
            "model": self.model,
            "tokenizer": self.tokenizer,
            "engine_arguments": dict(self.engine_arguments),
            "batch_sizes": list(self.batch_sizes),
            "methods": {
                method.label: method.speculation and dict(method.speculation)
                for method in self.methods
            },
            "prompts": [f"{prompt.workload}: {prompt.name}" for prompt in self.prompts],
            "prompts_sha256": sha256(contents.encode()).hexdigest(),
            "versions": {"specplug": specplug.__version__, **_version(self.engine)},
            "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
        }


def _version(engine: str) -> dict[str, str | None]:
    found = installed(engine)
    return {str(found["engine"]): found["version"]} if found["engine"] else {}


def measured(run: Run, console: Console) -> Report:
    """Measure what the output folder does not hold yet; return what it all came to.

    Raises:
        OptionError: the folder holds another run.
        SessionError: an engine ended early; what was measured before is kept.
    """
    configuration = run.configuration()
    store = Store(run.output, configuration)
    engines = Engines(
        module=module_of(run.engine),
        model=run.model,
        prompts=run.prompts,
        batch_size=max(run.batch_sizes),
        engine_arguments=run.engine_arguments,
        tokenizer=run.tokenizer,
        logs=(run.output or cache_folder() / run.engine) / "logs",
        console=console,
    )
    work = units(run.prompts, run.batch_sizes)
    if store.turns:
        console.print(f"{len(store.turns)} turns were measured before: going on from there.")
    Measurement(run.methods, work, run.rounds, engines, store, console).run(run.at_once)
    found = cells(store.turns, work)
    warnings = [one for one in (_differences(found), _caution(unsteadiness(store.turns))) if one]
    shown = {**configuration, "rounds": run.rounds}
    return Report(shown, found, verdicts(found, run.methods), warnings)


def show(report: Report, console: Console) -> None:
    """Print the tables and the verdicts."""
    for size in dict.fromkeys(cell.batch_size for cell in report.cells):
        own = [cell for cell in report.cells if cell.batch_size == size]
        console.print(grids.as_table(grids.ratios(own, size)))
        console.print(grids.as_table(grids.details(own, size, own[0].workload, narrow=True)))
    for verdict in report.verdicts:
        name = "all prompts" if verdict.workload == ALL else verdict.workload
        console.print(f"[bold]{name}, {verdict.batch_size} at a time:[/] ", end="")
        console.print(verdict.text, markup=False)
    for method, flags in report.flags().items():
        console.print(f"\nFor {method} add:\n  {flags}", markup=False)
    for warning in report.warnings:
        console.print(warning, style="bold red", markup=False)


def _differences(found: Sequence[Cell]) -> str:
    wrong: dict[str, int] = {}
    for cell in found:
        if cell.workload != ALL and not cell.identical:
            wrong[cell.method] = wrong.get(cell.method, 0) + cell.num_outputs - cell.num_identical
    if not wrong:
        return ""
    named = ", ".join(f"{method} ({count} answers)" for method, count in wrong.items())
    return (
        f"TEXT DIFFERS from no speculation with: {named}. In 16 bits and less, rounding decides "
        "near ties, and another shape of the batch rounds otherwise: measure in float32 to tell "
        "that from a fault."
    )


def _caution(spread: float) -> str:
    if spread < UNSTEADY:
        return ""
    return (
        f"The machine was busy: without speculation the same work ran typically {spread:.1f} "
        "times as fast in one round as in another. The ratios are rough; a quiet machine or more "
        "--rounds would help."
    )


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What the command line asks for; see ``specplug bench --help``."""

    engine: str
    model: str | None
    proposers: Sequence[str]
    num_speculative_tokens: Sequence[int]
    batch_sizes: Sequence[int]
    data: Sequence[str]
    rounds: int
    limit: int | None
    max_tokens: int
    engine_methods: Sequence[str]
    engine_arguments: Mapping[str, Any]
    tokenizer: str | None
    at_once: int | None
    output: Path


def run_bench(settings: BenchSettings, console: Console) -> bool:
    """Measure, print, write the report; return whether every text was the engine's own.

    Raises:
        SpecplugError: something that was asked for is not there, or an engine ended early.
    """
    candidates = [parse_candidate(text) for text in settings.proposers]
    backend = backend_of(settings.engine)
    check_batch_sizes(settings.engine, backend, settings.batch_sizes)
    methods = compared(
        backend, candidates, settings.num_speculative_tokens, settings.engine_methods
    )
    run = Run(
        engine=settings.engine,
        model=settings.model or str(prepare_model(console.print)),
        methods=methods,
        prompts=load(settings.data, settings.limit, settings.max_tokens),
        batch_sizes=settings.batch_sizes,
        rounds=settings.rounds,
        engine_arguments=settings.engine_arguments,
        tokenizer=settings.tokenizer,
        at_once=settings.at_once,
        output=settings.output,
    )
    report = measured(run, console)
    show(report, console)
    pages.write(report, settings.output, chart(report.cells))
    console.print(f"\nThe report is in {settings.output / 'report.html'}.", markup=False)
    return all(cell.identical for cell in report.cells)


def check_batch_sizes(engine: str, backend: Backend, sizes: Sequence[int]) -> None:
    """Refuse more requests at a time than the engine serves.

    Raises:
        OptionError: saying how many it serves.
    """
    most = backend.LARGEST_BATCH
    if most is not None and max(sizes) > most:
        raise OptionError(
            f"{engine} serves {most} request at a time, not {max(sizes)}.",
            hint=f"Use --batch-sizes {most}, or another engine.",
        )
