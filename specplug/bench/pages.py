"""The report's files: JSON for programs, Markdown, and one HTML page that needs no other file."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from math import isnan
from pathlib import Path
from string import Template
from typing import Any

from specplug.bench import grids
from specplug.bench.cells import Cell
from specplug.bench.grids import Grid
from specplug.bench.verdict import RULES, Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run came to.

    Attributes:
        configuration: what was measured, in plain types.
        cells: what was measured.
        verdicts: what is advised.
        warnings: what a reader must know first: texts that differ, a busy machine.
    """

    configuration: Mapping[str, Any]
    cells: Sequence[Cell]
    verdicts: Sequence[Verdict]
    warnings: Sequence[str]

    @property
    def title(self) -> str:
        """The engine and the model."""
        return f"{self.configuration['engine']}, {self.configuration['model']}"

    def grids(self) -> list[Grid]:
        """Return the tables, but the verdicts."""
        sizes = list(dict.fromkeys(cell.batch_size for cell in self.cells))
        workloads = list(dict.fromkeys(cell.workload for cell in self.cells))
        return [
            *(grids.ratios(self.cells, size) for size in sizes),
            *(grids.details(self.cells, size, name) for size in sizes for name in workloads),
        ]

    def flags(self) -> dict[str, str]:
        """Return how to get each method that is advised."""
        return {one.method: one.flags for one in self.verdicts if one.flags}


def as_json(report: Report) -> dict[str, Any]:
    """Return the report in plain types; what there is no number for is null."""
    found: dict[str, Any] = _plain(
        {
            "configuration": report.configuration,
            "cells": [{**asdict(cell), "ratio": cell.ratio._asdict()} for cell in report.cells],
            "verdicts": [asdict(verdict) for verdict in report.verdicts],
            "rules": RULES,
            "warnings": list(report.warnings),
        }
    )
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and isnan(value) else value


def as_markdown(report: Report, picture: str) -> str:
    """Return the report in Markdown, with the picture's file name."""
    parts = [f"# specplug bench: {report.title}\n"]
    parts += [f"**{warning}**\n" for warning in report.warnings]
    parts.append(grids.as_markdown(grids.advice(report.verdicts)))
    parts += [f"{method}:\n\n```\n{flags}\n```\n" for method, flags in report.flags().items()]
    parts.append(f"![tokens/s against no speculation]({picture})\n")
    parts += map(grids.as_markdown, report.grids())
    parts.append(grids.as_markdown(grids.rules()))
    parts.append(f"## Configuration\n\n```json\n{_configuration(report)}\n```\n")
    return "\n".join(parts)


def as_html(report: Report, png: bytes) -> str:
    """Return the report as a page with the picture in it."""
    parts = [f'<p class="warning">{escape(warning)}</p>' for warning in report.warnings]
    parts.append(_html(grids.advice(report.verdicts), "text"))
    parts += [
        f"<p>{escape(method)}:</p><pre>{escape(flags)}</pre>"
        for method, flags in report.flags().items()
    ]
    encoded = b64encode(png).decode()
    parts.append(
        f'<img alt="tokens/s against no speculation" src="data:image/png;base64,{encoded}">'
    )
    parts += map(_html, report.grids())
    parts.append(_html(grids.rules(), "text"))
    parts.append(f"<h2>Configuration</h2><pre>{escape(_configuration(report))}</pre>")
    page = Template(files("specplug.bench").joinpath("report.html").read_text())
    return page.substitute(title=escape(report.title), body="\n".join(parts))


def write(report: Report, folder: Path, png: bytes) -> None:
    """Write ``report.json``, ``report.md``, ``report.html`` and ``report.png``."""
    (folder / "report.png").write_bytes(png)
    (folder / "report.json").write_text(json.dumps(as_json(report), indent=1, allow_nan=False))
    (folder / "report.md").write_text(as_markdown(report, "report.png"))
    (folder / "report.html").write_text(as_html(report, png))


def _html(grid: Grid, kind: str = "") -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "\n".join(row(cells, "td") for cells in grid.rows)
    head = row(grid.columns, "th")
    return f'<h2>{escape(grid.title)}</h2><table class="{kind}">{head}\n{rows}</table>'


def _configuration(report: Report) -> str:
    shown = {name: value for name, value in report.configuration.items() if name != "prompts"}
    return json.dumps(shown, indent=1)
