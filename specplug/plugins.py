"""Finds proposers: which distribution each came from, what failed, what was refused."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pluggy

from specplug import hookspecs
from specplug.config import validate
from specplug.errors import (
    CapabilityError,
    DependencyError,
    PluginError,
    ProposerConflictError,
    SpecplugError,
    UnknownProposerError,
    nearest,
)
from specplug.hookspecs import PROJECT
from specplug.proposer import Capability, DeviceProposer, Proposer, ProposerSpec

logger = logging.getLogger(__name__)

GROUP = "specplug"
"""The entry-point group of proposers."""
BLOCK_VARIABLE = "SPECPLUG_BLOCK"
"""Names what not to load: distributions or ``distribution:entry``, separated by commas."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin came from."""

    distribution: str
    version: str = ""
    entry: str = ""

    @property
    def key(self) -> str:
        """The plugin's unique name: two distributions may use the same entry name."""
        return f"{self.distribution}:{self.entry}"

    def __str__(self) -> str:
        parts = [self.distribution, self.version, self.entry and f"({self.entry})"]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Problem:
    """A plugin that could not be used, and why."""

    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Registered:
    """A proposer and where it came from."""

    spec: ProposerSpec
    origin: Origin


class PluginManager:
    """Loads plugins from the entry-point group ``specplug`` and keeps account of them.

    A broken plugin never stops the others: it is rolled back, logged, and listed in
    ``problems``. A name that several plugins claim is refused, for that name only.

    Args:
        block: what not to load; by default what the environment variable
            ``SPECPLUG_BLOCK`` names.
        discover: whether to look for installed plugins at all.
    """

    def __init__(self, block: Iterable[str] | None = None, *, discover: bool = True) -> None:
        if block is None:
            block = os.environ.get(BLOCK_VARIABLE, "").split(",")
        self._blocked = {name.strip() for name in block if name.strip()}
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._claims: dict[str, list[Registered]] = {}
        self.problems: list[Problem] = []
        self.blocked: list[Origin] = []
        if discover:
            self._discover()

    def _discover(self) -> None:
        found = [(_origin(entry), entry) for entry in metadata.entry_points(group=GROUP)]
        # The order in which distributions are found is not stable; names are.
        for origin, entry in sorted(found, key=lambda pair: pair[0].key):
            if self._blocked & {origin.distribution, origin.key}:
                self.blocked.append(origin)
                continue
            try:
                self._add(entry.load(), origin)
            except (Exception, SystemExit) as error:
                self._report(origin, error)

    def add(self, plugin: Any, *, origin: str = "this process", entry: str = "") -> None:
        """Register a plugin by hand: a module or object with hooks, a spec, or a function
        decorated with :func:`specplug.proposer`.

        Raises:
            PluginError: when it is none of these or does not match the hook specifications;
                nothing of it stays registered.
        """
        entry = entry or getattr(_spec_of(plugin), "name", "") or f"plugin-{id(plugin):x}"
        self._add(plugin, Origin(origin, entry=entry))

    def _add(self, plugin: Any, origin: Origin) -> None:
        spec = _spec_of(plugin)
        if spec is not None:
            self._claim([spec], origin)
            return
        if self._pluggy.has_plugin(origin.key):
            raise PluginError(f"plugin {origin} is registered already.")
        try:
            self._pluggy.register(plugin, name=origin.key)
            # pluggy checks only hooks it has specifications for; a misspelt one is an error too.
            self._pluggy.check_pending()
            implementations = self._pluggy.get_hookcallers(plugin) or []
            if not implementations:
                raise PluginError(
                    f"{plugin!r} is not a plugin.",
                    hint="An entry point of the group 'specplug' points at a ProposerSpec, at a "
                    "function decorated with specplug.proposer, or at a module with hooks.",
                )
            self._claim(_offered(plugin, implementations), origin)
        except Exception as error:
            _roll_back(self._pluggy, plugin, origin.key)
            if isinstance(error, SpecplugError):
                raise
            raise PluginError(f"plugin {origin} cannot be registered: {error}") from error

    def _claim(self, specs: list[ProposerSpec], origin: Origin) -> None:
        for spec in specs:
            self._claims.setdefault(spec.name, []).append(Registered(spec, origin))

    def _report(self, origin: Origin, error: BaseException) -> None:
        problem = Problem(origin, f"{type(error).__name__}: {error}")
        self.problems.append(problem)
        logger.warning("specplug plugin left out: %s", problem)

    def __iter__(self) -> Iterator[Registered]:
        """Yield every usable proposer, by name."""
        for name in sorted(self._claims):
            if len(self._claims[name]) == 1:
                yield self._claims[name][0]

    def conflicts(self) -> dict[str, list[Origin]]:
        """Return the names that several plugins claim, with all their origins."""
        return {
            name: [claim.origin for claim in claims]
            for name, claims in sorted(self._claims.items())
            if len(claims) > 1
        }

    def get(self, name: str) -> Registered:
        """Return the proposer of this name.

        Raises:
            UnknownProposerError: listing the registered names, the nearest first.
            ProposerConflictError: naming every plugin that claims it.
        """
        claims = self._claims.get(name, [])
        if len(claims) == 1:
            return claims[0]
        if claims:
            origins = " and ".join(str(claim.origin) for claim in claims)
            raise ProposerConflictError(
                f"The proposer name '{name}' is claimed by {origins}.",
                hint=f"Uninstall one, or name one of them in {BLOCK_VARIABLE}.",
            )
        names = [registered.spec.name for registered in self]
        broken = "".join(f" Left out: {problem}." for problem in self.problems)
        raise UnknownProposerError(
            f"There is no proposer '{name}'.{nearest(name, names)}",
            hint=f"Registered are: {', '.join(names) or 'none'}.{broken}",
        )

    def create(
        self, name: str, options: Mapping[str, Any], provides: frozenset[Capability]
    ) -> tuple[Proposer, ProposerSpec]:
        """Make the proposer ``name`` for an engine that provides ``provides``.

        Raises:
            SpecplugError: unknown name, wrong option, missing capability or dependency.
        """
        registered = self.get(name)
        spec = registered.spec
        if missing := spec.needs - provides:
            raise CapabilityError(
                f"The proposer '{name}' needs {_names(missing)}, which this engine does not "
                f"provide (it provides {_names(provides) or 'nothing beyond tokens'})."
            )
        for implementation in self.implementations("specplug_options"):
            try:
                replaced = _call(implementation, {"name": name, "options": options})
            except Exception as error:
                raise PluginError(
                    f"The hook specplug_options of {implementation.plugin_name} raised "
                    f"{type(error).__name__}: {error}."
                ) from error
            options = options if replaced is None else replaced
        validated = validate(spec.options, options, f"options of the proposer '{name}'")
        proposer = _factory(registered)(validated)
        if not isinstance(proposer, Proposer):
            raise PluginError(
                f"The factory of '{name}' ({registered.origin}) made "
                f"{type(proposer).__name__}, which is not a specplug.Proposer."
            )
        if isinstance(proposer, DeviceProposer) and Capability.DEVICE_TENSORS not in spec.needs:
            raise PluginError(
                f"'{name}' ({registered.origin}) is a DeviceProposer, and its spec does not say "
                "that it needs Capability.DEVICE_TENSORS."
            )
        return proposer, spec

    def implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations of a hook in the order in which they are called."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        return caller.get_hookimpls()[::-1]

    def observers(self, hook: str) -> list[Callable[..., None]]:
        """Return the implementations of an observing hook, each to be called by itself.

        A raise in one pluggy call stops the others; here each stands alone.
        """
        return [
            lambda _impl=implementation, **arguments: _call(_impl, arguments)
            for implementation in self.implementations(hook)
        ]


