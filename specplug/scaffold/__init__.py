"""``specplug new``: an installable package around a plugin of one's own, from files.

The files under ``templates/`` are such packages, of a plugin called ``my_plugin``.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from specplug.errors import OptionError
from specplug.plugins import PluginManager

PROPOSER = "proposer"
LENGTH_POLICY = "length_policy"

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_SUFFIX = ".in"
"""Keeps tools from taking the templates for parts of this package."""


def new_package(name: str, kind: str, folder: Path | None = None) -> Path:
    """Write a package and return its folder.

    Args:
        name: of the plugin; words may be joined by hyphens or underscores.
        kind: ``PROPOSER`` or ``LENGTH_POLICY``.
        folder: where it goes; by default a folder of the distribution's name, here.

    Raises:
        OptionError: the name is not usable or taken, or the folder is there already.
    """
    check_name(name, kind)
    module = name.replace("-", "_")
    forms = {
        "my_plugin": module,
        "my-plugin": module.replace("_", "-"),
        "MyPlugin": "".join(word.capitalize() for word in module.split("_")),
    }
    folder = folder or Path(forms["my-plugin"])
    if folder.exists():
        raise OptionError(
            f"{folder} is there already.", hint="Name another with --folder, or move it away."
        )
    template = resources.files(__name__) / "templates" / kind
    for path, text in _files(template):
        target = folder / _renamed(path, forms).removesuffix(_SUFFIX)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_renamed(text, forms), encoding="utf-8")
    return folder


def check_name(name: str, kind: str) -> None:
    """Refuse a name that no package or no plugin of this kind can have.

    Raises:
        OptionError: saying why, and what is allowed.
    """
    module, what = name.replace("-", "_"), kind.replace("_", " ")
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"{name!r} cannot be the name of a {what}.",
            hint="Use lower-case letters and digits, and hyphens or underscores between words; "
            "begin with a letter.",
        )
    if keyword.iskeyword(module) or module in {*sys.stdlib_module_names, "specplug"}:
        raise OptionError(
            f"'{module}' cannot be the name of a package: Python or specplug has it.",
            hint=f"Add a word: '{name}-{what.replace(' ', '-')}'.",
        )
    plugins = PluginManager()
    for registered in plugins if kind == PROPOSER else plugins.length_policies:
        if registered.spec.name == module:
            raise OptionError(
                f"There is a {what} '{module}' already, of {registered.origin}.",
                hint="Of two with one name, neither could be used.",
            )


def _files(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of a template."""
    for entry in folder.iterdir():
        here = f"{path}/{entry.name}" if path else entry.name
        if entry.is_dir():
            yield from _files(entry, here)
        elif here.endswith(_SUFFIX):
            yield here, entry.read_text(encoding="utf-8")


def _renamed(text: str, forms: dict[str, str]) -> str:
    for placeholder, form in forms.items():
        text = text.replace(placeholder, form)
    return text
