"""The report's picture: the ratio to no speculation by batch size, a panel for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import isnan
from typing import Any

from specplug.bench.cells import Cell
from specplug.bench.methods import NO_SPECULATION
from specplug.replay.report import pyplot

_ACROSS = 3
"""Panels beside each other."""


def chart(cells: Sequence[Cell]) -> bytes:
    """Return a PNG file.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    plt = pyplot("The chart")
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    across = min(_ACROSS, len(workloads))
    down = -(-len(workloads) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(1 + 4 * across, 1 + 3 * down), layout="constrained", squeeze=False
    )
    for panel, workload in zip(panels.flat, workloads, strict=False):
        _draw(panel, [cell for cell in cells if cell.workload == workload])
        panel.set_title(workload)
    for panel in panels.flat[len(workloads) :]:
        panel.set_axis_off()
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.supylabel("tokens/s against no speculation")
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    plt.close(figure)
    return drawn.getvalue()


def _draw(panel: Any, cells: Sequence[Cell]) -> None:
    sizes = sorted({cell.batch_size for cell in cells})
    methods = list(dict.fromkeys(cell.method for cell in cells if cell.method != NO_SPECULATION))
    panel.axhline(1, color="black", linewidth=0.8)
    for i, method in enumerate(methods):
        own = {cell.batch_size: cell.ratio for cell in cells if cell.method == method}
        # A little apart, so that intervals can be told from each other.
        places = [sizes.index(size) + 0.06 * (i - (len(methods) - 1) / 2) for size in own]
        values = [ratio.value for ratio in own.values()]
        errors = [
            [0 if isnan(ratio.low) else ratio.value - ratio.low for ratio in own.values()],
            [0 if isnan(ratio.low) else ratio.high - ratio.value for ratio in own.values()],
        ]
        panel.errorbar(places, values, yerr=errors, marker="o", capsize=2, label=method)
    panel.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    panel.set_xlabel("requests at a time")
    panel.set_xmargin(0.15)
