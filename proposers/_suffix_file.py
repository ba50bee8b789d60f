"""The suffix cache on disk, so that a restart or another replica starts warm."""

from __future__ import annotations

import logging
import os
import time
import zipfile
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any

import numpy as np

from specplug.errors import OptionError
from specplug.proposer import EngineInfo, Int32Array
from specplug.proposers._suffix_cache import Snapshot, SuffixCache, sequences

logger = logging.getLogger(__name__)

FORMAT = "specplug suffix cache"
VERSION = 1


class SuffixFile:
    """One file, read at start-up, replaced now and then and at shutdown.

    A numpy archive (``.npz``, no pickles) with the arrays ``format``, ``version``,
    ``vocab_size``, ``owners`` int64 ``[sequences]``, ``lengths`` int64 ``[sequences]`` and
    ``tokens`` int32 ``[sum(lengths)]``, oldest sequence first.

    Args:
        path: the file.
        interval: how often it is replaced, in seconds.
        engine: the engine.

    Raises:
        OptionError: the folder is not there or cannot be written.
    """

    def __init__(self, path: Path, interval: float, engine: EngineInfo) -> None:
        self._path, self._interval = path, interval
        self._last = time.monotonic()
        self._thread: Thread | None = None
        self._vocab_size = engine.vocab_size
        # Every rank holds the same, so one is enough.
        self._saves = engine.rank == 0
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise OptionError(
                f"cache_file is {path}, but {path.parent} is not a folder that can be written.",
                hint="Create the folder, or name another file.",
            )

    def load(self, cache: SuffixCache) -> None:
        """Fill the cache; a file that is damaged or not ours is left alone, and said so."""
        if not self._path.exists():
            return
        try:
            owners, lengths, tokens = self._read()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            self._saves = False
            logger.warning(
                "specplug suffix: %s is no usable cache file (%s). Serving goes on with an empty "
                "cache, and the file is left as it is: move it away to have a new one saved.",
                self._path, error,
            )  # fmt: skip
            return
        for owner, sequence in zip(
            owners.tolist(), np.split(tokens, np.cumsum(lengths)[:-1]), strict=True
        ):
            cache.add(sequence, owner)
        cache.update(None)
        logger.info("specplug suffix: %d sequences loaded from %s", len(owners), self._path)

    def save_now_and_then(self, cache: SuffixCache) -> None:
        """Save beside serving, if it is time to: an engine may end without a shutdown."""
        now = time.monotonic()
        idle = self._thread is None or not self._thread.is_alive()
        if self._saves and idle and now - self._last >= self._interval:
            self._last = now
            self._thread = Thread(target=self._save, args=(cache.snapshot(),), daemon=True)
            self._thread.start()

    def close(self, cache: SuffixCache) -> None:
        """Save a last time."""
        if self._thread is not None:
            self._thread.join()
        if self._saves:
            self._save(cache.snapshot())

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self._write(list(sequences(snapshot)))
        except OSError as error:
            self._saves = False
            logger.warning(
                "specplug suffix: %s cannot be written (%s); the cache is saved no more.",
                self._path, error,
            )  # fmt: skip

    def _write(self, found: list[tuple[int, Int32Array]]) -> None:
        """Replace the file in one move: a reader sees the old one or the new one."""
        arrays = {
            "format": np.array(FORMAT),
            "version": np.array(VERSION),
            "vocab_size": np.array(self._vocab_size),
            "owners": np.array([owner for owner, _ in found], np.int64),
            "lengths": np.array([len(tokens) for _, tokens in found], np.int64),
            "tokens": np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in found)]),
        }
        with NamedTemporaryFile(
            dir=self._path.parent, prefix=f".{self._path.name}-", delete=False
        ) as file:
            try:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self._path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _read(self) -> tuple[Any, Any, Any]:
        """Return owners, lengths and tokens, all of it checked."""
        if not zipfile.is_zipfile(self._path):
            raise ValueError("it is another kind of file, or was cut off")
        with np.load(self._path, allow_pickle=False) as archive:
            if str(archive["format"]) != FORMAT:
                raise ValueError("it is another kind of file")
            if int(archive["version"]) != VERSION:
                raise ValueError(f"its version is {archive['version']}, expected {VERSION}")
            if int(archive["vocab_size"]) != self._vocab_size:
                raise ValueError(
                    f"it is for a vocabulary of {archive['vocab_size']} tokens, and the model "
                    f"has {self._vocab_size}"
                )
            owners, lengths, tokens = (
                np.asarray(archive[name]) for name in ("owners", "lengths", "tokens")
            )
        whole = (
            owners.shape == lengths.shape == (len(owners),)
            and owners.dtype == lengths.dtype == np.int64
            and tokens.dtype == np.int32
            and tokens.shape == (int(lengths.sum()),)
            and bool((owners > 0).all() and (lengths > 0).all())
        )
        if not whole or not bool(((tokens >= 0) & (tokens < self._vocab_size)).all()):
            raise ValueError("its contents contradict each other")
        return owners, lengths, tokens
