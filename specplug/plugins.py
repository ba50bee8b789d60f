"""Finds proposers: which distribution each came from, what failed, what was refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import pluggy

from specplug import hookspecs
from specplug.config import validate
from specplug.errors import (
    CapabilityError,
    LengthPolicyConflictError,
    PluginError,
    ProposerConflictError,
    SpecplugError,
    UnknownLengthPolicyError,
    UnknownProposerError,
)
from specplug.hookspecs import PROJECT
from specplug.length import LengthPolicy, LengthPolicySpec
from specplug.proposer import Capability, DeviceProposer, EngineInfo, Proposer, ProposerSpec
from specplug.registry import BLOCK_VARIABLE, Origin, Problem, Registered, Registry

logger = logging.getLogger(__name__)

GROUP = "specplug"
"""The entry-point group of plugins."""


class PluginManager:
    """Loads plugins from the entry-point group ``specplug`` and keeps account of them.

    A broken plugin never stops the others: it is rolled back, logged, and listed in
    ``problems``. A name that several plugins claim is refused, for that name only.

    Attributes:
        length_policies: the registered ones; proposers are the manager's own.
        problems: plugins that could not be used.
        blocked: plugins that were not loaded because the user said so.

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
        self._proposers: Registry[ProposerSpec] = Registry(
            "proposer", UnknownProposerError, ProposerConflictError
        )
        self.length_policies: Registry[LengthPolicySpec] = Registry(
            "length policy", UnknownLengthPolicyError, LengthPolicyConflictError
        )
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
        decorated with ``specplug.proposer``.

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

    def _claim(self, specs: Iterable[ProposerSpec | LengthPolicySpec], origin: Origin) -> None:
        for spec in specs:
            if isinstance(spec, ProposerSpec):
                self._proposers.claim(spec, origin)
            else:
                self.length_policies.claim(spec, origin)

    def _report(self, origin: Origin, error: BaseException) -> None:
        problem = Problem(origin, f"{type(error).__name__}: {error}")
        self.problems.append(problem)
        logger.warning("specplug plugin left out: %s", problem)

    def __iter__(self) -> Iterator[Registered[ProposerSpec]]:
        """Yield every usable proposer, by name."""
        return iter(self._proposers)

    def conflicts(self) -> dict[str, list[Origin]]:
        """Return the names that several plugins claim, with all their origins."""
        return {**self._proposers.conflicts(), **self.length_policies.conflicts()}

    def get(self, name: str) -> Registered[ProposerSpec]:
        """Return the proposer of this name.

        Raises:
            UnknownProposerError: listing the registered names, the nearest first.
            ProposerConflictError: naming every plugin that claims it.
        """
        return self._proposers.get(name, self.problems)

    def create_length_policy(self, name: str, options: Mapping[str, Any]) -> LengthPolicy:
        """Make the length policy ``name``.

        Raises:
            SpecplugError: unknown name, wrong option, missing dependency.
        """
        registered = self.length_policies.get(name, self.problems)
        validated = validate(
            registered.spec.options, options, f"options of the length policy '{name}'"
        )
        policy = self.length_policies.factory(registered)(validated)
        if not isinstance(policy, LengthPolicy):
            raise PluginError(
                f"The factory of '{name}' ({registered.origin}) made "
                f"{type(policy).__name__}, which is not a specplug.LengthPolicy."
            )
        return policy

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
        proposer = self._proposers.factory(registered)(validated)
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

    def with_parts(self, engine: EngineInfo) -> EngineInfo:
        """Return the engine with a ``make_proposer`` that makes any registered proposer."""
        make_proposer = partial(self.create, provides=engine.for_parts().provides)
        return replace(engine, make_proposer=make_proposer)

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


def _spec_of(plugin: Any) -> ProposerSpec | LengthPolicySpec | None:
    spec = getattr(plugin, "specplug_spec", plugin)
    return spec if isinstance(spec, ProposerSpec | LengthPolicySpec) else None


_OFFERING = {
    "specplug_proposers": ProposerSpec,
    "specplug_length_policies": LengthPolicySpec,
}
"""The hooks that return specs, and of which kind."""


def _offered(plugin: Any, callers: list[pluggy.HookCaller]) -> list[Any]:
    specs: list[Any] = []
    for caller in callers:
        kind = _OFFERING.get(caller.name)
        if kind is None:
            continue
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin:
                offered = list(_call(implementation, {}) or ())
                for spec in offered:
                    if not isinstance(spec, kind):
                        raise PluginError(
                            f"{caller.name} returned {spec!r}, expected {kind.__name__}."
                        )
                specs += offered
    return specs


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


def _roll_back(manager: pluggy.PluginManager, plugin: Any, key: str) -> None:
    if manager.has_plugin(key):
        manager.unregister(plugin, name=key)


def _names(capabilities: Iterable[Capability]) -> str:
    return ", ".join(sorted(capabilities))
