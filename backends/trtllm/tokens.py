"""The tokens of all running requests as one matrix, kept up with what the engine holds."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from specplug.proposer import Int32Array

BEAM = 0
"""Speculation and beam search exclude each other: every request has one beam."""


class TokenTable:
    """Every token of every running request, read from the engine once.

    TensorRT-LLM keeps tokens in C++ and hands out copies: of a long request a whole copy at every
    step would cost more than drafting does.

    Attributes:
        token_ids: int32 ``[max_rows, width]``; grows as needed.
    """

    def __init__(self) -> None:
        self.token_ids: Int32Array = np.zeros((8, 2048), np.int32)
        self._rows: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._free: list[int] = []

    def row(self, request_id: str) -> int:
        """Return the request's row of ``token_ids``."""
        return self._rows[request_id]

    def follow(self, request_id: str, request: Any) -> int:
        """Take in what is new of a request, known or not; return its number of tokens.

        Args:
            request_id: its id.
            request: the engine's ``LlmRequest``.
        """
        if request_id not in self._rows:
            self._rows[request_id] = heappop(self._free) if self._free else len(self._rows)
            self._lengths[request_id] = 0
        row, known = self._rows[request_id], self._lengths[request_id]
        length: int = request.get_num_tokens(BEAM)
        self._make_room(row + 1, length)
        if known == 0:
            self.token_ids[row, :length] = request.get_tokens(BEAM)
        else:
            for i in range(known, length):
                self.token_ids[row, i] = request.get_token(BEAM, i)
        self._lengths[request_id] = length
        return length

    def drop(self, request_id: str) -> None:
        """Forget a request; ids that are not known are ignored."""
        if request_id in self._rows:
            heappush(self._free, self._rows.pop(request_id))
            del self._lengths[request_id]

    def _make_room(self, rows: int, width: int) -> None:
        has_rows, has_width = self.token_ids.shape
        if rows <= has_rows and width <= has_width:
            return
        wanted = (_doubled(has_rows, rows), _doubled(has_width, width))
        larger = np.zeros(wanted, np.int32)
        larger[:has_rows, :has_width] = self.token_ids
        self.token_ids = larger


def _doubled(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size
