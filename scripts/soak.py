"""Put vLLM's server with specplug under mixed traffic, and compare it with the server without.

Run in the environment that ``scripts/setup_env.py`` makes; ``make soak`` does both.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

from soak import Result, Soak, run
from tinymodel import make_adapter, make_tiny_model


class Runner(StrEnum):
    """vLLM's model runners."""

    AUTO = "auto"
    V1 = "v1"
    V2 = "v2"


console = Console(soft_wrap=True)


def main(
    proposer: Annotated[str, typer.Option(help="The proposer's name.")] = "suffix",
    num_speculative_tokens: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", min=1, max=128)
    ] = 5,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60, help="How long there is traffic.")
    ] = 10,
    clients: Annotated[int, typer.Option(min=1, max=256, help="How many ask at a time.")] = 32,
    runner: Annotated[Runner, typer.Option(help="vLLM's model runner.")] = Runner.AUTO,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Put vLLM's server with specplug under mixed traffic; exit with 1 if a check fails."""
    soak = Soak(
        proposer=proposer, num_speculative_tokens=num_speculative_tokens, minutes=minutes,
        num_clients=clients, runner=runner.value, seed=seed,
    )  # fmt: skip
    folder = Path(mkdtemp(prefix="specplug-soak-"))
    model = make_tiny_model(folder / "model")
    adapter = make_adapter(folder / "adapter", model)
    try:
        result = run(soak, model, adapter, folder, console.print)
    except RuntimeError as error:
        console.print(f"soak FAILED: {error}\nThe logs are in {folder}.", markup=False)
        raise typer.Exit(1) from None
    show(result)
    if json_file:
        json_file.write_text(
            json.dumps({"soak": asdict(soak), "passed": result.passed, **asdict(result)}, indent=1)
        )
    failed = [check.name for check in result.checks if not check.passed]
    if failed:
        console.print(f"soak FAILED: {', '.join(failed)}; the logs are in {folder}", markup=False)
        raise typer.Exit(1)
    shutil.rmtree(folder)
    console.print(
        f"soak passed: {soak.proposer}, {soak.minutes:g} minutes, "
        f"{result.counts['requests']} requests"
    )


def show(result: Result) -> None:
    """Print what was checked, and what the traffic was."""
    table = Table("check", "", "seen")
    for check in result.checks:
        table.add_row(check.name, "passed" if check.passed else "FAILED", check.detail)
    console.print(table)
    counts = {**result.counts, "preempted": int(result.metrics["num_preemptions_total"])}
    console.print("traffic: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    growth = ", ".join(f"{name} {size / 2**20:+.1f}" for name, size in result.growth.items())
    console.print(f"growth by process, MiB: {growth}")


if __name__ == "__main__":
    typer.run(main)
