"""Lets every method do every unit of work, next to no speculation, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specplug.bench.engines import Engines, Running, room_for
from specplug.bench.methods import Method
from specplug.bench.samples import Sample, Turn
from specplug.bench.store import Store
from specplug.bench.work import Unit


@dataclass(slots=True)
class Measurement:
    """What is to be measured; what the store holds already is left out.

    Attributes:
        methods: no speculation first.
        units: the work.
        rounds: how often.
        engines: starts them.
        store: takes what was measured.
        console: shows how far it is.
    """

    methods: Sequence[Method]
    units: Sequence[Unit]
    rounds: int
    engines: Engines
    store: Store
    console: Console
    _progress: Progress | None = field(default=None, init=False)

    def run(self, at_once: int | None = None) -> None:
        """Measure.

        Args:
            at_once: how many engines live at the same time; None for as many as fit. A single
                one is restarted for every method and round.
        """
        plain, *others = self.methods
        others = [method for method in others if any(self._missing(method, self._places()))]
        if not others:
            return
        with self._shown():
            if at_once != 1:
                with self.engines.running([plain]) as [baseline]:
                    at_once = at_once or self._fitting(baseline, len(others))
                    if at_once > 1:
                        self._side_by_side(baseline, others, at_once - 1)
                        return
            self._in_turn(plain, others)

    def _places(self) -> Iterator[tuple[int, Unit]]:
        for round_number in range(self.rounds):
            for unit in self.units:
                yield round_number, unit

    def _missing(
        self, method: Method, places: Iterator[tuple[int, Unit]]
    ) -> Iterator[tuple[int, Unit]]:
        for round_number, unit in places:
            if not self.store.is_done(round_number, unit.key, method.label):
                yield round_number, unit

    def _fitting(self, baseline: Running, others: int) -> int:
        room = room_for(baseline.memory)
        if room is None:
            self.console.print("How much memory is free is unknown: two engines at a time.")
            return 2
        host, device = ((baseline.memory.get(where) or 0) / 1e9 for where in ("host", "device"))
        taken = f"{host:.1f} GB" + (f", and {device:.1f} GB on the device" if device else "")
        at_once = 1 + min(room, others)
        self.console.print(f"An engine takes {taken}: {at_once} at a time.")
        return at_once

    def _side_by_side(self, baseline: Running, others: Sequence[Method], most: int) -> None:
        """Let no speculation and a group of others take turns, then the next group."""
        for first in range(0, len(others), most):
            with self.engines.running(others[first : first + most]) as running:
                for place, (round_number, unit) in enumerate(self._places()):
                    due = [
                        engine
                        for engine in running
                        if not self.store.is_done(round_number, unit.key, engine.method)
                    ]
                    if due:
                        self._take_turns([baseline, *due], round_number, unit, place)

    def _take_turns(
        self, running: list[Running], round_number: int, unit: Unit, place: int
    ) -> None:
        """Let each engine do the unit, every time another one first."""
        turn = place % len(running)
        done = {
            engine.method: engine.answer(unit, round_number)
            for engine in running[turn:] + running[:turn]
        }
        self._keep(round_number, unit, [done[engine.method] for engine in running])

    def _in_turn(self, plain: Method, others: Sequence[Method]) -> None:
        """Let one engine live at a time: in each round no speculation, then each other method."""
        for round_number in range(self.rounds):
            places = [(round_number, unit) for unit in self.units]
            due = {
                method.label: [unit for _, unit in self._missing(method, iter(places))]
                for method in others
            }
            wanted = {unit.key: unit for missing in due.values() for unit in missing}
            baseline = self._pass(plain, list(wanted.values()), round_number)
            turn = round_number % len(others)
            for method in [*others[turn:], *others[:turn]]:
                units = due[method.label]
                for key, sample in self._pass(method, units, round_number).items():
                    self._keep(round_number, wanted[key], [baseline[key], sample])

    def _pass(self, method: Method, units: list[Unit], round_number: int) -> dict[str, Sample]:
        if not units:
            return {}
        with self.engines.running([method]) as [engine]:
            return {unit.key: engine.answer(unit, round_number) for unit in units}

    def _keep(self, round_number: int, unit: Unit, samples: list[Sample]) -> None:
        turn = Turn(round_number, unit.key, samples)
        self.store.add(turn)
        self.console.print(_line(turn, unit))
        if self._progress:
            self._progress.advance(self._progress.task_ids[0], len(samples) - 1)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Show a bar on a terminal; the lines printed above it are there everywhere."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        terminal = self.console.is_terminal
        total = self.rounds * len(self.units) * (len(self.methods) - 1)
        done = sum(len(turn.samples) - 1 for turn in self.store.turns)
        with Progress(
            *columns, TimeElapsedColumn(), console=self.console, transient=True,
            disable=not terminal,
        ) as self._progress:  # fmt: skip
            self._progress.add_task("measuring", total=total, completed=done)
            yield


def _line(turn: Turn, unit: Unit) -> str:
    plain = turn.samples[0].tokens_per_second
    ratios = ", ".join(
        f"{sample.method} {sample.tokens_per_second / plain:.2f}x" for sample in turn.samples[1:]
    )
    return (
        f"  round {turn.round + 1}, {unit.workload} {unit.number + 1}, {unit.batch_size} at a "
        f"time: {plain:.0f} tokens/s without, {ratios}"
    )
