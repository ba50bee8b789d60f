"""What a replay measured: as rows for programs, as a table and as a picture for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from specplug.errors import DependencyError, OptionError
from specplug.replay.run import Result


def as_row(result: Result) -> dict[str, Any]:
    """Return everything measured under stable keys; null is what there is no number for."""
    counters = result.counters
    seconds, requests = np.array(result.call_seconds), np.array(result.call_requests, np.int64)
    # Each request of a call had the same share of it.
    microseconds = np.repeat(1e6 * seconds / requests, requests)
    reached = zip(counters.num_accepted_tokens_per_pos, result.drafted_per_pos, strict=True)
    return {
        "proposer": result.candidate.proposer,
        "options": dict(result.candidate.options),
        "num_speculative_tokens": result.num_speculative_tokens,
        "length_policy": result.length_policy,
        "speed": result.speed,
        "tokens_per_step": _ratio(result.num_tokens, counters.num_steps),
        "drafted_per_step": _ratio(counters.num_draft_tokens, counters.num_steps),
        "acceptance_rate": _ratio(counters.num_accepted_tokens, counters.num_draft_tokens),
        "acceptance_by_position": [_ratio(accepted, drafted) for accepted, drafted in reached],
        "draft_share": _ratio(counters.num_drafts, counters.num_steps),
        "microseconds_per_proposal": float(microseconds.mean()) if len(seconds) else None,
        "p99_microseconds": float(np.percentile(microseconds, 99)) if len(seconds) else None,
        "longest_call_milliseconds": 1e3 * float(seconds.max()) if len(seconds) else None,
        "state_bytes": result.state_bytes,
        "num_faults": counters.num_faults,
    }


def table(results: Iterable[Result]) -> Table:
    """Return a row per proposer and K; microseconds are per proposal, the longest call in ms."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("proposer", overflow="fold", min_width=20)
    for heading in (
        "K", "length", "speed", "tokens\n/step", "drafted\n/step", "accept-\nance", "with\ndraft",
        "µs", "p99\nµs", "max\nms", "MB",
    ):  # fmt: skip
        shown.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        row = as_row(result)
        megabytes = None if row["state_bytes"] is None else row["state_bytes"] / 1e6
        shown.add_row(
            str(result.candidate),
            str(row["num_speculative_tokens"]),
            row["length_policy"],
            _text(row["speed"], ".2f"),
            _text(row["tokens_per_step"], ".3f"),
            _text(row["drafted_per_step"], ".2f"),
            _text(row["acceptance_rate"], ".1%"),
            _text(row["draft_share"], ".0%"),
            _text(row["microseconds_per_proposal"], ".1f"),
            _text(row["p99_microseconds"], ".1f"),
            _text(row["longest_call_milliseconds"], ".2f"),
            _text(megabytes, ".1f"),
        )
    return shown


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Write a list with one object per proposer and K, whole or not at all."""
    text = json.dumps([as_row(result) for result in results], indent=2, allow_nan=False)
    _replace(path, text.encode() + b"\n")


def write_picture(path: Path, results: Sequence[Result]) -> None:
    """Draw tokens per step and drafted tokens per step by proposer and K."""
    plt = pyplot("--picture")
    labels = list(dict.fromkeys(map(_label, results)))
    ks = sorted({result.num_speculative_tokens for result in results})
    rows = {(_label(r), r.num_speculative_tokens): as_row(r) for r in results}
    figure, panels = plt.subplots(
        1, 2, figsize=(10, 1.5 + 0.4 * len(labels) * len(ks)), layout="constrained", sharey=True
    )
    height = 0.8 / len(ks)
    for panel, key, title in zip(
        panels,
        ("tokens_per_step", "drafted_per_step"),
        ("tokens per step (1 is no speculation)", "drafted tokens per step"),
        strict=True,
    ):
        for i, k in enumerate(ks):
            values = [rows[label, k][key] or 0 for label in labels]
            at = [place + (i - (len(ks) - 1) / 2) * height for place in range(len(labels))]
            bars = panel.barh(at, values, height, label=f"K = {k}")
            panel.bar_label(bars, fmt="%.2f", padding=2)
        panel.set_title(title)
        panel.margins(x=0.12)
        panel.set_yticks(range(len(labels)), labels)
    panels[0].axvline(1, color="black", linewidth=0.8)
    panels[0].invert_yaxis()
    panels[1].legend()
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix.lstrip(".") or "png", dpi=150)
    plt.close(figure)
    _replace(path, drawn.getvalue())


def _label(result: Result) -> str:
    policy = "" if result.length_policy == "fixed" else f", {result.length_policy}"
    return f"{result.candidate}{policy}"


def check_writable(path: Path, *, picture: bool = False) -> None:
    """Refuse before anything is measured what could not be written afterwards.

    Raises:
        OptionError: it is no ordinary file, its folder is not there or cannot be written, or there
            is no such kind of picture.
        DependencyError: matplotlib is not installed.
    """
    folder = path.resolve().parent
    special = path.exists() and not path.is_file()
    if special or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"{path} cannot be written.",
            hint="Name an ordinary file in a folder that can be written.",
        )
    if picture:
        kinds = pyplot("--picture").gcf().canvas.get_supported_filetypes()
        if path.suffix and path.suffix.lstrip(".") not in kinds:
            raise OptionError(
                f"{path}: '{path.suffix}' is no kind of picture.",
                hint=f"The kinds are {', '.join(sorted(kinds))}.",
            )


def pyplot(wanted: str) -> Any:
    """Return matplotlib's pyplot, for files.

    Args:
        wanted: what needs it, for the error message.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise DependencyError(
            f"{wanted} needs a package that is not installed: {error}.",
            hint="Install it with: pip install 'specplug[replay]'.",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    beside = path.resolve().with_name(f".{path.name}-{token_hex(4)}")
    try:
        beside.write_bytes(content)
        beside.replace(path.resolve())
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error}.") from error
    finally:
        beside.unlink(missing_ok=True)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
