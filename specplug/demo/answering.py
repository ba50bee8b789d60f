"""One engine of the demo, in a process of its own: lines of JSON in, lines of JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specplug.runtime import running

_COUNTED = (
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_propose_calls", "propose_seconds"
)  # fmt: skip


def answer(start: Callable[..., Any], generate: Callable[..., dict[str, Any]]) -> None:
    """Start an engine and answer the requests on standard input until it ends.

    Args:
        start: called with the first line, which says which engine; the answer says it is ready.
        generate: called with the engine and, as keywords, each line after it.
    """
    # Engines print too: that goes to the log, which is standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = start(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(generate(engine, **json.loads(line))), file=answers)


def compared(
    own: Mapping[str, dict[str, Any]], proposers: Sequence[str], k: int
) -> dict[str, dict[str, Any] | None]:
    """Return what a demo compares, a label and arguments each: none first, then the engine's own.

    Args:
        own: the engine's own methods.
        proposers: names of proposers, which the engine's arguments name as they are.
        k: the most draft tokens per step.
    """
    ours = {
        f"specplug {name}": {"proposer": name, "num_speculative_tokens": k} for name in proposers
    }
    return {"no speculation": None, **own, **ours}


def options_apart(round_name: str) -> dict[str, str]:
    """Return the request options that keep rounds from drafting from earlier rounds' answers.

    The prompts of all rounds are the same.
    """
    models = [runtime.request_options for runtime in running()]
    knows = any("cache_namespace" in model.model_fields for model in models)
    return {"cache_namespace": round_name} if knows else {}


def counted() -> dict[str, float]:
    """Return what the runtimes of this process have counted and spent so far."""
    counters = [runtime.counters for runtime in running()]
    return {name: sum(getattr(one, name) for one in counters) for name in _COUNTED}
