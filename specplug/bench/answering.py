"""One engine in a process of its own, the engine's side: lines of JSON in, lines of JSON out.

The first line is a :class:`Setup`. Each line after it is a batch,
``{"batch": [0, 3], "namespaces": ["...", "..."]}``, and is answered with what was said and when,
what was counted meanwhile, and the memory that the process takes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specplug.bench.work import Content, text_of
from specplug.runtime import running

_COUNTED = (
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_propose_calls", "propose_seconds"
)  # fmt: skip


class Arrivals:
    """The tokens of one request, and when they came: one entry for each step that brought some."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.arrivals: list[tuple[float, int]] = []

    def add(self, seconds: float, token_ids: Sequence[int]) -> None:
        """Note what a step brought, so many seconds after the batch was sent."""
        if token_ids:
            self.token_ids += token_ids
            self.arrivals.append((seconds, len(token_ids)))


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is started, and what it will be asked; in plain types.

    Attributes:
        model: a folder, or a name that the engine knows.
        speculation: what the backend's ``own`` or ``ours`` returned; None is no speculation.
        engine_arguments: passed on to the engine.
        contents: the prompts; see :data:`specplug.bench.work.Content`.
        max_tokens: the most tokens of each answer.
        batch_size: the most prompts at once.
        tokenizer: in place of the model's own.
    """

    model: str
    speculation: Mapping[str, Any] | None
    engine_arguments: Mapping[str, Any]
    contents: Sequence[Content]
    max_tokens: Sequence[int]
    batch_size: int = 1
    tokenizer: str | None = None


class Engine(Protocol):
    """What a backend's ``bench`` module has to have."""

    def __init__(self, setup: Setup) -> None:
        """Start the engine."""

    def generate(self, batch: Sequence[int], namespaces: Sequence[str]) -> list[Arrivals]:
        """Answer prompts at once, given by their places in the list that came at the start."""

    def counts(self) -> dict[str, float]:
        """Return what was counted so far; see :func:`counted`."""


def answer(engine_class: type[Engine]) -> None:
    """Start an engine and answer the batches on standard input until it ends."""
    # Engines print too: that goes to the log, which is standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = engine_class(Setup(**json.loads(sys.stdin.readline())))
    print(json.dumps({"memory": memory()}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answered(engine, **json.loads(line))), file=answers)


def _answered(engine: Engine, batch: list[int], namespaces: list[str]) -> dict[str, Any]:
    before, started = engine.counts(), time.perf_counter()
    outputs = engine.generate(batch, namespaces)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "outputs": [{"token_ids": o.token_ids, "arrivals": o.arrivals} for o in outputs],
        "counts": {name: value - before[name] for name, value in engine.counts().items()},
        "memory": memory(),
    }


def counted() -> dict[str, float]:
    """Return what the runtimes of this process have counted and spent so far."""
    counters = [runtime.counters for runtime in running()]
    return {name: sum(getattr(one, name) for one in counters) for name in _COUNTED}


def options_apart(namespace: str) -> dict[str, str]:
    """Return the request options that keep a request from drafting from other namespaces."""
    models = [runtime.request_options for runtime in running()]
    knows = any("cache_namespace" in model.model_fields for model in models)
    return {"cache_namespace": namespace} if knows else {}


def tokenised(tokenizer: Any, content: Content) -> list[int]:
    """Return the token ids of a prompt; a conversation ends where the answer begins.

    A model without a chat template gets the messages' texts.
    """
    token_ids = [token for token in content if isinstance(token, int)]
    if token_ids:
        return token_ids
    if isinstance(content, str) or not tokenizer.chat_template:
        return list(tokenizer(text_of(content))["input_ids"])
    text = tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def memory() -> dict[str, int | None]:
    """Return the bytes that this process takes at its most, and those free on the machine.

    Of the device they are those of torch, which need not be loaded; None is unknown.
    """
    torch: Any = sys.modules.get("torch")
    on_device = torch is not None and torch.cuda.is_available()
    return {
        "host": _peak(),
        "host_free": _kilobytes(Path("/proc/meminfo"), "MemAvailable"),
        "device": torch.cuda.max_memory_reserved() if on_device else None,
        "device_free": torch.cuda.mem_get_info()[0] if on_device else None,
    }


def _peak() -> int:
    # Not `ru_maxrss`: on Linux that begins with what the parent had when it forked.
    found = _kilobytes(Path("/proc/self/status"), "VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kilobytes(file: Path, name: str) -> int | None:
    if not file.exists():
        return None
    lines = (line.split() for line in file.read_text().splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == f"{name}:"), None)
