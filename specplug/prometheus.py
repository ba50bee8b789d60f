"""specplug's counters on the engine's own ``/metrics``.

They are counted in the engine's workers and served by its front end, which are other processes.
So each worker writes files in the format of prometheus_client's multiprocess mode, and the front
end reads them. Where the engine uses that mode itself, its folder is used and it reads them too.

Nothing here raises: what fails is logged once, and the engine goes on without these metrics.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, cast

from specplug.metrics import Counters
from specplug.proposer import EngineInfo, Usage

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

FOLDER = "SPECPLUG_METRICS_FOLDER"
"""The environment variable by which workers learn where to write."""
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own: set where the engine has several front ends."""
INTERVAL_SECONDS = 1.0
"""How often the files are written while requests run."""

_LABELS = ("model_name", "engine", "proposer")
_OURS = "specplug-"
_FILE_BYTES = 1 << 18


class Snapshot(NamedTuple):
    """What metrics are read from."""

    counters: Counters
    num_running: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its name in queries.
        kind: ``counter``, or how the gauges of workers with the same labels are put together.
        help: what it is.
        read: returns its value: one, or one for each position in a draft, or none if unknown.
        by_position: whether it has the label ``position``.
    """

    name: str
    kind: Literal["counter", "gauge_livesum", "gauge_livemax"]
    help: str
    read: Callable[[Snapshot], Iterable[float]]
    by_position: bool = False

    @property
    def family(self) -> str:
        """Its name in files and HELP lines."""
        return self.name.removesuffix("_total")


METRICS = (
    Metric(
        "specplug_requests_total", "counter",
        "Requests begun.",
        lambda now: [now.counters.num_requests],
    ),
    Metric(
        "specplug_steps_total", "counter",
        "Verification steps, counted per request, with a draft or without.",
        lambda now: [now.counters.num_steps],
    ),
    Metric(
        "specplug_proposed_tokens_total", "counter",
        "Tokens that the proposer drafted, before the length policy cut drafts.",
        lambda now: [now.counters.num_proposed_tokens],
    ),
    Metric(
        "specplug_drafts_total", "counter",
        "Drafts verified; an empty draft is none.",
        lambda now: [now.counters.num_drafts],
    ),
    Metric(
        "specplug_draft_tokens_total", "counter",
        "Tokens in verified drafts.",
        lambda now: [now.counters.num_draft_tokens],
    ),
    Metric(
        "specplug_accepted_tokens_total", "counter",
        "Draft tokens that were accepted and kept.",
        lambda now: [now.counters.num_accepted_tokens],
    ),
    Metric(
        "specplug_accepted_tokens_per_pos_total", "counter",
        "Draft tokens that were accepted and kept, by their position in the draft, from 0.",
        lambda now: now.counters.num_accepted_tokens_per_pos,
        by_position=True,
    ),
    Metric(
        "specplug_propose_calls_total", "counter",
        "Calls of the proposer: one for each step of the batch that can use a draft.",
        lambda now: [now.counters.num_propose_calls],
    ),
    Metric(
        "specplug_propose_seconds_total", "counter",
        "Time spent in these calls.",
        lambda now: [now.counters.propose_seconds],
    ),
    Metric(
        "specplug_faults_total", "counter",
        "Exceptions and invalid results of the proposer.",
        lambda now: [now.counters.num_faults],
    ),
    Metric(
        "specplug_running_requests", "gauge_livesum",
        "Requests that are alive, whether in the batch or preempted.",
        lambda now: [now.num_running],
    ),
    Metric(
        "specplug_switched_off", "gauge_livemax",
        "1 if the proposer failed in too many steps in a row and was switched off, else 0.",
        lambda now: [now.counters.switched_off],
    ),
    Metric(
        "specplug_longest_propose_seconds", "gauge_livemax",
        "The longest call of the proposer since the worker started.",
        lambda now: [now.counters.longest_propose_seconds],
    ),
    Metric(
        "specplug_proposer_requests", "gauge_livesum",
        "Requests that the proposer holds something for.",
        lambda now: [now.usage.num_requests] if now.usage else [],
    ),
    Metric(
        "specplug_proposer_bytes", "gauge_livesum",
        "Memory that the proposer holds, its caches included.",
        lambda now: [now.usage.num_bytes] if now.usage else [],
    ),
)  # fmt: skip


def prepare() -> None:
    """Make the metrics part of what this process serves; its workers must start afterwards.

    Idempotent. Processes that multiprocessing started for one that did this leave it at that.
    """
    with _harmless("show its metrics"):
        if FOLDER in os.environ and multiprocessing.parent_process() is not None:
            return
        os.environ[FOLDER] = os.environ.get(SHARED_FOLDER) or _served_folder()


@functools.cache
def _served_folder() -> str:
    from prometheus_client import REGISTRY

    folder = tempfile.mkdtemp(prefix="specplug-metrics-")
    # Unlike atexit it runs in processes of multiprocessing too, and in no forked copy of this one.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-1)
    REGISTRY.register(cast("Collector", _FolderCollector(folder)))
    return folder


class _FolderCollector:
    """What the files of a folder hold, for a registry of prometheus_client."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Family]:
        """Name the metrics; a registry would collect to learn that."""
        from prometheus_client.core import Metric as Family

        return [Family(one.family, one.help, one.kind.split("_")[0]) for one in METRICS]

    def collect(self) -> Iterable[Family]:
        with _harmless("read its metrics"):
            from prometheus_client.multiprocess import MultiProcessCollector

            _remove_gauges_of_the_dead(Path(self._folder))
            return MultiProcessCollector(None, self._folder).collect()  # type: ignore[no-untyped-call,no-any-return]
        return ()


