"""What a draft model costs by batch size: one call for the batch, against a call per request.

``python -m benchmarks.draft_model [--model FOLDER] [--figure FILE]`` drafts with the demo's model,
on one core. Both ways take turns, so that the noise of a busy machine hits both alike.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np

from specplug.proposer import Batch, EngineInfo, Int32Array, Request
from specplug.proposers.draft_model import DraftModelOptions, DraftModelProposer

K = 4
CONTEXT = 256
SIZES = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
MAX_LEN = 1024


def proposer(model: Path) -> DraftModelProposer:
    """Return the draft model, ready, with ``max(SIZES)`` requests."""
    made = DraftModelProposer(
        DraftModelOptions(model=str(model), dtype="float32", cache_bytes=2 * 2**30)
    )
    made.prepare(EngineInfo("benchmark", 49152, MAX_LEN, max(SIZES), K))
    for slot in range(max(SIZES)):
        made.begin(Request(str(slot), slot, [1], MAX_LEN, K))
    return made


class Texts:
    """Requests that each get two tokens a step, and nothing that was drafted."""

    def __init__(self, model: DraftModelProposer) -> None:
        rng = np.random.default_rng(0)
        self._model = model
        self._tokens = rng.integers(0, 49152, (max(SIZES), MAX_LEN), dtype=np.int32)
        self._sizes = np.full(max(SIZES), CONTEXT, np.int32)

    def draft(self, slots: Int32Array) -> float:
        """Draft for some requests in one call; return its seconds."""
        self._sizes[slots] += 2
        sizes, new = self._sizes[slots], np.full(len(slots), 2, np.int32)
        ids, limits = list(map(str, slots)), np.full(len(slots), K, np.int32)
        batch = Batch(ids, slots, self._tokens, slots, sizes, new, sizes, limits)
        started = time.perf_counter()
        self._model.propose(batch)
        return time.perf_counter() - started


def measured(texts: Texts) -> dict[int, tuple[float, float]]:
    """Return milliseconds for each batch size: of one call, and of a call per request."""
    everyone = np.arange(max(SIZES), dtype=np.int32)
    for _ in range(2 + max(SIZES) * CONTEXT // 1024):
        texts.draft(everyone)  # until all are caught up with
    together: dict[int, list[float]] = {size: [] for size in SIZES}
    alone: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(ROUNDS):
        for size in SIZES:
            together[size].append(texts.draft(everyone[:size]))
            alone[size].append(sum(texts.draft(everyone[i : i + 1]) for i in range(size)))
    return {size: (1e3 * median(together[size]), 1e3 * median(alone[size])) for size in SIZES}


def draw(found: dict[int, tuple[float, float]], path: Path) -> None:
    """Draw both ways by batch size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    for i, label in ((1, "a call per request"), (0, "one call for the batch")):
        axes.plot(SIZES, [found[size][i] for size in SIZES], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel=f"ms for {K} tokens each")
    axes.set_xticks(SIZES, map(str, SIZES))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default the demo's")
    parser.add_argument("--figure", type=Path, help="where to draw it, such as batch.svg")
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        from specplug.demo.model import prepare_model

        model = prepare_model(print)
    import torch

    torch.set_num_threads(1)  # two that wait for each other measure what else the machine does
    found = measured(Texts(proposer(model)))
    print("| requests | one call, ms | a call each, ms | ratio | ms per request |")
    print("|---" * 5 + "|")
    for size, (together, alone) in found.items():
        print(
            f"| {size} | {together:.0f} | {alone:.0f} | {alone / together:.2f} | "
            f"{together / size:.1f} |"
        )
    if arguments.figure:
        draw(found, arguments.figure)


if __name__ == "__main__":
    main()
