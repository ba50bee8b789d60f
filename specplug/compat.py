"""Whether an installed engine is one that specplug knows: its release, its names and signatures.

Everything of an engine that a backend wraps or relies on is named as a :class:`Hook` and checked
before it is touched. The checks read names and signatures, from live objects or, so that nothing
of the engine is imported, from source files.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.errors import EngineSupportError


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of an engine that a backend supports.

    Attributes:
        engine: the engine's name, for people.
        oldest: the first of them, as major and minor number.
        newest: the last of them.
        how_to_try: how a user sets ``allow_untested_engine``.
    """

    engine: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    how_to_try: str

    def __str__(self) -> str:
        return f"{_dotted(self.oldest)} to {_dotted(self.newest)}"

    def supports(self, version: str, oldest: tuple[int, int] | None = None) -> bool:
        """Return whether a release is in the range, which may begin later for a part of it."""
        found = re.match(r"(\d+)\.(\d+)", version)
        number = found and (int(found[1]), int(found[2]))
        return bool(number and (oldest or self.oldest) <= number <= self.newest)

    def check(self, version: str, *, allow_untested: bool) -> None:
        """Refuse releases outside the range.

        Raises:
            EngineSupportError: naming the version found, the range, and what to do.
        """
        if allow_untested or self.supports(version):
            return
        raise EngineSupportError(
            f"{self.engine} {version} is installed; this specplug supports {self}.",
            hint=f"Upgrade specplug or install a supported {self.engine}. To try this one all the "
            f"same, pass {self.how_to_try}: the signatures are checked, and greedy output should "
            "be compared once without specplug.",
        )

    def check_hooks(self, hooks: Iterable[Hook]) -> None:
        """Refuse an engine whose live objects are not the ones that specplug knows.

        Raises:
            EngineSupportError: naming the first hook that differs, what was expected and found.
        """
        for hook, found in mismatches(hooks, live):
            raise EngineSupportError(
                f"{hook}: expected {hook.expected}, found {found}.",
                hint=f"This {self.engine} is not one that specplug knows: upgrade specplug, or "
                f"install a {self.engine} from {self} as released.",
            )


@dataclass(frozen=True, slots=True)
class Hook:
    """A name in an engine.

    Attributes:
        module: where it is.
        name: a function, a class or ``Class.method``.
        parameters: of a function: its first parameters, in order.
        fields: of a class: the annotated fields that it must have.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def expected(self) -> str:
        """Return what the hook should look like, for people."""
        if self.fields:
            return f"fields {', '.join(self.fields)}"
        return f"({', '.join(self.parameters)}, …)"


Found = str | None
"""What was found instead of a hook; None if it is as expected."""


def mismatches(hooks: Iterable[Hook], look: Callable[[Hook], Found]) -> list[tuple[Hook, str]]:
    """Return the hooks that are not as expected, each with what was found.

    Args:
        hooks: what to check.
        look: :func:`live`, or :func:`in_source` with the place of the source files.
    """
    return [(hook, found) for hook in hooks if (found := look(hook)) is not None]


def live(hook: Hook) -> Found:
    """Look at the object itself; imports its module."""
    try:
        found: Any = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return "nothing of that name"
    if hook.fields:
        annotated = [inspect.get_annotations(base) for base in found.__mro__]
        return _missing(hook, {name for names in annotated for name in names})
    if isinstance(found, property):
        found = found.fget
    return _differing(hook, list(inspect.signature(found).parameters))


def installed_source(module: str) -> Path | None:
    """Return the source file of an installed module; imports at most its parent packages."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec and spec.origin else None


def in_source(hook: Hook, source: Callable[[str], Path | None] = installed_source) -> Found:
    """Look at the source file that ``source`` returns for the hook's module."""
    try:
        path = source(hook.module)
    except ImportError:
        path = None
    if path is None or not path.is_file():
        return "no such module"
    node: ast.AST | None = _parsed(path)
    for part in hook.name.split("."):
        node = next(
            (child for child in getattr(node, "body", ()) if getattr(child, "name", "") == part),
            None,
        )
    if hook.fields and isinstance(node, ast.ClassDef):
        annotated = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
        return _missing(hook, {ast.unparse(target) for target in annotated})
    if isinstance(node, ast.FunctionDef):
        return _differing(hook, [argument.arg for argument in node.args.args])
    return "nothing of that name"


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _missing(hook: Hook, fields: set[str]) -> Found:
    missing = [name for name in hook.fields if name not in fields]
    return f"no field {', '.join(missing)}" if missing else None


def _differing(hook: Hook, parameters: list[str]) -> Found:
    if tuple(parameters[: len(hook.parameters)]) == hook.parameters:
        return None
    return f"({', '.join(parameters)})"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
