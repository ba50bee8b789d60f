"""The command line: what is installed and whether it works; ``cli_measure`` has the rest."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import specplug
from specplug import cli_measure
from specplug.config import describe
from specplug.errors import SpecplugError
from specplug.installed import ENGINES, installed
from specplug.plugins import PluginManager

app = typer.Typer(
    help="Speculative-decoding proposers as plugins, for the engine you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DoctorEngine(StrEnum):
    """The engines that the doctor knows."""

    VLLM = "vllm"
    TRTLLM = "trtllm"
    TRANSFORMERS = "transformers"


for _name, _command in cli_measure.COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Run the command line; an error that specplug explains itself is one message, no trace."""
    # So that whoever started processes ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except SpecplugError as error:
        print(f"specplug: {error}", file=sys.stderr)
        sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specplug {specplug.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


@app.command("list")
def list_installed(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the installed proposers and engines, and what was left out and why."""
    found = inventory(PluginManager())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_inventory(found)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def doctor(
    context: typer.Context,
    engine: Annotated[
        DoctorEngine, typer.Option(help="The engine whose arguments follow.")
    ] = DoctorEngine.VLLM,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Tell whether this environment, and an engine's arguments, work with specplug.

    Starts no engine. Give the arguments as `vllm serve` or `trtllm-serve` gets them, behind `--`
    if they could be taken for options of this command; without any, only the environment is
    checked.
    """
    from specplug.doctor import Status, diagnose, show, show_json, standard_output_kept

    found = installed(engine.value)
    release = found["engine"] and f"{found['engine']} {found['version']}"
    with standard_output_kept(), Console(stderr=True).status(f"Examining {engine.value} ..."):
        diagnosis = diagnose(engine.value, release, context.args)
    if as_json:
        show_json(diagnosis)
    else:
        show(diagnosis, Console(highlight=False))
    if diagnosis.count(Status.PROBLEM):
        raise typer.Exit(1)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="What it is called: my-proposer.")],
    length_policy: Annotated[
        bool, typer.Option("--length-policy", help="Write a length policy, not a proposer.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write it; by default a folder of that name.")
    ] = None,
) -> None:
    """Write a package with a proposer of your own, its tests and what registers it."""
    from specplug.scaffold import LENGTH_POLICY, PROPOSER, new_package

    written = new_package(name, LENGTH_POLICY if length_policy else PROPOSER, folder)
    typer.echo(f"Wrote {written}. Install it and run its tests:")
    typer.echo(f"  pip install --editable '{written}[test]' && pytest {written}")


def inventory(plugins: PluginManager) -> dict[str, Any]:
    """Return everything that ``specplug list`` shows, in plain types under stable keys."""
    return {
        "version": specplug.__version__,
        "proposers": [
            {
                "name": registered.spec.name,
                "summary": registered.spec.summary,
                "origin": asdict(registered.origin),
                "needs": sorted(registered.spec.needs),
                "options": [asdict(option) for option in describe(registered.spec.options)],
            }
            for registered in plugins
        ],
        "length_policies": [
            {
                "name": registered.spec.name,
                "summary": registered.spec.summary,
                "origin": asdict(registered.origin),
                "options": [asdict(option) for option in describe(registered.spec.options)],
            }
            for registered in plugins.length_policies
        ],
        "backends": [{"name": name, **installed(name)} for name in ENGINES],
        "conflicts": {
            name: [asdict(origin) for origin in origins]
            for name, origins in plugins.conflicts().items()
        },
        "blocked": [asdict(origin) for origin in plugins.blocked],
        "problems": [asdict(problem) for problem in plugins.problems],
    }


def _print_inventory(found: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for title, plugins in (
        ("Proposers", found["proposers"]),
        ("Length policies", found["length_policies"]),
    ):
        console.print(title, style="bold")
        for plugin in plugins:
            _print_plugin(console, plugin)
    console.print("Backends", style="bold")
    for backend in found["backends"]:
        engine = f"{backend['engine']} {backend['version']}" if backend["engine"] else "no engine"
        _print_plain(console, f"  {backend['name']}: {engine} installed")
    refused = [
        *(
            f"conflict: '{name}' is claimed by {' and '.join(map(_origin, origins))}"
            for name, origins in found["conflicts"].items()
        ),
        *(f"blocked: {_origin(origin)}" for origin in found["blocked"]),
        *(f"{_origin(problem['origin'])}: {problem['reason']}" for problem in found["problems"]),
    ]
    if refused:
        console.print("Left out", style="bold")
        for line in refused:
            _print_plain(console, f"  {line}")


def _print_plugin(console: Console, plugin: dict[str, Any]) -> None:
    console.print(f"  [bold cyan]{plugin['name']}[/]  {_origin(plugin['origin'])}")
    _print_plain(console, f"    {plugin['summary']}")
    if plugin.get("needs"):
        _print_plain(console, f"    needs: {', '.join(plugin['needs'])}")
    for option in plugin["options"]:
        _print_plain(
            console,
            f"    {option['name']}: {option['type']} = {option['default']}  "
            f"{option['description']}",
        )


def _print_plain(console: Console, line: str) -> None:
    """Print what others wrote: brackets in it are no markup."""
    console.print(line, markup=False)


def _origin(origin: dict[str, str]) -> str:
    parts = (origin["distribution"], origin["version"], origin["entry"] and f"({origin['entry']})")
    return " ".join(part for part in parts if part)
