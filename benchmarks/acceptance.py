"""How many tokens a step yields: specplug's proposers and the engines' own rules, on real text.

``python -m benchmarks.acceptance FOLDER`` replays the files that ``benchmarks.datasets`` wrote
into the folder, and prints a table: tokens per step, and in brackets drafted tokens per step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.baselines import BASELINES
from specplug.bench.datasets import DATASETS
from specplug.plugins import PluginManager
from specplug.replay.records import read_records
from specplug.replay.report import as_row, write_json
from specplug.replay.run import Candidate, Result, replay

CANDIDATES = {
    "vLLM n-gram [5,5]": Candidate("baseline_vllm_ngram"),
    "vLLM n-gram [2,4]": Candidate("baseline_vllm_ngram", {"min_n": 2, "max_n": 4}),
    "transformers prompt lookup, n = 2": Candidate("baseline_hf_prompt_lookup"),
    "transformers prompt lookup, n = 3": Candidate(
        "baseline_hf_prompt_lookup", {"max_matching_ngram_size": 3}
    ),
    "`ngram`": Candidate("ngram"),
    "`suffix`": Candidate("suffix"),
    "`suffix`, no cache": Candidate("suffix", {"cache_bytes": 0}),
    "`suffix`, min_confidence 0.1": Candidate("suffix", {"min_confidence": 0.1}),
    "`lookahead`, accepted tokens only": Candidate("lookahead"),
    "`cascade`": Candidate("cascade"),
}


def measure(folder: Path, k: int) -> Iterator[tuple[str, str, Result]]:
    """Yield each candidate's label, a set's name and what was measured."""
    plugins = PluginManager()
    for baseline in BASELINES:
        plugins.add(baseline)
    for name in DATASETS:
        records = read_records([folder / f"{name}.jsonl"])
        for label, candidate in CANDIDATES.items():
            yield label, name, replay(records, candidate, k, plugins=plugins)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where benchmarks.datasets wrote its files")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    arguments = parser.parse_args()

    cells: dict[tuple[str, str], str] = {}
    results = []
    for label, name, result in measure(arguments.folder, arguments.num_speculative_tokens):
        row = as_row(result)
        cells[label, name] = f"{row['tokens_per_step']:.3f} ({row['drafted_per_step']:.2f})"
        results.append(result)
    print(f"| K = {arguments.num_speculative_tokens} | " + " | ".join(DATASETS) + " |")
    print("|---" * (len(DATASETS) + 1) + "|")
    for label in CANDIDATES:
        print(f"| {label} | " + " | ".join(cells[label, name] for name in DATASETS) + " |")
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
