"""Tells whether an environment and an engine's arguments work with specplug; starts no engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import specplug
from specplug.errors import SpecplugError
from specplug.plugins import PluginManager
from specplug.registry import BLOCK_VARIABLE


class Status(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what was looked at; stable.
        status: whether it is well. With a problem the engine does not start, or not as asked.
        found: what is there.
        advice: what to do about it; empty if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def refused(name: str, error: BaseException, advice: str = "") -> Check:
    """Return the problem that an error is; what specplug itself raises brings its own advice."""
    if isinstance(error, SpecplugError):
        return Check(name, Status.PROBLEM, f"[{error.code}] {error.message}", error.hint or advice)
    return Check(name, Status.PROBLEM, f"{type(error).__name__}: {error}", advice)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one engine and its arguments."""

    engine: str
    arguments: Sequence[str]
    checks: Sequence[Check]

    def count(self, status: Status) -> int:
        """Return how many checks came to this."""
        return sum(check.status is status for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return it in plain types under stable keys."""
        return {
            "version": specplug.__version__,
            "engine": self.engine,
            "arguments": list(self.arguments),
            "problems": self.count(Status.PROBLEM),
            "warnings": self.count(Status.WARNING),
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose(engine: str, installed: str | None, arguments: Sequence[str]) -> Diagnosis:
    """Check everything that can be checked without starting the engine.

    Args:
        engine: the backend's name.
        installed: the engine's distribution and version, None if there is none.
        arguments: what the engine's own command would get; without any, only the environment is
            checked.
    """
    return Diagnosis(engine, arguments, [*_all_checks(engine, installed, arguments)])


def _all_checks(engine: str, installed: str | None, arguments: Sequence[str]) -> Iterator[Check]:
    yield from _plugin_checks(PluginManager())
    if installed is None:
        yield Check(
            "engine", Status.PROBLEM, f"{engine} is not installed in this environment.",
            f"Run this in the environment {engine} runs in; `pip install` specplug there.",
        )  # fmt: skip
        return
    yield Check("engine", Status.OK, installed)
    try:
        yield from import_module(f"specplug.backends.{engine}.doctor").examine(arguments)
    except Exception as error:
        # An engine that nobody knew may break any look at it.
        yield refused("examination", error, "Nothing more could be checked.")


def _plugin_checks(plugins: PluginManager) -> Iterator[Check]:
    names = ", ".join(registered.spec.name for registered in plugins)
    yield Check("proposers", Status.OK, f"{names or 'none'} are registered.")
    for problem in plugins.problems:
        yield Check(
            "plugin", Status.WARNING, f"{problem.origin} could not be loaded: {problem.reason}",
            "Its proposers and hooks are left out: repair or uninstall it.",
        )  # fmt: skip
    for name, origins in plugins.conflicts().items():
        claims = " and ".join(map(str, origins))
        yield Check(
            "plugin", Status.WARNING, f"'{name}' is claimed by {claims}, so none of them is used.",
            f"Uninstall one, or name one of them in {BLOCK_VARIABLE}.",
        )  # fmt: skip
    for origin in plugins.blocked:
        yield Check("plugin", Status.OK, f"{origin} is blocked by {BLOCK_VARIABLE}.")


@contextmanager
def standard_output_kept() -> Iterator[None]:
    """Send to standard error what others print, engines below Python too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the report."""
    table = Table.grid(padding=(0, 2))
    for check in diagnosis.checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="italic")
        table.add_row(Text(check.status, style=_STYLES[check.status]), Text(check.name), found)
    console.print(table)
    problems, warnings = (diagnosis.count(status) for status in (Status.PROBLEM, Status.WARNING))
    console.print(f"\n{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}")


def show_json(diagnosis: Diagnosis) -> None:
    """Print the report for programs."""
    print(json.dumps(diagnosis.as_json(), indent=2))


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
