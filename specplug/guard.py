"""Keeps an engine alive that does not guard the calls it makes of a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Guard:
    """Calls methods; after the first that fails it calls none, and the engine serves on.

    Faults of proposers do not come this far: this is for those of specplug itself.

    Args:
        engine: the engine's name, for people.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._gave_up = False

    def __call__(self, method: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return ``method(*arguments)``; None if it fails or another did before."""
        if self._gave_up:
            return None
        try:
            return method(*arguments)
        except Exception:
            self._gave_up = True
            logger.exception(
                "specplug failed and drafts no more; please report this. %s goes on.", self._engine
            )
            return None
