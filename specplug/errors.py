"""The errors specplug raises: each says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecplugError(Exception):
    """Base class of all specplug errors.

    Attributes:
        code: a stable, searchable identifier of the kind of error.
        hint: what the user can do about it; part of the message.
    """

    code = "specplug-error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f" {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries in engines; keyword arguments would be lost.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[SpecplugError], message: str, hint: str) -> SpecplugError:
    return kind(message, hint=hint)


class UnknownNameError(SpecplugError, LookupError):
    """Nothing of this name is registered."""


class NameConflictError(SpecplugError, LookupError):
    """Two distributions registered something under one name, so neither is used."""


class UnknownProposerError(UnknownNameError):
    """No proposer of this name is registered."""

    code = "unknown-proposer"


class ProposerConflictError(NameConflictError):
    """Two distributions registered a proposer under one name, so neither is used."""

    code = "proposer-conflict"


class UnknownLengthPolicyError(UnknownNameError):
    """No length policy of this name is registered."""

    code = "unknown-length-policy"


class LengthPolicyConflictError(NameConflictError):
    """Two distributions registered a length policy under one name, so neither is used."""

    code = "length-policy-conflict"


class PluginError(SpecplugError, RuntimeError):
    """A plugin could not be loaded or registered."""

    code = "plugin-error"


class OptionError(SpecplugError, ValueError):
    """A setting or an option has an unknown name, a wrong type or a value out of range."""

    code = "bad-option"


class CapabilityError(SpecplugError, RuntimeError):
    """The proposer needs something that this engine does not provide."""

    code = "missing-capability"


class EngineSupportError(SpecplugError, RuntimeError):
    """The installed engine is not one that specplug knows how to drive."""

    code = "unsupported-engine"


class DependencyError(SpecplugError, ImportError):
    """A package that the chosen proposer or command needs is not installed."""

    code = "missing-dependency"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known word nearest to ``word``, or ``""``."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{match[0]}'?" if match else ""
