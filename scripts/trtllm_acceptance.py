"""Confirm on a GPU that TensorRT-LLM says the same with specplug as without, and how fast.

    python scripts/trtllm_acceptance.py MODEL --proposer suffix --num-speculative-tokens 6

Run it in the environment of TensorRT-LLM, with specplug installed there. Three engines are started
one after another: without speculation, with it, and without it again, as a machine may change its
pace. The last line is the result; the status is 0 if all texts are equal.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

# The worker in this process, so that its counters can be read. Before the engine is imported.
os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")

import typer

import specplug
import specplug.trtllm
from specplug.demo.prompts import PROMPTS


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one engine, and the time that they took together."""

    token_ids: list[list[int]]
    seconds: float


def answer(model: str, rounds: int, **arguments: Any) -> Run:
    """Start an engine, answer every prompt by itself, greedily, and end the engine."""
    from tensorrt_llm import LLM, SamplingParams

    llm = LLM(model, **arguments)
    token_ids: list[list[int]] = []
    started = 0.0
    try:
        for round_number in range(rounds + 1):
            if round_number == 1:  # what runs slower the first time is over
                started = time.perf_counter()
            token_ids = [
                list(
                    llm.generate(
                        [prompt.text], SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
                    )[0].outputs[0].token_ids
                )
                for prompt in PROMPTS
            ]  # fmt: skip
        return Run(token_ids, time.perf_counter() - started)
    finally:
        llm.shutdown()


def main(
    model: Annotated[str, typer.Argument(help="The checkpoint's folder or name.")],
    proposer: Annotated[str, typer.Option(help="A registered proposer.")] = "suffix",
    num_speculative_tokens: Annotated[int, typer.Option(min=1)] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is timed.")] = 2,
) -> None:
    """Compare the texts and the speed, and print one line."""
    import tensorrt_llm

    config = specplug.trtllm.speculative_config(
        proposer, num_speculative_tokens=num_speculative_tokens
    )
    before = answer(model, rounds)
    drafted = answer(model, rounds, speculative_config=config)
    counters = config.drafter.adapter.counters
    after = answer(model, rounds)

    equal = sum(
        mine == theirs for mine, theirs in zip(drafted.token_ids, before.token_ids, strict=True)
    )
    steady = sum(
        mine == theirs for mine, theirs in zip(after.token_ids, before.token_ids, strict=True)
    )
    speed_up = (before.seconds + after.seconds) / 2 / drafted.seconds
    drift = after.seconds / before.seconds
    passed = equal == len(PROMPTS)
    typer.echo(
        f"{'PASS' if passed else 'FAIL'}: TensorRT-LLM {tensorrt_llm.__version__}, "
        f"specplug {specplug.__version__}, {proposer}, K {num_speculative_tokens}: "
        f"{equal} of {len(PROMPTS)} texts equal ({steady} without speculation twice), "
        f"{speed_up:.2f}x as fast (the engine without: {drift:.2f} the second time), {counters}"
    )
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
