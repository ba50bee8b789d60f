"""Columns of per-request state, indexed by the requests' slots."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_A = TypeVar("_A", bound=NDArray[Any])


def with_room(column: _A, slot: int) -> _A:
    """Return a column of per-request state, ``[slots, ...]``, with a place for ``slot``."""
    if slot < len(column):
        return column
    room = max(64, 2 * slot) - len(column)
    return np.pad(column, [(0, room)] + [(0, 0)] * (column.ndim - 1))  # type: ignore[return-value]
