"""What drafting costs: time per request and step by context length, the longest step, memory.

``python -m benchmarks.cost FOLDER`` takes its contexts from the agent sessions that
``benchmarks.datasets`` wrote into the folder. Times are of the proposer's ``propose`` calls.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specplug.config import Settings
from specplug.proposer import Batch, EngineInfo, Int32Array
from specplug.replay.records import read_records
from specplug.runtime import Arrival, Runtime, Step

K = 8
BATCH = 64
CONTEXTS = (1_000, 4_000, 16_000, 43_000, 128_000)
ARRIVING = 128_000
EARLIER = 800
"""Tokens of each output that earlier requests left behind."""
STEPS = 60
BUILT_IN = ("ngram", "prompt_lookup", "suffix", "lookahead", "prediction", "cascade")


@dataclass(slots=True)
class Engine:
    """A batch whose texts grow by a few tokens a step."""

    runtime: Runtime
    tokens: Int32Array
    sizes: list[int] = field(default_factory=list)
    last_call: float = 0.0

    def __post_init__(self) -> None:
        propose = self.runtime.proposer.propose

        def timed(batch: Batch) -> Any:
            started = time.perf_counter()
            result = propose(batch)
            self.last_call = time.perf_counter() - started
            return result

        self.runtime.proposer.propose = timed  # type: ignore[method-assign]

    def serve_earlier(self) -> None:
        """Let requests come and go, so that what is kept of earlier ones is there."""
        for row in range(BATCH):
            self.runtime.begin(Arrival("earlier", [0], self.tokens.shape[1]))
            rows = np.array([row], np.int32)
            self.runtime.step(Step(["earlier"], self.tokens, rows, [1 + EARLIER], [True], {}))
            self.runtime.end("earlier")

    def arrive(self, size: int) -> None:
        """Let the next row's request arrive, with a prompt of ``size`` tokens."""
        row = len(self.sizes)
        prompt = self.tokens[row, :size].tolist()
        self.runtime.begin(Arrival(str(row), prompt, self.tokens.shape[1]))
        self.sizes.append(size)

    def step(self, rng: np.random.Generator) -> float:
        """Let each request say one to three tokens; return the seconds of the ``propose`` call."""
        self.sizes = [size + int(rng.integers(1, 4)) for size in self.sizes]
        n = len(self.sizes)
        ids, rows = [str(row) for row in range(n)], np.arange(n, dtype=np.int32)
        self.runtime.step(Step(ids, self.tokens, rows, self.sizes, [True] * n, {}))
        return self.last_call


def engine(proposer: str, options: dict[str, Any], text: Int32Array, width: int) -> Engine:
    """Return an engine with room for a batch and one more, each row a piece of the text."""
    rng = np.random.default_rng(0)
    begins = rng.integers(0, len(text) - width, BATCH + 1)
    tokens = np.stack([text[begin : begin + width] for begin in begins])
    info = EngineInfo("benchmark", int(text.max()) + 1, width, BATCH + 1, K)
    settings = Settings(options=options, log_interval_seconds=0, length_policy="fixed")
    made = Engine(Runtime(proposer, info, settings), tokens)
    made.serve_earlier()
    return made


def steady(proposer: str, options: dict[str, Any], text: Int32Array) -> tuple[list[float], float]:
    """Return microseconds per request and step by context, medians, and bytes per token.

    The batches take turns, so that the noise of a busy machine hits all contexts alike; and, as
    beside a model, none finds its memory in the processor's caches.
    """
    batches = []
    for context in CONTEXTS:
        warm_up = 10 + BATCH * context // 8_000
        one = engine(proposer, options, text, context + 4 * (warm_up + STEPS))
        for _ in range(BATCH):
            one.arrive(context)
        rng = np.random.default_rng(1)
        for _ in range(warm_up):
            one.step(rng)
        batches.append(one)
    seconds = [[one.step(rng) for one in batches] for _ in range(STEPS)]
    usages = [one.runtime.proposer.usage() for one in batches]
    held = sum(usage.num_bytes for usage in usages if usage)
    per_token = held / sum(sum(one.sizes) for one in batches)
    for one in batches:
        one.runtime.close()
    return [1e6 * median(column) / BATCH for column in zip(*seconds, strict=True)], per_token


def arrival(proposer: str, options: dict[str, Any], text: Int32Array) -> float:
    """Return the longest call in milliseconds while a long prompt joins a running batch."""
    one = engine(proposer, options, text, ARRIVING + 4 * STEPS)
    for _ in range(BATCH):
        one.arrive(8_000)
    rng = np.random.default_rng(1)
    for _ in range(100):
        one.step(rng)
    one.arrive(ARRIVING)
    longest = max(one.step(rng) for _ in range(STEPS))
    one.runtime.close()
    return 1e3 * longest


def start_up() -> float:
    """Return the seconds in which a fresh process loads and prepares all built-in proposers."""
    code = (
        "import time; started = time.perf_counter()\n"
        "from specplug import EngineInfo, Runtime\n"
        f"for name in {BUILT_IN}:\n"
        f"    Runtime(name, EngineInfo('benchmark', 1000, 1000, 4, {K}))\n"
        "print(time.perf_counter() - started)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where benchmarks.datasets wrote its files")
    folder = parser.parse_args().folder
    records = sorted(
        read_records([folder / "agent.jsonl"]), key=lambda record: -len(record.token_ids)
    )
    text = np.concatenate([record.token_ids for record in records[:8]])
    print(f"Microseconds per request and step, batch {BATCH}, by tokens of context; K = {K}.\n")
    print("| proposer | " + " | ".join(f"{context:,}" for context in CONTEXTS), end="")
    print(" | slope, per 100k | bytes per token | longest call, ms |")
    print("|---" * (len(CONTEXTS) + 4) + "|")
    for proposer in ("ngram", "suffix", "lookahead", "cascade"):
        times, per_token = steady(proposer, {}, text)
        slope = float(np.polyfit(CONTEXTS, times, 1)[0]) * 100_000
        longest = median(arrival(proposer, {}, text) for _ in range(3))
        print(f"| `{proposer}` | " + " | ".join(f"{one:.1f}" for one in times), end="")
        print(f" | {slope:+.2f} | {per_token:.0f} | {longest:.1f} |")
    print(
        f"\nThe longest call is the median of 3 tries in which a prompt of {ARRIVING:,} tokens "
        f"joins {BATCH} requests of 8,000."
    )
    start_up()  # the first may compile
    print(f"All built-in proposers load in {start_up():.2f} s.")


if __name__ == "__main__":
    main()
