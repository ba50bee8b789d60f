"""The tables of a report, as text in rows, for every form in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from rich.table import Table

from specplug.bench.cells import ALL, Cell
from specplug.bench.verdict import RULES, Verdict


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the first column is text, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def ratios(cells: Sequence[Cell], batch_size: int) -> Grid:
    """Return the ratio of each method by workload, and which of it may be chance."""
    own = [cell for cell in cells if cell.batch_size == batch_size]
    workloads = list(dict.fromkeys(cell.workload for cell in own))
    by_place = {(cell.method, cell.workload): cell for cell in own}
    return Grid(
        f"tokens/s against no speculation, {_at_a_time(batch_size)}",
        ["method", *workloads],
        [
            [method, *(_interval(by_place.get((method, workload))) for workload in workloads)]
            for method in dict.fromkeys(cell.method for cell in own)
        ],
    )


def details(cells: Sequence[Cell], batch_size: int, workload: str, *, narrow: bool = False) -> Grid:
    """Return what else was measured of each method on a workload; narrow is for a terminal."""
    columns = {name: show for name, show in DETAILS.items() if not (narrow and name in _WIDE_ONLY)}
    own = [cell for cell in cells if (cell.batch_size, cell.workload) == (batch_size, workload)]
    name = "all prompts" if workload == ALL else workload
    return Grid(
        f"{name}, {_at_a_time(batch_size)}",
        ["method", *columns],
        [[cell.method, *(show(cell) for show in columns.values())] for cell in own],
    )


DETAILS: dict[str, Callable[[Cell], str]] = {
    "tokens/s": lambda cell: _shown(cell.tokens_per_second, "{:.0f}"),
    "acceptance rate": lambda cell: _shown(cell.acceptance_rate, "{:.0%}"),
    "mean acc. length": lambda cell: _shown(cell.mean_acceptance_length, "{:.2f}"),
    "first token": lambda cell: _shown(1e3 * cell.first_token_seconds, "{:.0f} ms"),
    "token p50": lambda cell: _shown(1e3 * cell.token_seconds_p50, "{:.1f} ms"),
    "token p99": lambda cell: _shown(1e3 * cell.token_seconds_p99, "{:.1f} ms"),
    "drafting": lambda cell: f"{cell.drafting_share:.1%}",
    "peak memory": lambda cell: _memory(cell),  # noqa: PLW0108 (defined further down)
    "same text": lambda cell: f"{cell.num_identical}/{cell.num_outputs}",
}

_WIDE_ONLY = ("tokens/s", "drafting", "peak memory")


def advice(verdicts: Sequence[Verdict]) -> Grid:
    """Return the verdicts."""
    return Grid(
        "Verdicts",
        ["workload", "at a time", "verdict"],
        [[one.workload, str(one.batch_size), one.text] for one in verdicts],
    )


def rules() -> Grid:
    """Return when each verdict is given."""
    return Grid(
        "When a verdict is given", ["verdict", "when"], [[str(k), v] for k, v in RULES.items()]
    )


def as_table(grid: Grid) -> Table:
    """Return a table for the terminal."""
    # Without padding intervals of five workloads fit into 80 columns.
    table = Table(title=grid.title, title_justify="left", padding=0)
    first, *others = grid.columns
    table.add_column(first)
    for column in others:
        table.add_column(column.replace(" ", "\n"), justify="right")
    for row in grid.rows:
        table.add_row(*(cell.replace(" (", "\n(") for cell in row))
    return table


def as_markdown(grid: Grid) -> str:
    """Return a table in Markdown, under a heading."""
    rows = [grid.columns, ["---"] * len(grid.columns), *grid.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"## {grid.title}\n\n" + "\n".join(lines) + "\n"


def _at_a_time(batch_size: int) -> str:
    return "one at a time" if batch_size == 1 else f"{batch_size} at a time"


def _interval(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    value, low, high = cell.ratio
    return f"{value:.2f}x" if isnan(low) or low == high else f"{value:.2f}x ({low:.2f}-{high:.2f})"


def _memory(cell: Cell) -> str:
    parts = [
        f"{taken / 1e9:.2f} GB{where}"
        for taken, where in ((cell.peak_bytes, ""), (cell.peak_device_bytes, " device"))
        if taken
    ]
    return " + ".join(parts) or "-"


def _shown(value: float, form: str) -> str:
    return "-" if isnan(value) else form.format(value)
