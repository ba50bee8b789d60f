"""Writes what was served to a file, as ``specplug replay`` reads it."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from secrets import token_hex

import numpy as np
from pydantic_core import to_json

from specplug.errors import OptionError

logger = logging.getLogger(__name__)


class Recorder:
    """Records requests, one JSON line each when it ends: token ids, and nothing else.

    Each process has a file of its own, ``record-<something>.jsonl``, that holds whole lines only
    and that only its owner may read. At the limit, or when a line cannot be written, recording
    ends; serving does not.

    Args:
        folder: where the file goes.
        max_bytes: the most that is written.

    Raises:
        OptionError: the folder is not there or cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.path = folder / f"record-{os.getpid()}-{token_hex(4)}.jsonl"
        self._size, self._max_bytes = 0, max_bytes
        self._requests: dict[str, tuple[Sequence[int], array[int]]] = {}
        try:
            # Unbuffered: a line is on its way once it is written.
            self._file: FileIO | None = open(self.path, "xb", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise OptionError(
                f"record_folder is {folder}, where no file can be written: {error}.",
                hint="Name a folder that is there and that the engine's workers may write to.",
            ) from error

    def begin(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Note a request's prompt."""
        if self._file:
            self._requests[request_id] = prompt_token_ids, array("i")

    def add(self, request_id: str, token_ids: list[int]) -> None:
        """Note what a request was answered."""
        if request_id in self._requests:
            self._requests[request_id][1].extend(token_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Write the request down, if there was any output."""
        prompt, output = self._requests.pop(request_id, ((), ()))
        if not output or not self._file:
            return
        record = {
            "id": request_id,
            "prompt_token_ids": np.asarray(prompt, np.int32).tolist(),
            "output_token_ids": output.tolist(),
        }
        line = to_json(record) + b"\n"
        if self._size + len(line) > self._max_bytes:
            self._stop(f"{self.path} has reached record_max_bytes ({self._max_bytes})")
            return
        try:
            self._write(self._file, line)
        except OSError as error:
            self._stop(f"{self.path} cannot be written ({error})")

    def _write(self, file: FileIO, line: bytes) -> None:
        """Write a line whole or not at all."""
        if os.fstat(file.fileno()).st_nlink == 0:
            raise OSError("it was deleted")
        if file.write(line) < len(line):
            file.truncate(self._size)
            raise OSError("no room for a whole line")
        self._size += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
            self._file = None

    def _stop(self, reason: str) -> None:
        logger.warning("specplug records no more requests: %s.", reason)
        self._requests.clear()
        self.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
