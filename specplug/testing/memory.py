"""Finds what a plugin still holds of requests that have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

_CONTAINERS = (list, tuple, set, frozenset, deque)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)


def where_held(name: str, plugin: Any, ids: Collection[str]) -> str:
    """Return where, in what a plugin refers to, one of some ids stands; empty if nowhere.

    Looks into attributes, mappings and collections; not into modules, classes and functions.
    """
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [(name, plugin)]
    while left:
        path, thing = left.pop()
        if isinstance(thing, str) and thing in ids:
            return f"{path} is {thing!r}"
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            held = next((key for key in thing if isinstance(key, str) and key in ids), None)
            if held is not None:
                return f"{path} has the key {held!r}"
        left += _inside(path, thing)
    return ""


def _inside(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with its name in code."""
    if isinstance(thing, Mapping):
        for key, value in thing.items():
            yield f"a key of {path}", key
            yield f"{path}[{key!r}]", value
    elif isinstance(thing, _CONTAINERS):
        for i, value in enumerate(thing):
            yield f"{path}[{i}]", value
    elif not callable(thing):
        for name, value in _attributes(thing):
            yield f"{path}.{name}", value


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)
