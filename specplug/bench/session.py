"""One engine in a process of its own, the measuring side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specplug.errors import SpecplugError

_LOG_TAIL_LINES = 25


class SessionError(SpecplugError, RuntimeError):
    """An engine ended early."""

    code = "engine-failed"


class Session:
    """An engine's process, which takes along what it started when it is closed.

    Args:
        method: what it is called in messages.
        module: has the function ``serve``, which the process runs.
        configuration: the first line that it gets.
        log: where what it prints goes.
        environment: variables set in it.
    """

    def __init__(
        self,
        method: str,
        module: str,
        configuration: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
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
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.send(configuration)

    def send(self, message: Mapping[str, Any]) -> None:
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

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and wait for its answer."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """End the engine's process and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
