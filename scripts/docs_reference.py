"""Fills the generated parts into the documentation's pages: a hook of MkDocs.

``<!-- options: suffix -->`` becomes the options of a proposer, ``<!-- settings: module:Model -->``
those of a settings model, ``<!-- command line -->`` what typer says of ``specplug``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from specplug.config import describe
from specplug.plugins import PluginManager

MARK = re.compile(r"<!-- (options|settings|command line)(?:: (\S+))? -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its marks replaced; MkDocs calls it for every page."""
    return MARK.sub(lambda mark: GENERATORS[mark[1]](mark[2]), markdown)


def options(proposer: str) -> str:
    """Return the options of a built-in proposer as a table."""
    return table(PluginManager(block=[]).get(proposer).spec.options)


def settings(target: str) -> str:
    """Return the fields of ``module:Model`` as a table."""
    module, _, name = target.partition(":")
    return table(getattr(import_module(module), name))


def table(model: type[BaseModel]) -> str:
    """Return what ``specplug list`` shows of a model as a Markdown table."""
    rows = [
        f"| `{option.name}` | {code(option.type)} | {code(option.default)} | {option.description} |"
        for option in describe(model)
    ]
    return "\n".join(["| name | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def code(text: str) -> str:
    """Return text as code that may stand in a cell: a bar would end it."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>"


def command_line(_: str | None) -> str:
    """Return typer's own documentation of the commands, without its title."""
    done = subprocess.run(
        [sys.executable, "-m", "typer", "specplug.cli", "utils", "docs", "--name", "specplug"],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.partition("\n")[2]


GENERATORS: dict[str, Callable[[Any], str]] = {
    "options": options,
    "settings": settings,
    "command line": command_line,
}
