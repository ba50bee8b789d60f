"""Plays schedules in a fresh process that hashes in another way, as an engine's workers do."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

_CODE = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from specplug.testing.process import main
main()
"""


def play_elsewhere(play: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return ``play(*arguments)`` from another process; what it returns must be valid JSON.

    Raises:
        RuntimeError: the process failed; the message is the end of what it wrote.
    """
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=pickle.dumps(sys.path) + pickle.dumps((play, arguments)),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace").strip()[-2000:])
    return json.loads(done.stdout)


def main() -> None:
    """Play what stands on the standard input; nothing else is written to the standard output."""
    play, arguments = pickle.load(sys.stdin.buffer)
    with redirect_stdout(io.StringIO()):
        result = play(*arguments)
    print(json.dumps(result))
