"""What the compiled kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from specplug.proposer import Batch

Int64Array = NDArray[np.int64]

INT32S = types.Array(types.int32, 1, "C")
INT64S = types.Array(types.int64, 1, "C")
MATRIX32 = types.Array(types.int32, 2, "C")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(*signature: Any) -> Callable[[_F], _F]:
    """Compile now, from the cache on disk where one can be written (read-only installs cannot)."""

    def decorate(function: _F) -> _F:
        try:
            kernel = numba.njit(*signature, cache=True, nogil=True)(function)
        except RuntimeError:  # numba found no place for its cache
            kernel = numba.njit(*signature, nogil=True)(function)
        return kernel  # type: ignore[no-any-return]

    return decorate


def _pointer_to(element: Any) -> Any:
    """Return a function that turns an address into a pointer.

    One call of a kernel then reaches the arrays of all requests, wherever they are.
    """

    @intrinsic
    def pointer(_context, _address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


int32_at = _pointer_to(types.int32)
int64_at = _pointer_to(types.int64)


@compiled(types.uint64(types.uint64, types.int64))
def mixed(state, token):  # type: ignore[no-untyped-def]
    """Take one more token into a hash."""
    state = (state ^ np.uint64(token)) * _MULTIPLIER
    return state ^ (state >> _HALF)


def token_addresses(batch: Batch) -> Int64Array:
    """Return where each request's tokens begin, int64 ``[n]``."""
    row_bytes = batch.token_ids.strides[0]
    return batch.token_ids.ctypes.data + batch.rows.astype(np.int64) * row_bytes