class Publisher:
    """Writes the metrics of one worker, if its front end wants them and it is rank 0.

    Other tensor-parallel ranks count the same. Between writes a step costs two comparisons.

    Args:
        proposer: the proposer's name.
        engine: what the engine is.
    """

    def __init__(self, proposer: str, engine: EngineInfo) -> None:
        self._files: dict[str, _File] = {}
        self._series: list[tuple[_File, list[str], Metric]] = []
        self._last_write = float("-inf")
        folder = os.environ.get(FOLDER)
        if folder and engine.rank == 0:
            with _harmless("write its metrics"):
                self._open(Path(folder), proposer, engine)

    def _open(self, folder: Path, proposer: str, engine: EngineInfo) -> None:
        _remove_gauges_of_the_dead(folder)
        self._files = {kind: _File(folder, kind) for kind in {one.kind for one in METRICS}}
        labels = dict(zip(_LABELS, (engine.model_name, str(engine.replica), proposer), strict=True))
        positions = [{"position": str(i)} for i in range(engine.num_speculative_tokens)]
        for one in METRICS:
            keys = [
                _key(one, {**labels, **more}) for more in (positions if one.by_position else [{}])
            ]
            self._series.append((self._files[one.kind], keys, one))

    def publish(
        self, counters: Counters, num_running: int, usage: Callable[[], Usage | None]
    ) -> None:
        """Write the metrics: at most once in ``INTERVAL_SECONDS``, and when nothing runs.

        Args:
            counters: of the runtime.
            num_running: requests that are alive.
            usage: returns what the proposer holds; called only if something is written.
        """
        if not self._series:
            return
        now = monotonic()
        if num_running and now - self._last_write < INTERVAL_SECONDS:
            return
        self._last_write = now
        with _harmless("write its metrics"):
            snapshot = Snapshot(counters, num_running, usage())
            for file, keys, metric in self._series:
                for key, value in zip(keys, metric.read(snapshot), strict=False):
                    file.write(key, value)

    def close(self) -> None:
        """Let the counters stand, and take the gauges away."""
        self._series.clear()
        with _harmless("close its metrics"):
            for file in self._files.values():
                file.close()
        self._files.clear()


class _File:
    """A file of prometheus_client's multiprocess mode, locked as long as its writer lives."""

    def __init__(self, folder: Path, kind: str) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        self._path = folder / f"{kind}_{_OURS}{uuid.uuid4().hex}.db"
        unfinished = self._path.with_suffix(".new")  # not read by others
        # Room that is there: on a full disk, writing to a mapped hole would end the process.
        unfinished.write_bytes(bytes(_FILE_BYTES))
        self._lock = unfinished.open("rb")
        _lock(self._lock)
        self._values: Any = MmapedDict(str(unfinished))  # type: ignore[no-untyped-call]
        unfinished.rename(self._path)

    def write(self, key: str, value: float) -> None:
        self._values.write_value(key, float(value), 0.0)

    def close(self) -> None:
        self._values.close()
        if self._path.name.startswith("gauge"):
            self._path.unlink(missing_ok=True)
        self._lock.close()


def _key(metric: Metric, labels: dict[str, str]) -> str:
    from prometheus_client.mmap_dict import mmap_key

    return mmap_key(metric.family, metric.name, list(labels), list(labels.values()), metric.help)


def _lock(file: IO[bytes]) -> None:
    import fcntl  # not everywhere that proposers are replayed

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_gauges_of_the_dead(folder: Path) -> None:
    """Remove the gauges of workers that were killed. What they counted stays counted."""
    for path in folder.glob(f"gauge_*_{_OURS}*.db"):
        with suppress(OSError), path.open("rb") as file:
            _lock(file)  # fails while the writer lives
            path.unlink()


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        logger.debug("specplug cannot %s", what, exc_info=True)  # no prometheus_client
    except Exception:
        _warn_once(what)


@functools.cache
def _warn_once(what: str) -> None:
    logger.warning("specplug cannot %s; the engine goes on without.", what, exc_info=True)
