"""Runs the demo: one engine per method, every prompt on each of them in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specplug.demo import report
from specplug.demo.environment import engine_environment
from specplug.demo.model import cache_folder, prepare_model
from specplug.demo.prompts import PROMPTS, Prompt
from specplug.demo.report import Generation
from specplug.errors import DependencyError, SpecplugError
from specplug.plugins import PluginManager

STARTED_AT_ONCE = 2
"""Engines that start at the same time; a start keeps more than one core busy."""
_IMPORTED_AS = {"llamacpp": "llama_cpp"}
_WARM_UP_TOKENS = 32
_LOG_TAIL_LINES = 25


class SessionError(SpecplugError, RuntimeError):
    """An engine of the demo ended early."""

    code = "engine-failed"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asks for; ``model`` None is the demo's own."""

    engine: str
    proposers: Sequence[str]
    model: Path | None
    num_speculative_tokens: int
    rounds: int
    json_path: Path | None


class Session:
    """One engine in a process of its own, which it takes along when it is closed."""

    def __init__(self, method: str, module: str, configuration: dict[str, Any], log: Path) -> None:
        self.method = method
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                # -P: a folder named like an engine in the current directory must not be imported.
                [sys.executable, "-P", "-c", f"from {module} import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env={**os.environ, **engine_environment()},
                start_new_session=True,
            )
        self.send(configuration)

    def send(self, message: dict[str, Any]) -> None:
        """Write a line to the engine; whether it still lives shows in the answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the engine's answer.

        Raises:
            SessionError: with the end of the log, when the engine is gone.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise SessionError(
                f"The engine of '{self.method}' ended with status {self._process.wait()}. The "
                "end of its log:\n" + "\n".join(f"  {entry}" for entry in tail),
                hint=f"\nThe whole log is in {self._log}.",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompt: Prompt, round_number: int) -> Generation:
        """Answer one prompt."""
        round_name = f"round {round_number}"
        self.send({"text": prompt.text, "max_tokens": prompt.max_tokens, "round_name": round_name})
        return Generation(self.method, prompt.name, round_number, **self.receive())

    def warm_up(self, prompt: Prompt) -> None:
        """Run what runs slower the first time."""
        self.send({"text": prompt.text, "max_tokens": _WARM_UP_TOKENS, "round_name": "warm-up"})
        self.receive()

    def close(self) -> None:
        """End the engine's process and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Measure, print the tables, and return whether every text was the engine's own."""
    plugins = PluginManager()
    for name in settings.proposers:
        plugins.get(name)
    if find_spec(_IMPORTED_AS.get(settings.engine, settings.engine)) is None:
        raise DependencyError(
            f"{settings.engine} is not installed.", hint="The demo runs the real engine."
        )
    model = settings.model or prepare_model(console.print)
    generations = _measure(settings, model, console)
    summaries = report.summarise(generations, PROMPTS)
    console.print(report.overall_table(summaries))
    console.print(report.workload_table(summaries))
    console.print(
        f"Batch 1, temperature 0, at most {settings.num_speculative_tokens} draft tokens. Every "
        "ratio is the geometric mean over the prompts of the median over "
        f"{settings.rounds} rounds; each round ran all methods in turn."
    )
    console.print(report.verdict(summaries), style="bold")
    if busy := report.caution(generations):
        console.print(busy, style="yellow")
    if wrong := report.differences(summaries):
        console.print(wrong, style="bold red")
    if settings.json_path:
        measured = {
            "engine": settings.engine,
            "model": str(model),
            "num_speculative_tokens": settings.num_speculative_tokens,
            "rounds": settings.rounds,
            **report.as_json(summaries, generations),
        }
        settings.json_path.write_text(json.dumps(measured, indent=1) + "\n")
    return not wrong


def _module(engine: str) -> str:
    return f"specplug.backends.{engine}.demo"


def _measure(settings: DemoSettings, model: Path, console: Console) -> list[Generation]:
    module = _module(settings.engine)
    methods = import_module(module).methods(settings.proposers, settings.num_speculative_tokens)
    work = len(methods) * (1 + settings.rounds * len(PROMPTS))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    generations = []
    with (
        ExitStack() as sessions,
        # On a terminal a bar; the lines printed above it are there everywhere.
        Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        ) as progress,
    ):  # fmt: skip
        task = progress.add_task("starting engines", total=work)
        running = []
        for session in _start(methods, module, model, sessions, console):
            running.append(session)
            progress.advance(task)
        for round_number in range(settings.rounds):
            for i, prompt in enumerate(PROMPTS):
                progress.update(task, description=f"{prompt.workload}: {prompt.name}")
                turn = (round_number * len(PROMPTS) + i) % len(running)
                done = {}
                for session in running[turn:] + running[:turn]:
                    done[session.method] = session.generate(prompt, round_number)
                    progress.advance(task)
                generations += [done[session.method] for session in running]
                console.print(_line(round_number, prompt, generations[-len(running) :]))
    return generations


def _start(
    methods: dict[str, Any], module: str, model: Path, sessions: ExitStack, console: Console
) -> Iterator[Session]:
    """Start the engines a few at a time; yield each once it is ready and warm."""
    console.print(f"Starting {len(methods)} engines, {STARTED_AT_ONCE} at a time.")
    labels = list(methods)
    for first in range(0, len(labels), STARTED_AT_ONCE):
        began = time.monotonic()
        wave = []
        for method in labels[first : first + STARTED_AT_ONCE]:
            configuration = {"model": str(model), "speculation": methods[method]}
            log = cache_folder() / "demo-logs" / f"{method.replace(' ', '-')}.log"
            session = Session(method, module, configuration, log)
            sessions.callback(session.close)
            wave.append(session)
        for session in wave:
            session.receive()
            session.warm_up(PROMPTS[0])
            console.print(f"  {session.method}: ready after {time.monotonic() - began:.0f} s")
            yield session


def _line(round_number: int, prompt: Prompt, done: list[Generation]) -> str:
    plain, *others = done
    ratios = ", ".join(
        f"{one.method} {one.tokens_per_second / plain.tokens_per_second:.2f}x" for one in others
    )
    return (
        f"  round {round_number + 1}, {prompt.workload} ({prompt.name}): "
        f"{plain.tokens_per_second:.0f} tokens/s without, {ratios}"
    )
