"""Speed by length policy and batch size in the real vLLM, against an engine without speculation.

``python -m specplug.demo.environment python -m benchmarks.length_policies`` runs the demo model at
temperature 0 in two engines, one of them with a proposer. Its length policy is switched between
runs, so fixed lengths and ``adaptive`` are compared in one process; what ``adaptive`` learnt stays,
as in a server, also from one workload to the next. With length 0 that engine drafts nothing: how
far it is from the one without speculation shows what chance does here. Every method answers the
same prompts in turn, round by round; what is printed is the median over rounds of the ratio to no
speculation in the same round, and whether all texts were the same. The JSON has every round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.free_text import PROMPTS as FREE
from specplug.demo.prompts import PROMPTS as DEMO
from specplug.length import Lengths, Load, Outcome
from specplug.lengths.adaptive import Adaptive, AdaptiveOptions
from specplug.proposer import Batch, Drafts

K = 8
WARM_UP, MAX_TOKENS = 24, 64
AWAKE_TOKENS = 8
"""An engine that rested is slow at first, and the other's threads stay busy for a while after it
has answered; so, not timed, an engine answers with so many tokens before it answers in earnest."""
COPYING = [prompt.text for prompt in DEMO if prompt.workload == "code edit"]
WORKLOADS = {
    "copying": COPYING,
    "free text": FREE,
    "mixed": [text for pair in zip(COPYING * 3, FREE, strict=True) for text in pair],
}
METHODS = ("none", "0", "2", "4", "8", "adaptive")
"""An engine without speculation, fixed lengths, and the policy."""


def serve(proposer: str | None, most: int, line: Connection) -> None:
    """Answer batches: each with what it took, its texts and what was drafted."""
    from vllm import LLM, SamplingParams

    from specplug.demo.model import prepare_model
    from specplug.runtime import running

    speculation = {"model": f"specplug.vllm.{proposer}", "num_speculative_tokens": K}
    llm = LLM(
        str(prepare_model(print)),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=most,
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        speculative_config=speculation if proposer else None,
    )
    if proposer:
        [runtime] = running()
        policy = runtime.length.policy = Switched(AdaptiveOptions())
        policy.prepare(runtime.engine)
    line.send("ready")
    while (request := line.recv()) is not None:
        method, texts, namespace, max_tokens = request
        if proposer:
            policy.k = None if method == "adaptive" else int(method)
        options = {"specplug_cache_namespace": namespace} if proposer == "suffix" else {}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=options
        )
        messages = [[{"role": "user", "content": text}] for text in texts]
        started = time.perf_counter()
        results = llm.chat(messages, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        line.send((seconds, [list(result.outputs[0].token_ids) for result in results]))


class Switched(Adaptive):
    """``adaptive``, which lives as long as in a server, and is put aside for fixed lengths.

    Attributes:
        k: draft and verify this many tokens; None lets the policy decide.
    """

    k: int | None = None

    def ask(self, batch: Batch, load: Load) -> Lengths:
        """Ask as it is told to, or as it decides."""
        if self.k is None:
            return super().ask(batch, load)
        return batch.max_draft_tokens.clip(max=self.k)

    def choose(self, batch: Batch, drafts: Drafts, load: Load) -> Lengths:
        """Take all, or what it decides."""
        return super().choose(batch, drafts, load) if self.k is None else drafts.lengths

    def observe(self, outcome: Outcome) -> None:
        """Learn from its own decisions only."""
        if self.k is None:
            super().observe(outcome)


def measure(proposer: str, batches: list[int], rounds: int) -> dict[str, dict[str, Any]]:
    """Return each round's ratios by workload with batch size, and method."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the runtime is in this process then
    context = multiprocessing.get_context("spawn")
    lines = {}
    for name in (None, proposer):
        lines[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, max(batches), theirs), daemon=True).start()
        lines[name].recv()

    def run(method: str, texts: list[str], namespace: str, max_tokens: int) -> Any:
        line = lines[None if method == "none" else proposer]
        line.send(("0", FREE[:1], "awake", AWAKE_TOKENS))
        line.recv()
        line.send((method, texts, namespace, max_tokens))
        return line.recv()

    found: dict[str, dict[str, Any]] = {}
    for workload, prompts in WORKLOADS.items():
        for batch in batches:
            texts = [prompts[i % len(prompts)] for i in range(batch)]
            ratios: dict[str, list[float]] = {method: [] for method in METHODS}
            same = True
            for round_number in range(rounds):
                taken, said = {}, {}
                turn = round_number % len(METHODS)
                for method in METHODS[turn:] + METHODS[:turn]:
                    namespace = f"{workload} {batch} {round_number} {method}"
                    if round_number == 0:
                        run(method, texts, f"{namespace} warm-up", WARM_UP)
                    taken[method], said[method] = run(method, texts, namespace, MAX_TOKENS)
                for method in METHODS:
                    ratios[method].append(taken["none"] / taken[method])
                same &= all(said[method] == said["none"] for method in METHODS)
            label = f"{workload}, batch {batch}"
            found[label] = {**ratios, "same": same}
            print(_line(label, found[label]), flush=True)
    for line in lines.values():
        line.send(None)
    return found


def _line(label: str, row: dict[str, Any]) -> str:
    ratios = " | ".join(f"{median(row[method]):.2f}" for method in METHODS)
    return f"| {label} | {ratios} | {'yes' if row['same'] else 'NO'} |"


def draw(found: dict[str, dict[str, Any]], batches: list[int], path: Path) -> None:
    """Draw the speed-up against the batch size, a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(WORKLOADS), figsize=(11, 3.6), layout="constrained", sharey=True
    )
    for panel, workload in zip(panels, WORKLOADS, strict=True):
        for method in METHODS[2:]:
            values = [median(found[f"{workload}, batch {batch}"][method]) for batch in batches]
            adaptive = method == "adaptive"
            panel.plot(
                range(len(batches)), values, marker="o", linewidth=2.5 if adaptive else 1.2,
                color="black" if adaptive else None,
                label=method if adaptive else f"fixed K = {method}",
            )  # fmt: skip
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_xticks(range(len(batches)), batches)
        panel.set_title(workload)
        panel.set_xlabel("requests in the batch")
    panels[0].set_ylabel("speed, as a multiple of no speculation")
    panels[-1].legend()
    figure.savefig(path)


def main() -> None:
    """Measure, print, and draw if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proposer", default="suffix")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| | " + " | ".join(METHODS) + " | same text |")
    print("|---" * (len(METHODS) + 2) + "|")
    found = measure(arguments.proposer, arguments.batches, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.figure:
        draw(found, arguments.batches, arguments.figure)


if __name__ == "__main__":
    main()
