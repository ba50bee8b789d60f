"""What speculation costs in the real vLLM when nothing is ever drafted, and where it goes.

``python -m specplug.demo.environment python -m benchmarks.overhead`` runs a made-up model, so small
that a step takes few milliseconds, which makes any overhead look its worst. Its text is random and
never repeats, so that no n-gram of length 8 is found. The engines take turns, round by round; what
is printed is the ratio of their times in the same round to no speculation.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

K, N = 4, 8
MAX_TOKENS, PROMPT = 128, 64
BATCHES = (1, 8, 32)
VOCAB_SIZE = 32_000
OWN = {"method": "ngram", "prompt_lookup_min": N, "prompt_lookup_max": N}
OURS = {"model": "specplug.vllm.ngram"}
ENGINES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "no speculation": (None, None),
    "vLLM's n-gram": (OWN, None),
    "specplug `ngram`": (OURS, None),
    "specplug, off for the request": (OURS, {"specplug_num_speculative_tokens": 0}),
}
"""Each with its ``speculative_config`` and its requests' arguments."""
PARTS = {"follow": "requests", "look_at": "logits", "propose": "drafting"}
"""What of the V1 adapter is timed, and what it is about."""


def make_model(folder: str) -> None:
    """Write a model of two small layers to a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
            bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        )
    ).save_pretrained(folder)  # fmt: skip


def serve(folder: str, name: str, line: Connection) -> None:
    """Answer batches of the sizes that arrive with what they took; 0 ends it."""
    from vllm import LLM, SamplingParams

    speculation, arguments = ENGINES[name]
    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**27,
        speculative_config=speculation and {**speculation, "num_speculative_tokens": K},
        additional_config={
            "specplug": {"options": {"min_n": N, "max_n": N}, "log_interval_seconds": 0}
        },
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False,
        extra_args=arguments,
    )  # fmt: skip
    spent = timed() if name.startswith("specplug") else {}
    line.send("ready")
    while size := line.recv():
        prompts = [
            {"prompt_token_ids": [3 + (i * 131 + j * 17) % 30_000 for j in range(PROMPT)]}
            for i in range(size)
        ]
        spent.update(dict.fromkeys(spent, 0.0))
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        line.send((time.perf_counter() - started, dict(spent)))


def timed() -> dict[str, float]:
    """Time the parts of the adapter; return what they took, which goes on growing."""
    from specplug.backends.vllm.v1 import Drafter

    spent = dict.fromkeys(PARTS, 0.0)

    def wrapped(part: str) -> Any:
        method = getattr(Drafter, part)

        @functools.wraps(method)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = method(*arguments, **named)
            spent[part] += time.perf_counter() - started
            return result

        return wrapper

    for part in PARTS:
        setattr(Drafter, part, wrapped(part))
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    context = multiprocessing.get_context("spawn")
    lines = {}
    with TemporaryDirectory() as folder:
        make_model(folder)
        for name in ENGINES:
            lines[name], theirs = context.Pipe()
            context.Process(target=serve, args=(folder, name, theirs), daemon=True).start()
            assert lines[name].recv() == "ready"
        measured = {size: measure(lines, size, rounds) for size in BATCHES}
        for line in lines.values():
            line.send(0)
    show(measured, rounds)


Samples = dict[str, list[tuple[float, dict[str, float]]]]


def measure(lines: dict[str, Any], size: int, rounds: int) -> Samples:
    """Let the engines take turns, the first of each round another one; drop the first round."""
    samples: Samples = {name: [] for name in lines}
    names = list(lines)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            lines[name].send(size)
            sample = lines[name].recv()
            if number:
                samples[name].append(sample)
    return samples


def show(measured: dict[int, Samples], rounds: int) -> None:
    """Print the ratios, and where specplug's time goes."""
    columns = " | ".join(f"{size} at a time" for size in measured)
    print(f"\n| time as a multiple, median of {rounds} rounds (quartiles) | {columns} |")
    print("|---" * (1 + len(measured)) + "|")
    for name in ENGINES:
        cells = [ratio(samples, name) for samples in measured.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\n| microseconds per step in specplug | {columns} |")
    print("|---" * (1 + len(measured)) + "|")
    for name in ENGINES:
        for part, about in PARTS.items() if name.startswith("specplug") else ():
            cells = [
                f"{1e6 * median(spent[part] for _, spent in samples[name]) / MAX_TOKENS:.0f}"
                for samples in measured.values()
            ]
            print(f"| {name}: {about} (`{part}`) | {' | '.join(cells)} |")
    steps = [
        f"{1e6 * median(seconds for seconds, _ in samples['no speculation']) / MAX_TOKENS:.0f}"
        for samples in measured.values()
    ]
    print(f"| (a whole step without speculation) | {' | '.join(steps)} |")


def ratio(samples: Samples, name: str) -> str:
    """Return the median ratio of the times in the same round to no speculation, and quartiles."""
    pairs = zip(samples[name], samples["no speculation"], strict=True)
    ratios = sorted(one / none for (one, _), (none, _) in pairs)
    quarter = len(ratios) // 4
    return f"{median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"


if __name__ == "__main__":
    main()
