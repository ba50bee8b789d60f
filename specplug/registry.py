"""What plugins registered under which name, and who claims a name twice."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from specplug.errors import (
    DependencyError,
    NameConflictError,
    PluginError,
    UnknownNameError,
    nearest,
)

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


class Spec(Protocol):
    """What all specs have."""

    @property
    def name(self) -> str:
        """What users write."""

    @property
    def factory(self) -> Callable[[Any], Any] | str:
        """Makes one from its options."""

    @property
    def install_hint(self) -> str:
        """What to do when the factory cannot be imported."""


_S = TypeVar("_S", bound=Spec)


@dataclass(frozen=True, slots=True)
class Registered(Generic[_S]):
    """A spec and where it came from."""

    spec: _S
    origin: Origin


class Registry(Generic[_S]):
    """The specs of one kind. A name that several plugins claim is refused, for that name only.

    Args:
        kind: what they are, in error messages.
        unknown: raised for a name that nobody registered.
        conflict: raised for a name that several plugins claim.
    """

    def __init__(
        self, kind: str, unknown: type[UnknownNameError], conflict: type[NameConflictError]
    ) -> None:
        self._kind = kind
        self._unknown, self._conflict = unknown, conflict
        self._claims: dict[str, list[Registered[_S]]] = {}

    def claim(self, spec: _S, origin: Origin) -> None:
        """Register a spec."""
        self._claims.setdefault(spec.name, []).append(Registered(spec, origin))

    def __iter__(self) -> Iterator[Registered[_S]]:
        """Yield every usable one, by name."""
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

    def get(self, name: str, problems: list[Problem]) -> Registered[_S]:
        """Return what has this name.

        Args:
            name: what the user wrote.
            problems: the plugins that could not be loaded: it may be one of theirs.

        Raises:
            UnknownNameError: listing the registered names, the nearest first.
            NameConflictError: naming every plugin that claims it.
        """
        claims = self._claims.get(name, [])
        if len(claims) == 1:
            return claims[0]
        if claims:
            origins = " and ".join(str(claim.origin) for claim in claims)
            raise self._conflict(
                f"The {self._kind} name '{name}' is claimed by {origins}.",
                hint=f"Uninstall one, or name one of them in {BLOCK_VARIABLE}.",
            )
        names = [registered.spec.name for registered in self]
        broken = "".join(f" Left out: {problem}." for problem in problems)
        raise self._unknown(
            f"There is no {self._kind} '{name}'.{nearest(name, names)}",
            hint=f"Registered are: {', '.join(names) or 'none'}.{broken}",
        )

    def factory(self, registered: Registered[_S]) -> Callable[[Any], Any]:
        """Return what makes one, imported if need be.

        Raises:
            DependencyError: with the plugin's own hint.
            PluginError: it does not exist.
        """
        factory = registered.spec.factory
        if not isinstance(factory, str):
            return factory
        module, _, attribute = factory.partition(":")
        try:
            found: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise DependencyError(
                f"The {self._kind} '{registered.spec.name}' ({registered.origin}) cannot be "
                f"imported: {error}.",
                hint=registered.spec.install_hint,
            ) from error
        except AttributeError as error:
            raise PluginError(
                f"The factory '{factory}' of {registered.origin} does not exist: {error}."
            ) from error
        return found