def _origin(entry: metadata.EntryPoint) -> Origin:
    if entry.dist is None:
        return Origin("unknown distribution", entry=entry.name)
    return Origin(entry.dist.name, entry.dist.version, entry.name)


def _spec_of(plugin: Any) -> ProposerSpec | None:
    spec = getattr(plugin, "specplug_spec", plugin)
    return spec if isinstance(spec, ProposerSpec) else None


def _offered(plugin: Any, callers: list[pluggy.HookCaller]) -> list[ProposerSpec]:
    specs: list[ProposerSpec] = []
    for caller in callers:
        if caller.name != "specplug_proposers":
            continue
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin:
                specs.extend(_call(implementation, {}) or ())
    for spec in specs:
        if not isinstance(spec, ProposerSpec):
            raise PluginError(f"specplug_proposers returned {spec!r}, expected ProposerSpec.")
    return specs


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _roll_back(manager: pluggy.PluginManager, plugin: Any, key: str) -> None:
    if manager.has_plugin(key):
        manager.unregister(plugin, name=key)


def _factory(registered: Registered) -> Callable[[Any], Any]:
    factory = registered.spec.factory
    if not isinstance(factory, str):
        return factory
    module, _, attribute = factory.partition(":")
    try:
        found: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise DependencyError(
            f"The proposer '{registered.spec.name}' ({registered.origin}) cannot be imported: "
            f"{error}.",
            hint=registered.spec.install_hint,
        ) from error
    except AttributeError as error:
        raise PluginError(
            f"The factory '{factory}' of {registered.origin} does not exist: {error}."
        ) from error
    return found


def _names(capabilities: Iterable[Capability]) -> str:
    return ", ".join(sorted(capabilities))
