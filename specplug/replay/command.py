"""``specplug replay``: read, measure, show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from specplug.plugins import PluginManager
from specplug.replay import report
from specplug.replay.records import read_records
from specplug.replay.run import PROVIDES, Result, parse_candidate, replay


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What the command line asks for; see ``specplug replay --help``."""

    files: Sequence[Path]
    proposers: Sequence[str]
    num_speculative_tokens: Sequence[int]
    length_policies: Sequence[str] = ("fixed",)
    token_cost: float = 0.0
    concurrency: int = 1
    tokenizer: Path | None = None
    vocab_size: int | None = None
    json_path: Path | None = None
    picture: Path | None = None


def run_replay(
    settings: ReplaySettings, console: Console, plugins: PluginManager | None = None
) -> bool:
    """Measure every proposer at every K, print and write; return whether none of them failed.

    Raises:
        SpecplugError: a file, a proposer or an option is wrong; nothing is written then.
    """
    if settings.json_path:
        report.check_writable(settings.json_path)
    if settings.picture:
        report.check_writable(settings.picture, picture=True)
    results = measure(settings, plugins or PluginManager())
    console.print(report.table(results))
    first = results[0]
    console.print(f"{first.num_records} requests, {first.num_tokens} tokens behind the first.")
    if settings.json_path:
        report.write_json(settings.json_path, results)
    if settings.picture:
        report.write_picture(settings.picture, results)
    failed = [result for result in results if result.counters.num_faults]
    for result in failed:
        console.print(_failure(result))
    return not failed


def measure(settings: ReplaySettings, plugins: PluginManager) -> list[Result]:
    """Measure every proposer at every K under every length policy.

    Raises:
        SpecplugError: a file, a proposer or an option is wrong.
    """
    candidates = [parse_candidate(text) for text in settings.proposers]
    for candidate in candidates:
        plugins.create(candidate.proposer, candidate.options, PROVIDES)
    for policy in settings.length_policies:
        plugins.create_length_policy(policy, {})
    records = read_records(settings.files, settings.tokenizer)
    results = []
    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        for candidate in candidates:
            for k, policy in product(settings.num_speculative_tokens, settings.length_policies):
                task = progress.add_task(f"{candidate}, K = {k}, {policy}", total=len(records))
                results.append(
                    replay(
                        records,
                        candidate,
                        k,
                        concurrency=settings.concurrency,
                        length_policy=policy,
                        token_cost=settings.token_cost,
                        vocab_size=settings.vocab_size,
                        plugins=plugins,
                        progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
                    )
                )
                progress.remove_task(task)
    return results


def _failure(result: Result) -> str:
    counters = result.counters
    end = ", and was switched off" if counters.switched_off else ""
    return (
        f"FAILED {counters.num_faults} times: {result.candidate}, "
        f"K = {result.num_speculative_tokens}{end}; see the log."
    )
