"""What is compared: no speculation, the engine's own methods, specplug's proposers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from specplug.config import Settings
from specplug.errors import DependencyError, OptionError
from specplug.plugins import PluginManager
from specplug.replay.run import Candidate

NO_SPECULATION = "no speculation"
IMPORTED_AS = {"llamacpp": "llama_cpp"}
"""The module of an engine, where it has another name."""


class Backend(Protocol):
    """What a backend's module ``bench`` has to have, beside ``serve``.

    Attributes:
        LARGEST_BATCH: the most requests that the engine serves at once; None for any number.
    """

    LARGEST_BATCH: int | None

    def own_methods(self, k: int) -> dict[str, dict[str, Any]]:
        """Return the engine's own methods that need no further model: a label, its arguments."""

    def own(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what the session gets for a method of the engine, from the user's arguments."""

    def ours(self, proposer: str, k: int, section: dict[str, Any]) -> dict[str, Any]:
        """Return what it gets for a proposer; ``section`` holds its options and other settings."""

    def flags(self, speculation: dict[str, Any]) -> str:
        """Return what a user adds to the engine's command or code to get the same."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to generate.

    Attributes:
        label: unique, for people.
        speculation: what the engine's session gets; None for no speculation.
        flags: what a user adds to get it.
        proposer: specplug's proposer, empty for the engine's own methods.
        num_speculative_tokens: K, where specplug chose it.
    """

    label: str
    speculation: Mapping[str, Any] | None = None
    flags: str = ""
    proposer: str = ""
    num_speculative_tokens: int | None = None


def module_of(engine: str) -> str:
    """Return the name of a backend's module ``bench``."""
    return f"specplug.backends.{engine}.bench"


def backend_of(engine: str) -> Backend:
    """Return what a backend knows about being measured.

    Raises:
        DependencyError: the engine is not installed.
    """
    if find_spec(IMPORTED_AS.get(engine, engine)) is None:
        raise DependencyError(
            f"{engine} is not installed.", hint="Only the real engine can be measured."
        )
    return imported(engine)


def imported(engine: str) -> Backend:
    """Return what a backend knows of its engine, which need not be installed."""
    return cast(Backend, import_module(module_of(engine)))


def compared(
    backend: Backend,
    candidates: Sequence[Candidate],
    ks: Sequence[int],
    engine_methods: Iterable[str] = (),
) -> list[Method]:
    """Return the methods in order: no speculation, the engine's own, then specplug's.

    Args:
        backend: of the engine.
        candidates: specplug's proposers.
        ks: the values of K, for each of them.
        engine_methods: ``label={...}`` with the engine's own arguments, in place of the usual
            ones; a single ``none`` leaves those out.
    """
    plugins = PluginManager()
    methods = [Method(NO_SPECULATION)]
    if given := list(engine_methods):
        pairs = [_given(text) for text in given if text != "none"]
        methods += [
            _own(backend, label, backend.own(arguments), None) for label, arguments in pairs
        ]
    for k in ks:
        shown = f" K={k}" if len(ks) > 1 else ""
        if not given:
            own = backend.own_methods(k).items()
            methods += [_own(backend, label + shown, found, k) for label, found in own]
        methods += [
            ours(backend, f"specplug {candidate}{shown}", candidate, k, plugins)
            for candidate in candidates
        ]
    _check_unique([method.label for method in methods])
    return methods


def ours(
    backend: Backend, label: str, candidate: Candidate, k: int, plugins: PluginManager
) -> Method:
    """Return the method of a proposer.

    Raises:
        SpecplugError: an unknown name or wrong options.
    """
    found = backend.ours(candidate.proposer, k, section(candidate, plugins))
    return Method(label, found, backend.flags(found), str(candidate), k)


def _own(backend: Backend, label: str, speculation: dict[str, Any], k: int | None) -> Method:
    return Method(label, speculation, backend.flags(speculation), num_speculative_tokens=k)


def section(candidate: Candidate, plugins: PluginManager) -> dict[str, Any]:
    """Return the ``specplug`` section for a proposer, as far as it can be checked, checked.

    Among its options may stand settings, such as ``length_policy``.

    Raises:
        SpecplugError: an unknown name or wrong options.
    """
    spec = plugins.get(candidate.proposer).spec
    settings = Settings.model_fields.keys() - spec.options.model_fields.keys() - {"options"}
    found = {name: value for name, value in candidate.options.items() if name in settings}
    options = {name: value for name, value in candidate.options.items() if name not in settings}
    plugins.create(candidate.proposer, options, spec.needs)
    return {**found, "options": options} if options else found


def _given(text: str) -> tuple[str, dict[str, Any]]:
    label, equals, value = text.partition("=")
    try:
        arguments = json.loads(value)
    except ValueError:
        arguments = None
    if not (label.strip() and equals and isinstance(arguments, dict)):
        raise OptionError(
            f"--engine-method {text} is neither 'none' nor a label and a JSON object.",
            hint='Write, for example: --engine-method \'eagle={"method": "eagle", ...}\'.',
        )
    return label.strip(), arguments


def _check_unique(labels: list[str]) -> None:
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise OptionError(
            f"Given twice: {', '.join(twice)}.", hint="Each method is measured once in a round."
        )
