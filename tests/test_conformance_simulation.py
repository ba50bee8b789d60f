"""The kit calls a proposer as the runtime does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_proposers import LastToken

from specplug.runtime import Arrival
from specplug.runtime import Step as EngineStep
from specplug.testing import ENGINE
from specplug.testing.schedules import Begin, End, Rewind, Step, prompts, schedules
from specplug.testing.simulation import Simulation


class Noting(LastToken):
    """Notes its calls."""

    def __init__(self):
        self.calls = []

    def begin(self, request):
        self.calls.append((
            "begin", request.id, request.slot, list(request.prompt_token_ids),
            request.max_num_tokens, request.num_speculative_tokens,
        ))  # fmt: skip

    def propose(self, batch):
        columns = (
            batch.slots, batch.num_tokens, batch.num_new_tokens, batch.num_prompt_tokens,
            batch.max_draft_tokens,
        )  # fmt: skip
        texts = [batch.tokens(i).tolist() for i in range(len(batch))]
        self.calls.append(
            ("propose", list(batch.request_ids), texts, *(column.tolist() for column in columns))
        )
        return super().propose(batch)

    def observe(self, acceptance):
        self.calls.append((
            "observe", list(acceptance.request_ids), acceptance.slots.tolist(),
            list(map(list, acceptance.draft_token_ids)), acceptance.num_accepted.tolist(),
            list(acceptance.new_token_ids),
        ))  # fmt: skip

    def end(self, request_id):
        self.calls.append(("end", request_id))


def told_to_runtime(runtime, event, simulation, drafts):
    """Tell the runtime what a simulation, which has played the event, made of it."""
    if isinstance(event, Begin):
        runtime.begin(
            Arrival(
                event.id,
                list(event.prompt),
                len(event.prompt) + event.max_new_tokens,
                arguments={"specplug_num_speculative_tokens": event.num_speculative_tokens},
            )
        )
    elif isinstance(event, End):
        runtime.end(event.id)
        drafts.pop(event.id, None)
    else:
        moves = {move.id: move for move in event.moves}
        # The kit does not move requests that are complete, nor more than a batch holds.
        names = [name for name in moves if name in simulation.moved]
        texts = [simulation.text(name) for name in names]
        matrix = np.zeros((len(names), ENGINE.max_model_len), np.int32)
        for row, text in zip(matrix, texts, strict=True):
            row[: len(text)] = text
        verified = {name: drafts.pop(name, [])[: moves[name].verified] for name in names}
        given = runtime.step(
            EngineStep(names, matrix, np.arange(len(names), dtype=np.int32),
                       list(map(len, texts)), [True] * len(names), verified)
        )  # fmt: skip
        drafts.update(zip(names, given.to_lists(), strict=True))


class Watched(Simulation):
    """A simulation that says which requests got tokens in the latest step."""

    moved = ()

    def play_one(self, event):
        before = {name: len(state.text) for name, state in self._states.items()}
        self.play([event])
        self.moved = {
            name for name, size in before.items() if len(self.text(name)) > size
        } if isinstance(event, Step) else ()  # fmt: skip

    def text(self, name):
        return self._states[name].text if name in self._states else []


@settings(max_examples=100)
@given(schedules(ENGINE, prompts(ENGINE), st.just({}), max_events=16))
def test_the_calls_are_those_of_the_runtime(make_runtime, schedule):
    noting, again = Noting(), Noting()
    simulation = Watched(lambda: noting, ENGINE)
    runtime = make_runtime(again, engine=ENGINE, settings={"length_policy": "fixed"})
    drafts = {}
    for event in schedule:
        if isinstance(event, Rewind):  # in an engine, a part of a step
            continue
        if isinstance(event, Step):
            event = Step(tuple(replace(move, asked=True) for move in event.moves))  # noqa: PLW2901
        simulation.play_one(event)
        told_to_runtime(runtime, event, simulation, drafts)
        assert again.calls == noting.calls
    runtime.close()
