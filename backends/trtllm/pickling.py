"""Refuses, before an engine starts, what its workers could not unpickle."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

from specplug.errors import PluginError


class _Traveller(pickle.Pickler):
    """Pickles, and refuses what is named by where it stands when nobody else can stand there."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, type | FunctionType):
            if thing.__module__ == "__main__":
                raise PluginError(f"{thing.__qualname__} is defined in the script that is run")
            if "<" in thing.__qualname__:
                raise PluginError(f"{thing.__qualname__} is a lambda or defined in a function")
        return NotImplemented


def refuse_to_stay(thing: Any, what: str) -> None:
    """Check that workers, which are other processes, would find all that an object names.

    Args:
        thing: what is about to be pickled.
        what: its name, for the error message.

    Raises:
        PluginError: naming what cannot travel, and what to do.
    """
    try:
        _Traveller(io.BytesIO()).dump(thing)
    except Exception as error:
        reason = error.message if isinstance(error, PluginError) else f"{error}"
        raise PluginError(
            f"{what} cannot travel to the engine's workers: {reason}.",
            hint="Define it at the top level of a module that the workers can import or, better, "
            "register it as an entry point of the group 'specplug' and give its name.",
        ) from None
