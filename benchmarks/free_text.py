"""Tokens per step on free text in the real vLLM, where little repeats: `lookahead` and others.

``python -m specplug.demo.environment python -m benchmarks.free_text`` starts an engine per
proposer with the demo's model, at temperature 0, and checks that all say the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from multiprocessing.connection import Connection

K = 5
MAX_TOKENS = 200
PROMPTS = [
    "Tell me a story about a lighthouse keeper and a whale.",
    "Explain why the sky is blue to a ten year old.",
    "Give me advice for a first job interview.",
    "Write about the history of tea.",
    "What makes a good friendship? Discuss.",
    "Describe a walk through an autumn forest.",
]
PROPOSERS = ("ngram", "suffix", "lookahead", "cascade")


def serve(proposer: str, k: int, answer: Connection) -> None:
    """Answer all prompts with one engine; send the texts and what was counted."""
    from vllm import LLM, SamplingParams

    from specplug.demo.model import prepare_model
    from specplug.runtime import running

    llm = LLM(
        str(prepare_model(print)),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=len(PROMPTS),
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        speculative_config={
            "model": f"specplug.vllm.{proposer}",
            "num_speculative_tokens": k,
        },
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    results = llm.chat(messages, sampling, use_tqdm=False)
    [runtime] = running()
    counters = runtime.counters
    answer.send(
        {
            "texts": [list(result.outputs[0].token_ids) for result in results],
            "tokens_per_step": counters.tokens_per_step,
            "drafted_per_step": counters.num_draft_tokens / counters.num_steps,
            "acceptance_rate": counters.acceptance_rate,
        }
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-speculative-tokens", type=int, default=K)
    k = parser.parse_args().num_speculative_tokens
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the counters are in this process then
    context = multiprocessing.get_context("spawn")
    measured = {}
    for proposer in PROPOSERS:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(proposer, k, sender))
        process.start()
        sender.close()
        measured[proposer] = receiver.recv()
        process.join()
    print(f"| K = {k} | tokens per step | drafted per step | acceptance rate |")
    print("|---" * 4 + "|")
    print("| none | 1 | 0 | - |")
    for proposer, row in measured.items():
        print(
            f"| `{proposer}` | {row['tokens_per_step']:.2f} | {row['drafted_per_step']:.2f} | "
            f"{row['acceptance_rate']:.0%} |"
        )
    same = len({json.dumps(row["texts"]) for row in measured.values()}) == 1
    print("\nAll said the same." if same else "\nTHE TEXTS DIFFER.")


if __name__ == "__main__":
    main()
