"""Starts engines a few at a time, and only as many as the machine's memory holds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specplug.bench.answering import Setup
from specplug.bench.methods import Method
from specplug.bench.samples import Sample
from specplug.bench.session import Session
from specplug.bench.work import Prompt, Unit
from specplug.demo.environment import engine_environment

STARTED_AT_ONCE = 2
"""Engines that start at the same time; a start keeps more than one core busy."""
_WARM_UP_TOKENS = 32
_KEPT_FREE = 0.1
"""The share of the free memory that is left to others."""


@dataclass(frozen=True, slots=True)
class Engines:
    """How every engine of a run is started.

    Attributes:
        module: what its process runs.
        model: a folder, or a name that the engine knows.
        prompts: all that will be asked.
        batch_size: the largest.
        engine_arguments: passed on to the engine.
        tokenizer: in place of the model's own.
        logs: the folder for what the engines print.
        console: is told what starts.
    """

    module: str
    model: str
    prompts: Sequence[Prompt]
    batch_size: int
    engine_arguments: Mapping[str, Any]
    tokenizer: str | None
    logs: Path
    console: Console

    @contextmanager
    def running(self, methods: Sequence[Method]) -> Iterator[list[Running]]:
        """Start an engine for each method, a few at a time; yield them ready and warm."""
        with ExitStack() as stack:
            engines = []
            for first in range(0, len(methods), STARTED_AT_ONCE):
                began = time.monotonic()
                wave = [self._start(one) for one in methods[first : first + STARTED_AT_ONCE]]
                for engine in wave:
                    stack.callback(engine.session.close)
                for engine in wave:
                    engine.warm_up(len(self.prompts))
                    seconds = time.monotonic() - began
                    self.console.print(f"  {engine.method}: ready after {seconds:.0f} s")
                engines += wave
            yield engines

    def _start(self, method: Method) -> Running:
        prompts = [*self.prompts, replace(self.prompts[0], max_tokens=_WARM_UP_TOKENS)]
        setup = Setup(
            model=self.model,
            speculation=method.speculation,
            engine_arguments=self.engine_arguments,
            contents=[prompt.content for prompt in prompts],
            max_tokens=[prompt.max_tokens for prompt in prompts],
            batch_size=self.batch_size,
            tokenizer=self.tokenizer,
        )
        environment = engine_environment()
        if not Path(self.model).exists():
            del environment["HF_HUB_OFFLINE"]  # a model that is known by its name only
        log = self.logs / f"{re.sub(r'[^A-Za-z0-9.=]+', '-', method.label)}.log"
        return Running(
            method.label, Session(method.label, self.module, asdict(setup), log, environment)
        )


class Running:
    """An engine that answers units of work."""

    def __init__(self, method: str, session: Session) -> None:
        self.method, self.session = method, session

    def warm_up(self, prompt: int) -> None:
        """Wait until it is ready, and run what runs slower the first time."""
        self.session.receive()
        answer = self.session.ask({"batch": [prompt], "namespaces": ["warm-up"]})
        self.memory: dict[str, int | None] = answer["memory"]

    def answer(self, unit: Unit, round_number: int) -> Sample:
        """Answer a unit's requests at once."""
        request = {"batch": list(unit.prompts), "namespaces": unit.namespaces(round_number)}
        return Sample.from_json({"method": self.method, **self.session.ask(request)})


def room_for(memory: Mapping[str, int | None]) -> int | None:
    """Return how many more engines fit beside one with this memory; None if that is unknown."""
    found = [
        int(free * (1 - _KEPT_FREE) // taken)
        for taken, free in (
            (memory.get("host"), memory.get("host_free")),
            (memory.get("device"), memory.get("device_free")),
        )
        if taken and free is not None
    ]
    return min(found, default=None)
