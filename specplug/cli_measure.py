"""The commands that measure: ``demo``, ``replay``, ``bench`` and ``tune``."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


class Engine(StrEnum):
    """The engines that can be measured."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"
    LLAMACPP = "llamacpp"


class Goal(StrEnum):
    """What ``specplug tune`` makes best."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


EngineToRun = Annotated[Engine, typer.Option(help="The engine to run.")]
Proposers = Annotated[
    list[str], typer.Option(help="A proposer, perhaps with options: suffix:min_confidence=0.1")
]
DraftTokens = Annotated[
    str, typer.Option(help="The most draft tokens per step; several with commas between.")
]
LengthPolicies = Annotated[
    list[str],
    typer.Option(help="What decides how much of a draft is verified; several times for more."),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="A tokenizer.json: the requests are recorded as text."
    ),
]


def demo(
    engine: EngineToRun = Engine.VLLM,
    proposer: Annotated[
        list[str], typer.Option(help="A proposer to compare; may be given several times.")
    ] = ["ngram", "suffix"],  # noqa: B006 (typer makes a copy)
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A model's folder instead of the demo's SmolLM2."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="The most draft tokens per step.")
    ] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is answered.")] = 2,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all measurements to this file.")
    ] = None,
) -> None:
    """Compare proposers with the engine's own n-gram and with no speculation, for real."""
    from specplug.demo.run import DemoSettings, run_demo

    settings = DemoSettings(
        engine=engine.value,
        proposers=proposer,
        model=model,
        num_speculative_tokens=num_speculative_tokens,
        rounds=rounds,
        json_path=json_path,
    )
    _ended(run_demo(settings, _console()))


def replay(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Recorded requests, JSONL.")
    ],
    proposer: Proposers = ["ngram", "suffix"],  # noqa: B006 (typer makes a copy)
    num_speculative_tokens: DraftTokens = "8",
    length_policy: LengthPolicies = ["fixed"],  # noqa: B006
    token_cost: Annotated[
        float,
        typer.Option(
            min=0, help="What each token adds to a step, as a share of a step without any."
        ),
    ] = 0.0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="How many requests are served at a time.")
    ] = 1,
    tokenizer: TokenizerFile = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Of the model; by default what the requests need.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the measurements to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the measurements into this file (.png, .svg, ...).")
    ] = None,
) -> None:
    """Measure proposers on recorded requests: no model, no engine."""
    from specplug.replay.command import ReplaySettings, run_replay

    settings = ReplaySettings(
        files=files,
        proposers=proposer,
        num_speculative_tokens=_numbers(num_speculative_tokens, "--num-speculative-tokens"),
        length_policies=length_policy,
        token_cost=token_cost,
        concurrency=concurrency,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        json_path=json_path,
        picture=picture,
    )
    _ended(run_replay(settings, _console()))


