"""The demo: a small bench with everything chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specplug.bench import pages
from specplug.bench.command import Run, measured, show
from specplug.bench.methods import backend_of, compared
from specplug.demo.model import prepare_model
from specplug.demo.prompts import PROMPTS
from specplug.replay.report import check_writable
from specplug.replay.run import parse_candidate

# In 16 bits near ties are decided by rounding, which depends on the size of the batch and so on
# speculation; then the texts could not be compared.
_ARGUMENTS = {"vllm": {"dtype": "float32"}, "transformers": {"dtype": "float32"}}


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asks for; ``model`` None is the demo's own."""

    engine: str
    proposers: Sequence[str]
    model: Path | None
    num_speculative_tokens: int
    rounds: int
    json_path: Path | None


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Measure, print the tables, and return whether every text was the engine's own."""
    if settings.json_path:
        check_writable(settings.json_path)
    candidates = [parse_candidate(text) for text in settings.proposers]
    backend = backend_of(settings.engine)
    methods = compared(backend, candidates, [settings.num_speculative_tokens])
    run = Run(
        engine=settings.engine,
        model=str(settings.model or prepare_model(console.print)),
        methods=methods,
        prompts=PROMPTS,
        batch_sizes=[1],
        rounds=settings.rounds,
        engine_arguments=_ARGUMENTS.get(settings.engine, {}),
    )
    report = measured(run, console)
    show(report, console)
    if settings.json_path:
        settings.json_path.write_text(json.dumps(pages.as_json(report), indent=1) + "\n")
    return all(cell.identical for cell in report.cells)
