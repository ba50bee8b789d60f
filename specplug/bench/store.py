"""The output folder: what was measured so far, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specplug.bench.samples import Turn
from specplug.errors import OptionError

CONFIGURATION = "configuration.json"
MEASURED = "measured.jsonl"


class Store:
    """Keeps turns, and in a folder if there is one.

    Args:
        folder: made if need be; None keeps them in memory only.
        configuration: what is measured, in plain types. A folder that holds the same goes on; the
            number of rounds is no part of it, so that rounds can be added.

    Raises:
        OptionError: the folder holds another run, or cannot be written.
    """

    def __init__(self, folder: Path | None, configuration: Mapping[str, Any]) -> None:
        self.folder = folder
        self.turns: list[Turn] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._begin(folder, json.dumps(configuration, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise OptionError(
                f"{folder} cannot be used: {error}.", hint="Name a folder that can be written."
            ) from error

    def _begin(self, folder: Path, configuration: str) -> None:
        known = folder / CONFIGURATION
        if not known.exists():
            known.write_text(configuration)
        elif known.read_text() != configuration:
            raise OptionError(
                f"{folder} holds another run: {_difference(known.read_text(), configuration)}.",
                hint="Name another folder with --output, or delete this one.",
            )
        measured = folder / MEASURED
        if not measured.exists():
            return
        whole = measured.read_bytes().splitlines(keepends=True)
        if whole and not whole[-1].endswith(b"\n"):  # interrupted while it was written
            whole.pop()
            measured.write_bytes(b"".join(whole))
        self.turns = [Turn.from_json(json.loads(line)) for line in whole]

    def add(self, turn: Turn) -> None:
        """Keep a turn."""
        self.turns.append(turn)
        if self.folder:
            with (self.folder / MEASURED).open("a") as file:
                file.write(json.dumps(turn.as_json(), separators=(",", ":")) + "\n")

    def is_done(self, round_number: int, unit: str, method: str) -> bool:
        """Return whether this was measured already."""
        return any(
            turn.round == round_number
            and turn.unit == unit
            and any(sample.method == method for sample in turn.samples)
            for turn in self.turns
        )


def _difference(before: str, now: str) -> str:
    """Name the first key with another value."""
    old, new = json.loads(before), json.loads(now)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"its {name} was {_shown(old.get(name))}, not {_shown(new.get(name))}"
    return "it was written otherwise"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."