def bench(
    model: Annotated[
        str | None,
        typer.Option(help="A model's folder, or a name that the engine knows; else SmolLM2-135M."),
    ] = None,
    engine: EngineToRun = Engine.VLLM,
    proposer: Proposers = ["ngram", "suffix"],  # noqa: B006 (typer makes a copy)
    num_speculative_tokens: DraftTokens = "8",
    batch_sizes: Annotated[
        str, typer.Option(help="How many requests are served at a time; several with commas.")
    ] = "1",
    data: Annotated[
        list[str],
        typer.Option(
            help="bundled, humaneval, mt-bench, gsm8k, a JSONL file, or a folder of recorded "
            "requests; may be given several times."
        ),
    ] = ["bundled"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is answered.")] = 3,
    limit: Annotated[
        int, typer.Option(min=1, help="The most prompts of each workload, spread over it.")
    ] = 16,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="The most tokens of an answer, where the data do not say.")
    ] = 128,
    engine_method: Annotated[
        list[str],
        typer.Option(
            help="One of the engine's own methods, as LABEL={...} with its own arguments, in "
            "place of the usual ones; 'none' leaves those out."
        ),
    ] = [],  # noqa: B006
    engine_args: Annotated[
        str, typer.Option(help="JSON, passed on to the engine.", metavar="JSON")
    ] = "{}",
    tokenizer: Annotated[str | None, typer.Option(help="In place of the model's own.")] = None,
    engines_at_once: Annotated[
        int | None,
        typer.Option(min=1, help="How many engines live at a time; by default as many as fit."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(help="The folder of the report; a run that was interrupted goes on there."),
    ] = Path("specplug-bench"),
) -> None:
    """Measure speculation in the real engine, next to none, and say whether to keep it."""
    from specplug.bench.command import BenchSettings, run_bench

    settings = BenchSettings(
        engine=engine.value,
        model=model,
        proposers=proposer,
        num_speculative_tokens=_numbers(num_speculative_tokens, "--num-speculative-tokens"),
        batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
        data=data,
        rounds=rounds,
        limit=limit,
        max_tokens=max_tokens,
        engine_methods=engine_method,
        engine_arguments=_object(engine_args, "--engine-args"),
        tokenizer=tokenizer,
        at_once=engines_at_once,
        output=output,
    )
    _ended(run_bench(settings, _console()))


def tune(
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Recorded requests, JSONL. Without any, the engine answers a few prompts.",
        ),
    ] = [],  # noqa: B006
    engine: Annotated[Engine, typer.Option(help="Whose flags are printed.")] = Engine.VLLM,
    goal: Annotated[
        Goal,
        typer.Option(help="latency: one request at a time; throughput: as many as --concurrency."),
    ] = Goal.LATENCY,
    proposer: Proposers = ["ngram", "prompt_lookup", "suffix"],  # noqa: B006
    num_speculative_tokens: DraftTokens = "4,8,16",
    length_policy: LengthPolicies = ["adaptive", "fixed"],  # noqa: B006
    token_cost: Annotated[
        float,
        typer.Option(
            min=0,
            help="What each token adds to a step, as a share of a step without any: on a GPU with "
            "room about 0.005, on a CPU more than 0.03.",
        ),
    ] = 0.005,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="How many requests are served at a time, in place of the goal's."),
    ] = None,
    tokenizer: TokenizerFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="Without files: as for bench."),
    ] = None,
    data: Annotated[
        list[str], typer.Option(help="Without files: what to ask, as for bench; several times.")
    ] = ["bundled"],  # noqa: B006
    engine_args: Annotated[
        str, typer.Option(help="Without files: JSON, passed on to the engine.", metavar="JSON")
    ] = "{}",
    output: Annotated[
        Path,
        typer.Option(
            help="Without files: the folder of what was measured; a run that was interrupted goes "
            "on there."
        ),
    ] = Path("specplug-tune"),
) -> None:
    """Find the best proposer, K and length policy, and print the engine's flags.

    The status is 1 where it is better to leave speculation off.
    """
    from specplug.bench.tune import TuneSettings, run_tune

    settings = TuneSettings(
        files=files,
        engine=engine.value,
        goal=goal,
        proposers=proposer,
        num_speculative_tokens=_numbers(num_speculative_tokens, "--num-speculative-tokens"),
        length_policies=length_policy,
        token_cost=token_cost,
        concurrency=concurrency,
        tokenizer=tokenizer,
        model=model,
        data=data,
        engine_arguments=_object(engine_args, "--engine-args"),
        output=output,
    )
    _ended(run_tune(settings, _console()))


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _ended(well: bool) -> None:
    if not well:
        raise typer.Exit(1)


def _numbers(text: str, option: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise typer.BadParameter(
            f"'{text}' is no list of numbers above 0, such as 4,8,16.",
            param_hint=option,
        )
    return numbers


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(
            f'\'{text}\' is no JSON object, such as {{"dtype": "float32"}}.', param_hint=option
        )
    return found


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "replay": replay,
    "bench": bench,
    "tune": tune,
}
