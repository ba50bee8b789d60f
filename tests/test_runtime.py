"""The runtime: it follows requests, cuts drafts, counts, and survives any proposer."""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specplug import (
    Capability,
    Drafts,
    EngineInfo,
    PluginManager,
    Proposer,
    ProposerSpec,
    RequestOptions,
    Runtime,
    Usage,
    hookimpl,
    running,
)
from specplug.config import Settings
from specplug.errors import CapabilityError, DependencyError, OptionError, UnknownProposerError
from specplug.lengths.fixed import SPEC as FIXED
from specplug.runtime import Arrival, Step

K = 4
ENDLESS = 10_000


class Recorder(Proposer):
    """Notes every call, and drafts ``draft`` for each request of the batch."""

    def __init__(self, draft=(7, 8, 9, 10, 11, 12)):
        self.draft = list(draft)
        self.calls = []
        self.requests = []
        self.batches = []
        self.acceptances = []

    def begin(self, request):
        self.calls.append(("begin", request.id))
        self.requests.append(request)

    def propose(self, batch):
        self.calls.append(("propose", tuple(batch.request_ids)))
        self.batches.append(batch)
        return [self.draft] * len(batch)

    def observe(self, acceptance):
        self.calls.append(("observe", tuple(acceptance.request_ids)))
        self.acceptances.append(acceptance)

    def end(self, request_id):
        self.calls.append(("end", request_id))

    def close(self):
        self.calls.append(("close",))

    def named(self, name):
        return [call[1] for call in self.calls if call[0] == name]


class Toy:
    """The engine's side: a matrix of tokens, and steps reported to a runtime."""

    def __init__(self, runtime, num_rows=8, width=64):
        self.runtime = runtime
        self.matrix = np.zeros((num_rows, width), np.int32)
        self.texts = {}

    def arrive(self, *ids, prompt=(1, 2, 3), limit=ENDLESS, **more):
        for request_id in ids:
            self.texts[request_id] = list(prompt)
            self.runtime.begin(Arrival(request_id, list(prompt), limit, **more))

    def drafts(self, new, verified=None, *, most=None, rows=None, targets=None, logits=None):
        """Append ``new[id]`` to each request of the batch; nothing new is a prefill row."""
        rows = list(range(len(new))) if rows is None else rows
        for (request_id, tokens), row in zip(new.items(), rows, strict=True):
            text = self.texts.setdefault(request_id, [])
            text += tokens
            self.matrix[row] = 0
            self.matrix[row, : len(text)] = text
        return self.runtime.step(
            Step(
                request_ids=list(new),
                token_ids=self.matrix,
                rows=np.array(rows, np.int32),
                num_tokens=[len(self.texts[request_id]) for request_id in new],
                sampled=[bool(tokens) for tokens in new.values()],
                verified=verified or {},
                target_token_ids=targets,
                logits=logits,
                num_speculative_tokens=most,
            )
        )

    def step(self, new, verified=None, **more):
        drafts = self.drafts(new, verified, **more)
        assert drafts.token_ids.dtype == drafts.lengths.dtype == np.int32
        assert len(drafts.token_ids) == len(drafts.lengths) == len(new)
        return dict(zip(new, drafts.to_lists(), strict=True))


@pytest.fixture
def serve(make_runtime, make_engine):
    """Start a toy engine with a proposer (a recorder by default) and hooks."""

    def start(proposer=None, *plugins, engine=None, **settings):
        proposer = Recorder() if proposer is None else proposer
        runtime = make_runtime(
            proposer,
            *plugins,
            engine=make_engine(num_speculative_tokens=K, **engine or {}),
            settings=settings,
        )
        return Toy(runtime)

    yield start
    for runtime in running():
        runtime.close()


def faults(toy):
    return toy.runtime.counters.num_faults


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# -- the life of a request ------------------------------------------------------------------


def test_begin_and_end_are_called_exactly_once(serve):
    toy = serve()
    recorder = toy.runtime.proposer
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [6]})
    toy.step({"b": [6], "a": [5]})
    toy.runtime.end("a")
    toy.runtime.end("a")
    toy.step({"b": [6]})
    toy.runtime.end("b")
    assert recorder.named("begin") == ["a", "b"]
    assert recorder.named("end") == ["a", "b"]
    assert toy.runtime.num_requests == 0
    assert faults(toy) == 0


def test_the_request_as_the_proposer_meets_it(serve):
    toy = serve(engine={"max_model_len": 50})
    toy.arrive("a", prompt=[4, 5], limit=20)
    toy.arrive("b", limit=ENDLESS)
    a, b = toy.runtime.proposer.requests
    assert (a.id, list(a.prompt_token_ids), a.max_num_tokens) == ("a", [4, 5], 20)
    assert a.num_speculative_tokens == K
    assert b.max_num_tokens == 50


def test_unknown_ids_are_ignored(serve):
    toy = serve()
    toy.runtime.end("nobody")
    toy.arrive("a")
    assert toy.step({"ghost": [1, 2], "a": [5]}) == {"ghost": [], "a": [7, 8, 9, 10]}
    assert toy.runtime.proposer.named("propose") == [("a",)]
    assert faults(toy) == 0


def test_a_reused_id_is_ended_first(serve):
    toy = serve()
    toy.arrive("a", prompt=[1])
    toy.step({"a": [5]})
    toy.arrive("a", prompt=[2])
    assert toy.runtime.proposer.calls[-2:] == [("end", "a"), ("begin", "a")]
    assert toy.runtime.num_requests == 1
    toy.step({"a": [5]})
    assert toy.runtime.proposer.batches[-1].tokens(0).tolist() == [2, 5]
    assert toy.runtime.proposer.batches[-1].num_new_tokens.tolist() == [2]


def test_slots_are_unique_while_alive_and_reused_afterwards(serve):
    toy = serve()
    alive, largest = {}, 0
    for i in range(200):
        if i % 3 == 2 or len(alive) > 10:
            gone = sorted(alive)[i % len(alive)]
            toy.runtime.end(gone)
            del alive[gone]
        else:
            toy.arrive(f"r{i}")
            alive[f"r{i}"] = toy.runtime.proposer.requests[-1].slot
        assert len(set(alive.values())) == len(alive)
        largest = max(largest, len(alive))
        assert all(0 <= slot < largest for slot in alive.values())


def test_the_slots_of_a_step_are_those_of_begin(serve):
    toy = serve()
    toy.arrive("a", "b", "c")
    toy.runtime.end("b")
    toy.arrive("d")
    toy.step({"d": [1], "c": [2], "a": [3]})
    slots = {request.id: request.slot for request in toy.runtime.proposer.requests}
    batch = toy.runtime.proposer.batches[-1]
    assert batch.slots.tolist() == [slots[i] for i in batch.request_ids]
    observed = toy.runtime.proposer.acceptances[-1]
    assert observed.slots.tolist() == [slots[i] for i in observed.request_ids]


def test_rows_may_move_between_steps(serve):
    toy = serve()
    toy.arrive("a", prompt=[1, 1])
    toy.arrive("b", prompt=[2])
    toy.step({"a": [5], "b": [6]}, rows=[0, 1])
    toy.step({"b": [60], "a": [50]}, rows=[7, 3])
    batch = toy.runtime.proposer.batches[-1]
    assert batch.rows.tolist() == [7, 3]
    assert batch.tokens(0).tolist() == [2, 6, 60]
    assert batch.tokens(1).tolist() == [1, 1, 5, 50]
    assert batch.num_prompt_tokens.tolist() == [1, 2]


def test_a_preempted_request_resumes_in_another_row_without_a_new_begin(serve):
    toy = serve()
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [6]})
    toy.step({"b": [6]})  # a is preempted
    toy.step({"b": [6], "a": []})  # a is computed again
    toy.step({"b": [6], "a": [55]}, rows=[4, 2])
    recorder = toy.runtime.proposer
    assert recorder.named("begin") == ["a", "b"]
    assert recorder.named("end") == []
    batch = recorder.batches[-1]
    assert batch.tokens(1).tolist() == [1, 2, 3, 5, 55]
    assert batch.num_new_tokens.tolist() == [1, 1]


def test_a_rewound_request_starts_afresh(serve):
    toy = serve()
    toy.arrive("a")
    toy.step({"a": [5, 6, 7]})
    toy.texts["a"] = [1, 2, 3]
    drafts = toy.step({"a": [9]})
    recorder = toy.runtime.proposer
    assert recorder.named("begin") == ["a", "a"]
    assert recorder.named("end") == ["a"]
    assert drafts == {"a": [7, 8, 9, 10]}
    batch = recorder.batches[-1]
    assert batch.tokens(0).tolist() == [1, 2, 3, 9]
    assert batch.num_new_tokens.tolist() == [4]
    toy.step({"a": [10]})
    assert recorder.acceptances[-1].new_token_ids == [[10]]
    toy.runtime.end("a")
    assert recorder.named("end") == ["a", "a"]


def test_prefill_rows_get_nothing_and_are_not_shown(serve):
    toy = serve()
    toy.arrive("a", "b")
    assert toy.step({"a": [], "b": [6]}) == {"a": [], "b": [7, 8, 9, 10]}
    assert toy.step({"a": []}) == {"a": []}
    assert toy.runtime.proposer.named("propose") == [("b",)]
    assert toy.step({"a": [5]}) == {"a": [7, 8, 9, 10]}


def test_an_empty_step(serve):
    toy = serve()
    assert toy.step({}) == {}
    assert toy.runtime.proposer.calls == []


def test_drafts_go_to_the_rows_they_were_made_for(serve):
    class Echo(Proposer):
        def propose(self, batch):
            return [[int(batch.tokens(i)[-1])] for i in range(len(batch))]

    toy = serve(Echo())
    toy.arrive("a", "b", "c", "d", "e")
    new = {"a": [5], "b": [], "c": [6], "ghost": [1], "d": [7], "e": []}
    assert toy.step(new) == {"a": [5], "b": [], "c": [6], "ghost": [], "d": [7], "e": []}


def test_probabilities_go_where_their_drafts_go(serve):
    class Certain(Proposer):
        def propose(self, batch):
            ids = np.array([[batch.tokens(i)[-1]] * K for i in range(len(batch))])
            return Drafts(ids, np.array([K] * len(batch)), probabilities=np.eye(100)[ids])

    toy = serve(Certain())
    toy.arrive("a", "b", "c")
    drafts = toy.drafts({"a": [5], "b": [], "ghost": [1], "c": [6]})
    assert drafts.to_lists() == [[5] * K, [], [], [6] * K]
    assert drafts.probabilities.shape == (4, K, 100)
    assert drafts.probabilities.sum(axis=(1, 2)).tolist() == [K, 0, 0, K]
    assert drafts.probabilities[[0, 3], 0].argmax(axis=-1).tolist() == [5, 6]
    assert faults(toy) == 0


def test_logits_reach_the_requests_they_are_of(serve):
    toy = serve()
    toy.arrive("a", "b", "c")
    of = {name: np.full((1, 100), i) for i, name in enumerate("abc")}
    toy.step({"c": [5], "a": [6], "b": []}, logits=of)
    [observed] = toy.runtime.proposer.acceptances
    assert observed.request_ids == ["c", "a"]
    assert [one is of[name] for one, name in zip(observed.logits, "ca", strict=True)] == [True] * 2
    toy.step({"a": [6]})
    assert toy.runtime.proposer.acceptances[-1].logits is None


def test_num_new_tokens_count_from_the_last_propose(serve):
    toy = serve()
    toy.arrive("a", prompt=[1] * 5)
    toy.arrive("b", prompt=[2] * 7)

    def new(step, **more):
        toy.step(step, **more)
        return toy.runtime.proposer.batches[-1].num_new_tokens.tolist()

    assert new({"a": [5]}) == [6]
    assert new({"a": [5, 5], "b": [6]}) == [2, 8]
    toy.step({"a": [5, 5, 5]}, most=0)  # not shown
    assert new({"a": [5], "b": [6]}) == [4, 1]


# -- limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "length"), [(None, K), (0, 0), (1, 1), (K, K), (K + 1, K), (10**9, K)]
)
def test_k_of_a_request(serve, asked, length):
    toy = serve()
    toy.arrive("a", arguments={"specplug_num_speculative_tokens": asked})
    toy.arrive("b")
    assert {i: len(row) for i, row in toy.step({"a": [5], "b": [5]}).items()} == {
        "a": length,
        "b": K,
    }
    assert toy.runtime.proposer.requests[0].num_speculative_tokens == length


@pytest.mark.parametrize(("most", "length"), [(None, K), (0, 0), (1, 1), (3, 3), (K, K), (99, K)])
def test_k_of_a_step(serve, most, length):
    toy = serve()
    toy.arrive("a")
    assert len(toy.step({"a": [5]}, most=most)["a"]) == length
    assert len(toy.step({"a": [5]})["a"]) == K


def test_the_proposer_is_told_each_limit(serve):
    toy = serve()
    toy.arrive("a", arguments={"specplug_num_speculative_tokens": 2})
    toy.arrive("b", limit=3 + 1 + 3 + 1)
    toy.arrive("c")
    toy.step({"a": [5], "b": [5], "c": [5]})
    assert toy.runtime.proposer.batches[-1].max_draft_tokens.tolist() == [2, 3, 4]
    toy.step({"a": [5], "b": [5], "c": [5]}, most=3)
    assert toy.runtime.proposer.batches[-1].max_draft_tokens.tolist() == [2, 2, 3]


@pytest.mark.parametrize("which", ["request", "model"])
def test_near_the_longest_length_at_most_one_less_than_what_is_left(serve, which):
    longest = 20
    toy = serve(engine={"max_model_len": longest if which == "model" else 64})
    for n in range(longest - K - 1, longest + 1):
        toy.arrive("a", prompt=[1] * (n - 1), limit=longest if which == "request" else ENDLESS)
        row = toy.step({"a": [5]})["a"]
        assert len(row) == max(0, min(K, longest - n - 1))


# -- stop tokens ----------------------------------------------------------------------------


def test_drafts_are_cut_behind_a_stop_token(serve):
    toy = serve(Recorder([7, 8, 9, 10]))
    toy.arrive("a", stop_token_ids=frozenset({8, 9}))
    toy.arrive("b")
    toy.arrive("c", stop_token_ids=frozenset({7}))
    assert toy.step({"a": [1], "b": [1], "c": [1]}) == {"a": [7, 8], "b": [7, 8, 9, 10], "c": [7]}


def test_a_committed_stop_token_makes_the_request_silent(serve):
    toy = serve()
    toy.arrive("a", stop_token_ids=frozenset({50, 51}))
    assert toy.step({"a": [49]})["a"]
    assert toy.step({"a": [51]})["a"] == []
    assert toy.step({"a": [49]})["a"] == []


def test_a_stop_token_in_the_prompt_stops_nothing(serve):
    toy = serve()
    toy.arrive("a", prompt=[50, 50], stop_token_ids=frozenset({50}))
    assert toy.step({"a": [5]})["a"]


def test_tokens_behind_a_committed_stop_token_do_not_count(serve):
    toy = serve(Recorder([7, 50, 9, 10]))
    toy.arrive("a", stop_token_ids=frozenset({50}))
    toy.step({"a": [5]})
    toy.step({"a": [7, 50, 9, 10, 11]}, {"a": [7, 50, 9, 10]})
    counters = toy.runtime.counters
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (4, 2)
    assert counters.num_accepted_tokens_per_pos == [1, 1, 0, 0]
    assert toy.runtime.proposer.acceptances[-1].new_token_ids == [[7, 50]]


@pytest.mark.parametrize("min_output_tokens", [0, 1, 2, 3])
def test_min_output_tokens_let_early_stop_tokens_pass(serve, min_output_tokens):
    toy = serve()
    toy.arrive("a", stop_token_ids=frozenset({50}), min_output_tokens=min_output_tokens)
    drafted = [bool(toy.step({"a": [50]})["a"]) for _ in range(3)]
    assert drafted == [i + 1 < min_output_tokens for i in range(1, 4)]


def test_min_output_tokens_within_one_step(serve):
    toy = serve()
    toy.arrive("a", stop_token_ids=frozenset({50}), min_output_tokens=4)
    assert toy.step({"a": [50, 50]})["a"]
    assert toy.runtime.proposer.acceptances[-1].new_token_ids == [[50, 50]]
    assert toy.step({"a": [50, 50, 50]})["a"] == []
    assert toy.runtime.proposer.acceptances[-1].new_token_ids == [[50, 50]]


def test_the_first_token_that_may_be_a_stop_token_is_not_the_one_behind_a_draft(serve):
    toy = serve()
    toy.arrive("a", min_output_tokens=4)
    lengths = [len(toy.step({"a": [token]})["a"]) for token in (5, 6, 7, 8)]
    assert lengths == [2, 1, 0, 4]


# -- acceptance and counters ----------------------------------------------------------------


def test_counters_follow_what_was_kept(serve):
    toy = serve()
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [5]})  # prefill: verifies nothing
    assert toy.runtime.counters.num_steps == 0
    draft = [7, 8, 9, 10]
    toy.step({"a": [7, 8, 60], "b": [61]}, {"a": draft, "b": draft})
    toy.step({"a": [*draft, 62], "b": [7]}, {"a": draft})
    toy.step({"a": [7], "b": [5]}, {"a": [], "b": [6]})
    toy.runtime.end("b")
    toy.step({"a": [7, 8, 9, 63]}, {"a": [7, 8, 9], "b": draft})
    counters = toy.runtime.counters
    assert counters.num_requests == 2
    assert counters.num_steps == 7
    assert counters.num_drafts == 5
    assert counters.num_draft_tokens == 4 + 4 + 4 + 1 + 3
    assert counters.num_accepted_tokens == 2 + 0 + 4 + 0 + 3
    assert counters.num_accepted_tokens_per_pos == [3, 3, 2, 1]
    assert counters.acceptance_rate == pytest.approx(9 / 16)
    assert counters.mean_acceptance_length == pytest.approx(1 + 9 / 5)
    assert counters.tokens_per_step == pytest.approx(1 + 9 / 7)
    assert counters.num_propose_calls == 5
    assert 0 < counters.longest_propose_seconds <= counters.propose_seconds


def test_an_abort_with_a_draft_under_way_counts_nothing(serve):
    toy = serve()
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [5]})
    toy.runtime.end("a")
    toy.step({"b": [7, 60]}, {"a": [7, 8], "b": [7, 8]})
    counters = toy.runtime.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (
        1,
        2,
        1,
    )


def test_a_new_request_under_an_old_id_does_not_inherit_a_draft(serve):
    toy = serve()
    toy.arrive("a")
    toy.step({"a": [5]})
    toy.arrive("a")
    toy.step({"a": [7]})
    assert toy.runtime.counters.num_steps == 0


def test_counters_before_the_first_draft_are_nan_and_printable(serve):
    counters = serve().runtime.counters
    assert math.isnan(counters.acceptance_rate)
    assert math.isnan(counters.mean_acceptance_length)
    assert "0 drafts" in str(counters)
    assert "SWITCHED OFF" not in str(counters)


def test_observe_sees_draft_accepted_and_new_tokens(serve):
    toy = serve()
    recorder = toy.runtime.proposer
    toy.arrive("a", "b", "c")
    toy.step({"a": [5], "b": [5], "c": []})
    toy.step({"c": [5], "b": [7, 8, 60], "a": [61]}, {"a": [7, 8], "b": [7, 8, 9]})
    first, second = recorder.acceptances
    assert list(first.request_ids) == ["a", "b"]
    assert [list(draft) for draft in first.draft_token_ids] == [[], []]
    assert list(second.request_ids) == ["c", "b", "a"]
    assert [list(draft) for draft in second.draft_token_ids] == [[], [7, 8, 9], [7, 8]]
    assert second.num_accepted.tolist() == [0, 2, 0]
    assert second.num_accepted.dtype == np.int32
    assert [list(new) for new in second.new_token_ids] == [[5], [7, 8, 60], [61]]
    assert second.target_token_ids is None


def test_observe_sees_the_targets_tokens_where_the_engine_gives_them(serve):
    toy = serve()
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [5]})
    toy.step({"b": [5], "a": [61]}, {"a": [7, 8]}, targets={"a": [61, 62, 63], "gone": [1]})
    assert [list(one) for one in toy.runtime.proposer.acceptances[1].target_token_ids] == [
        [],
        [61, 62, 63],
    ]


def test_what_a_proposer_uses_is_given_only_if_the_engine_can(serve):
    for uses, provides in [
        (set(), {Capability.TARGET_TOKENS}),
        ({Capability.TARGET_TOKENS}, set()),
        ({Capability.TARGET_TOKENS}, {Capability.TARGET_TOKENS}),
    ]:
        recorder = Recorder()
        recorder.uses = frozenset(uses)
        toy = serve(recorder, engine={"provides": frozenset(provides)})
        assert toy.runtime.uses(Capability.TARGET_TOKENS) == bool(uses and provides)


def test_observe_comes_before_propose_and_not_for_prefill(serve):
    toy = serve()
    toy.arrive("a")
    toy.step({"a": []})
    toy.step({"a": [5]})
    assert toy.runtime.proposer.calls[1:] == [("observe", ("a",)), ("propose", ("a",))]


def test_what_observe_does_to_the_drafts_stays_with_it(serve):
    class Vandal(Recorder):
        def observe(self, acceptance):
            for draft in acceptance.draft_token_ids:
                draft.clear()

    toy = serve(Vandal())
    toy.arrive("a")
    toy.step({"a": [5]})
    verified = {"a": [7, 8]}
    toy.step({"a": [7]}, verified)
    assert verified == {"a": [7, 8]}


# -- views ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["matrix", "row"])
def test_writing_to_the_engines_tokens_is_a_counted_fault(serve, where):
    class Writer(Proposer):
        def propose(self, batch):
            if where == "matrix":
                batch.token_ids[0, 0] = 42
            else:
                batch.tokens(0)[0] = 42
            return [[1]]

    toy = serve(Writer())
    toy.arrive("a")
    assert toy.step({"a": [5]}) == {"a": []}
    assert faults(toy) == 1
    assert toy.matrix[0, 0] == 1
    toy.matrix[0, 0] = 1  # the engine itself may still write


def test_the_batch_is_a_view_not_a_copy(serve):
    toy = serve()
    toy.arrive("a")
    toy.step({"a": [5]})
    assert np.shares_memory(toy.runtime.proposer.batches[0].token_ids, toy.matrix)


# -- faults ---------------------------------------------------------------------------------


class Failing(Recorder):
    """Raises in the methods named, for the requests named (all by default)."""

    def __init__(self, *methods, only=None, draft=(7, 8)):
        super().__init__(draft)
        self.methods, self.only = set(methods), only

    def fail(self, method, request_id=None):
        if method in self.methods and (self.only is None or request_id in self.only):
            raise ValueError(f"{method} went wrong")

    def begin(self, request):
        super().begin(request)
        self.fail("begin", request.id)

    def propose(self, batch):
        drafts = super().propose(batch)
        self.fail("propose")
        return drafts

    def observe(self, acceptance):
        super().observe(acceptance)
        self.fail("observe")

    def end(self, request_id):
        super().end(request_id)
        self.fail("end", request_id)

    def close(self):
        super().close()
        self.fail("close")


def test_a_failing_begin_silences_that_request_only(serve):
    toy = serve(Failing("begin", only={"a"}))
    toy.arrive("a", "b")
    for _ in range(3):
        assert toy.step({"a": [5], "b": [5]}) == {"a": [], "b": [7, 8]}
    assert faults(toy) == 1
    assert set(toy.runtime.proposer.named("observe")) == {("b",)}
    toy.runtime.end("a")
    assert toy.runtime.proposer.named("end") == ["a"]


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "end", "close"])
def test_a_fault_in_each_method_is_counted_and_logged_once(serve, caplog, method):
    toy = serve(Failing(method), max_consecutive_faults=1000)
    ids = [f"r{i}" for i in range(5)]
    toy.arrive(*ids)
    for _ in range(5):
        toy.step({request_id: [5] for request_id in ids})
    for request_id in ids:
        toy.runtime.end(request_id)
    toy.runtime.close()
    assert faults(toy) == (1 if method == "close" else 5)
    (message,) = errors_in(caplog)
    assert f"'tested': {method} raised ValueError: {method} went wrong" in message
    assert toy.runtime.num_requests == 0


def test_each_kind_of_fault_is_logged_once(serve, caplog):
    toy = serve(Failing("propose", "end"), max_consecutive_faults=1000)
    for request_id in "abc":
        toy.arrive(request_id)
        toy.step({request_id: [5]})
        toy.runtime.end(request_id)
    assert faults(toy) == 6
    assert len(errors_in(caplog)) == 2


def test_a_failing_observe_or_end_does_not_cost_a_draft(serve):
    toy = serve(Failing("observe", "end"))
    toy.arrive("a", "b")
    toy.step({"a": [5], "b": [5]})
    toy.runtime.end("a")
    assert toy.step({"b": [5]}) == {"b": [7, 8]}


@pytest.mark.parametrize(
    "nonsense",
    [None, 5, "ab", [[1], [2], [3]], [None], [[1.5]], [[-1]], [[100]], [[None]], np.zeros(3)],
    ids=str,
)
def test_nonsense_is_one_fault_and_no_draft(serve, caplog, nonsense):
    toy = serve(SimpleProposer(lambda batch: nonsense))
    toy.arrive("a")
    assert toy.step({"a": [5]}) == {"a": []}
    assert toy.step({"a": [5]}) == {"a": []}
    assert faults(toy) == 2
    (message,) = errors_in(caplog)
    assert "proposer 'tested'" in message


class SimpleProposer(Proposer):
    def __init__(self, function):
        self._function = function

    def propose(self, batch):
        return self._function(batch)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no str")


def test_an_exception_that_cannot_be_shown_is_a_fault_like_any_other(serve):
    def fail(batch):
        raise UnprintableError

    toy = serve(SimpleProposer(fail))
    toy.arrive("a")
    assert toy.step({"a": [5]}) == {"a": []}
    assert faults(toy) == 1


def test_a_method_without_a_name_fails_like_any_other(serve):
    recorder = Failing("propose")
    recorder.propose = functools.partial(Failing.propose, recorder)
    toy = serve(recorder)
    toy.arrive("a")
    assert toy.step({"a": [5]}) == {"a": []}
    assert faults(toy) == 1


def test_a_proposer_that_only_fails_is_switched_off(serve, caplog):
    toy = serve(Failing("propose"), max_consecutive_faults=3)
    toy.arrive("a", "b")
    for i in range(1, 6):
        assert toy.step({"a": [5], "b": [5]}) == {"a": [], "b": []}
        assert toy.runtime.counters.switched_off == (i >= 3)
    recorder = toy.runtime.proposer
    assert len(recorder.named("propose")) == 3
    off = [message for message in errors_in(caplog) if "switched off" in message]
    assert len(off) == 1
    assert "'tested'" in off[0]
    assert "SWITCHED OFF" in str(toy.runtime.counters)


def test_after_switch_off_old_requests_end_and_new_ones_do_not_begin(serve):
    toy = serve(Failing("propose"), max_consecutive_faults=1)
    recorder = toy.runtime.proposer
    toy.arrive("old")
    toy.step({"old": [5]})
    toy.arrive("new")
    seen = len(recorder.named("observe"))
    assert toy.step({"old": [5], "new": [5]}) == {"old": [], "new": []}
    assert len(recorder.named("observe")) == seen
    toy.runtime.end("old")
    toy.runtime.end("new")
    assert recorder.named("begin") == ["old"]
    assert recorder.named("end") == ["old"]
    toy.runtime.close()
    assert recorder.calls[-1] == ("close",)


def test_counters_go_on_after_switch_off(serve):
    toy = serve(Failing("propose"), max_consecutive_faults=1)
    toy.arrive("a")
    toy.step({"a": [5]})
    toy.step({"a": [5]})
    assert toy.runtime.counters.num_steps == 1


def test_a_usable_draft_in_between_keeps_it_on(serve):
    recorder = Failing("propose")
    toy = serve(recorder, max_consecutive_faults=3)
    toy.arrive("a")
    for i in range(30):
        recorder.methods = set() if i % 3 == 2 else {"propose"}
        toy.step({"a": [5]})
    assert not toy.runtime.counters.switched_off
    assert faults(toy) == 20


def test_one_fault_does_not_count_against_later_steps(serve):
    recorder = Failing("propose", draft=())
    toy = serve(recorder, max_consecutive_faults=2)
    toy.arrive("a")
    toy.step({"a": [5]})
    recorder.methods = set()
    for _ in range(5):
        assert toy.step({"a": [5]}) == {"a": []}
    assert not toy.runtime.counters.switched_off


def test_a_row_that_fails_beside_one_that_drafts_keeps_it_on(serve):
    toy = serve(SimpleProposer(lambda batch: [None, [7]]), max_consecutive_faults=2)
    toy.arrive("a", "b")
    for _ in range(10):
        assert toy.step({"a": [5], "b": [5]}) == {"a": [], "b": [7]}
    assert not toy.runtime.counters.switched_off
    assert faults(toy) == 10


def test_finding_nothing_is_no_fault(serve):
    toy = serve(Recorder([]), max_consecutive_faults=1)
    toy.arrive("a")
    for _ in range(5):
        assert toy.step({"a": [5]}) == {"a": []}
    assert faults(toy) == 0
    assert not toy.runtime.counters.switched_off


def test_a_proposer_whose_begin_always_fails_is_switched_off(serve):
    toy = serve(Failing("begin"), max_consecutive_faults=3)
    for i in range(10):
        toy.arrive(f"r{i}")
        toy.step({f"r{i}": [5]})
    assert toy.runtime.counters.switched_off


# -- per-request options --------------------------------------------------------------------


def test_invalid_options_are_logged_and_left_out(serve, caplog):
    toy = serve()
    toy.arrive("a", arguments={"specplug_num_speculative_tokens": "two"})
    assert len(toy.step({"a": [5]})["a"]) == K
    (message,) = [record.getMessage() for record in caplog.records]
    assert "request a" in message
    assert "num_speculative_tokens" in message
    assert toy.runtime.proposer.requests[0].options == RequestOptions()
    assert faults(toy) == 0


def test_a_proposers_own_request_options_reach_it(make_runtime):
    class More(RequestOptions):
        prediction: str = ""

    recorder = Recorder()
    toy = Toy(make_runtime(recorder, request_options=More))
    toy.arrive("a", arguments={"specplug_prediction": "x", "other": 1})
    assert recorder.requests[0].options == More(prediction="x")
    toy.runtime.close()


def test_a_required_request_option_does_not_lose_a_request(make_runtime):
    """Refusing such a model at start-up is fine too; failing at the first request is not."""

    class Strict(RequestOptions):
        required: str

    try:
        toy = Toy(make_runtime(Recorder(), request_options=Strict))
    except OptionError:
        return
    toy.arrive("a")
    toy.arrive("b", arguments={"specplug_num_speculative_tokens": 1})
    assert set(toy.step({"a": [5], "b": [5]})) == {"a", "b"}
    toy.runtime.close()


def test_request_options_whose_check_crashes_do_not_lose_a_request(make_runtime, caplog):
    class Crashing(RequestOptions):
        value: int = 1

        def model_post_init(self, context):
            1 // self.value

    recorder = Recorder()
    toy = Toy(make_runtime(recorder, request_options=Crashing))
    toy.arrive("a", arguments={"specplug_value": 0})
    assert toy.step({"a": [5]})["a"]
    assert "request a" in caplog.text
    toy.runtime.close()


# -- observer hooks -------------------------------------------------------------------------


def watcher(**hooks):
    return SimpleNamespace(**{f"specplug_{name}": hookimpl(f) for name, f in hooks.items()})


def test_observers_see_the_life_of_a_request(serve):
    seen = []
    toy = serve(
        None,
        watcher(
            started=lambda proposer, engine: seen.append(("started", proposer, engine.backend)),
            request_begin=lambda proposer, request: seen.append(("begin", request.id)),
            drafts_verified=lambda acceptance: seen.append(
                ("verified", acceptance.num_accepted[0])
            ),
            drafts_proposed=lambda batch, drafts: seen.append(("drafts", drafts.to_lists())),
            request_end=lambda request_id: seen.append(("end", request_id)),
        ),
    )
    toy.arrive("a")
    toy.step({"a": [5]})
    toy.step({"a": [7, 60]}, {"a": [7, 8]})
    toy.runtime.end("a")
    drafted = ("drafts", [[7, 8, 9, 10]])
    assert seen == [
        ("started", "tested", "test"),
        ("begin", "a"),
        ("verified", 0),
        drafted,
        ("verified", 1),
        drafted,
        ("end", "a"),
    ]


def test_observers_may_take_any_subset_of_the_arguments(serve):
    seen = []
    toy = serve(
        None,
        watcher(drafts_proposed=lambda: seen.append("none")),
        watcher(drafts_proposed=lambda drafts: seen.append(len(drafts.lengths))),
        watcher(drafts_proposed=lambda drafts, proposer: seen.append(proposer)),
    )
    toy.arrive("a")
    toy.step({"a": [5]})
    assert Counter(seen) == Counter(["none", 1, "tested"])


EVENTS = ["started", "request_begin", "drafts_verified", "drafts_proposed", "request_end"]


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_raises_stops_neither_the_others_nor_the_engine(serve, caplog, event):
    seen = []

    def fail():
        seen.append("failed")
        raise ValueError("observer went wrong")

    def note():
        seen.append("noted")

    def note_too():
        seen.append("noted")

    toy = serve(None, *(watcher(**{event: function}) for function in (note, fail, note_too)))
    toy.arrive("a")
    assert toy.step({"a": [5]})["a"]
    assert toy.step({"a": [5]})["a"]
    toy.runtime.end("a")
    times = 2 if event.startswith("drafts") else 1
    assert Counter(seen) == {"failed": times, "noted": 2 * times}
    (message,) = errors_in(caplog)
    assert f"specplug_{event} raised ValueError" in message
    assert faults(toy) == 0


def test_an_observer_cannot_change_what_the_engine_gets(serve):
    def vandal(drafts):
        drafts.token_ids[:] = -1
        drafts.lengths[:] = 99

    toy = serve(None, watcher(drafts_proposed=vandal))
    toy.arrive("a")
    assert toy.step({"a": [5]}) == {"a": [7, 8, 9, 10]}


def test_requests_are_observed_after_switch_off_too(serve):
    seen = []

    def ended(request_id):
        seen.append(request_id)

    toy = serve(
        Failing("propose"),
        watcher(request_begin=lambda request: seen.append(request.id), request_end=ended),
        max_consecutive_faults=1,
    )
    toy.arrive("a")
    toy.step({"a": [5]})
    toy.arrive("b")
    toy.runtime.end("b")
    assert seen == ["a", "b", "b"]


# -- start, log, close ----------------------------------------------------------------------


def test_prepare_gets_the_engine_before_anything_else(serve):
    class Prepared(Recorder):
        def prepare(self, engine):
            self.calls.append(("prepare", engine))

    toy = serve(Prepared())
    toy.arrive("a")
    assert toy.runtime.proposer.calls[0] == ("prepare", toy.runtime.engine)


def failing_prepare(error):
    class P(Recorder):
        def prepare(self, engine):
            raise error

    return P()


def test_an_import_error_in_prepare_gives_the_install_hint(make_runtime):
    before = running()
    with pytest.raises(DependencyError) as error:
        make_runtime(
            failing_prepare(ModuleNotFoundError("No module named 'thing'")),
            install_hint="pip install thing.",
        )
    assert "'tested'" in str(error.value)
    assert "No module named 'thing'" in str(error.value)
    assert "pip install thing." in str(error.value)
    assert running() == before


@pytest.mark.parametrize("error", [ValueError("vocabulary too small"), KeyError("x")])
def test_other_errors_in_prepare_pass_through(make_runtime, error):
    with pytest.raises(type(error)) as raised:
        make_runtime(failing_prepare(error))
    assert raised.value is error


def test_start_up_refuses_unknown_names_options_and_needs(make_runtime, make_engine):
    manager = PluginManager(discover=False)
    with pytest.raises(UnknownProposerError):
        Runtime("nothing", make_engine(), plugins=manager)
    with pytest.raises(OptionError, match="'x'"):
        make_runtime(Recorder(), settings={"options": {"x": 1}})
    with pytest.raises(CapabilityError, match="logits"):
        make_runtime(Recorder(), needs=frozenset({Capability.LOGITS}))


def test_installed_proposers_are_found_by_default(make_engine):
    runtime = Runtime("ngram", make_engine())
    assert type(runtime.proposer).__name__ == "NgramProposer"
    runtime.close()


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("specplug.runtime.time.monotonic", lambda: now.seconds)
    return now


def test_counters_are_logged_at_the_interval_and_at_close(serve, caplog, clock):
    caplog.set_level(logging.INFO, "specplug")
    toy = serve(log_interval_seconds=10)
    toy.arrive("a")
    for seconds in (1005, 1009.9, 1010, 1015, 1020.5):
        clock.seconds = seconds
        toy.step({"a": [5]})
    assert len(logged(caplog)) == 2
    toy.runtime.close()
    assert len(logged(caplog)) == 3
    assert "'tested': 1 requests, 4 steps, 20 tokens proposed, 0 drafts" in logged(caplog)[-1]


def test_interval_zero_logs_only_at_close(serve, caplog, clock):
    caplog.set_level(logging.INFO, "specplug")
    toy = serve(log_interval_seconds=0)
    toy.arrive("a")
    for _ in range(3):
        clock.seconds += 1e6
        toy.step({"a": [5]})
    assert logged(caplog) == []
    toy.runtime.close()
    assert len(logged(caplog)) == 1


def test_only_rank_0_logs_the_counters(serve, caplog):
    caplog.set_level(logging.INFO, "specplug")
    serve(engine={"rank": 1, "world_size": 2}).runtime.close()
    assert logged(caplog) == []


def test_close_ends_what_is_alive_and_is_idempotent(serve):
    toy = serve()
    toy.arrive("a", "b")
    toy.runtime.end("a")
    toy.runtime.close()
    toy.runtime.close()
    assert toy.runtime.proposer.calls[2:] == [("end", "a"), ("end", "b"), ("close",)]
    assert toy.runtime.num_requests == 0


def test_running_lists_the_runtimes_that_serve(serve):
    first, second = serve().runtime, serve().runtime
    assert {first, second} <= set(running())
    first.close()
    assert first not in running()
    assert second in running()


def test_a_forgotten_runtime_is_not_kept_alive(make_runtime):
    before = len(running())
    runtime = make_runtime(Recorder())
    assert len(running()) == before + 1
    del runtime
    gc.collect()
    assert len(running()) == before


def test_a_process_that_ends_closes_its_runtimes(run_python):
    printed = run_python(
        """
import multiprocessing
from specplug import EngineInfo, PluginManager, Proposer, ProposerSpec, Runtime
from specplug.lengths import adaptive
class P(Proposer):
    def propose(self, batch): return []
    def close(self): print("closed", flush=True)
manager = PluginManager(discover=False)
manager.add(ProposerSpec(name="p", factory=lambda options: P()))
manager.add(adaptive.SPEC)
def serve():
    global runtime  # alive until the process ends, which skips atexit
    runtime = Runtime("p", EngineInfo("test", 10, 10, 1, 2), plugins=manager)
process = multiprocessing.get_context("fork").Process(target=serve)
process.start()
process.join()
"""
    )
    assert printed == "closed"


# -- a whole engine, simulated --------------------------------------------------------------

VOCAB, STOP, MOST_ROWS, WIDTH = 7, 6, 4, 24


def target(tokens):
    """The toy target model: the next token follows from all tokens before it."""
    return (sum(tokens) * 3 + tokens[-1] + len(tokens)) % VOCAB


def plain(prompt, limit):
    """Decode without speculation."""
    text = list(prompt)
    while len(text) < limit:
        text.append(target(text))
        if text[-1] == STOP:
            break
    return text


class Moody(Proposer):
    """Drafts right, wrong, nonsense, or raises, as ``mood`` says.

    Notes where it was told something else than what holds (``texts``, by request): the
    runtime would swallow an assertion.
    """

    def __init__(self, texts):
        self.texts = texts
        self.mood = "right"
        self.known = {}
        self.seen = Counter()
        self.wrong = []

    def check(self, what, found, expected):
        if found != expected:
            self.wrong.append((what, found, expected))

    def begin(self, request):
        self.check("slot taken", request.slot in self.known.values(), False)
        self.check("prompt", list(request.prompt_token_ids), self.texts[request.id])
        self.known[request.id] = request.slot

    def propose(self, batch):
        for i, request_id in enumerate(batch.request_ids):
            text = self.texts[request_id]
            self.seen[request_id] += int(batch.num_new_tokens[i])
            self.check("tokens", batch.tokens(i).tolist(), text)
            self.check("new tokens", self.seen[request_id], len(text))
            self.check("slot", batch.slots[i], self.known[request_id])
        return [self.row(batch, i) for i in range(len(batch))]

    def observe(self, acceptance):
        for request_id, new in zip(acceptance.request_ids, acceptance.new_token_ids, strict=True):
            self.check("nothing behind a stop", STOP in new[:-1], False)
            self.check(
                "in the text",
                "".join(map(str, new)) in "".join(map(str, self.texts[request_id])),
                True,
            )

    def row(self, batch, i):
        text = batch.tokens(i).tolist()
        draft = []
        for _ in range(int(batch.max_draft_tokens[i])):
            draft.append(target(text + draft))
        match self.mood:
            case "wrong":
                draft = [(token + 1) % VOCAB for token in draft]
            case "half":
                draft[1:] = [(token + 1) % VOCAB for token in draft[1:]]
            case "too long":
                draft *= 3
            case "nonsense":
                draft = [*draft[:1], VOCAB, -1, None]
            case "not a row":
                return None
            case "raises":
                raise RuntimeError("moody")
            case "nothing":
                draft = []
        return draft

    def end(self, request_id):
        del self.known[request_id]

    def usage(self):
        return Usage(len(self.known), 0)


MOODS = ["right", "wrong", "half", "too long", "nonsense", "not a row", "raises", "nothing"]


class SimulatedEngine(RuleBasedStateMachine):
    """Requests come, run in shuffled rows, are preempted, aborted, and finish.

    Like a real engine, it trusts its drafts, and keeps what was accepted behind a stop token
    until the step is over.
    """

    def __init__(self):
        super().__init__()
        self.texts = {}
        self.proposer = Moody(self.texts)
        manager = PluginManager(discover=False)
        manager.add(ProposerSpec(name="moody", factory=lambda _: self.proposer))
        manager.add(FIXED)
        self.runtime = Runtime(
            "moody",
            EngineInfo("simulated", VOCAB, WIDTH, MOST_ROWS, K),
            Settings(max_consecutive_faults=3, length_policy="fixed"),
            manager,
        )
        self.matrix = np.zeros((MOST_ROWS, WIDTH), np.int32)
        self.limits, self.prompts, self.drafts = {}, {}, {}
        self.waiting, self.in_rows = [], {}
        self.next_id = 0
        self.expected = Counter()
        self.per_position = [0] * K

    @initialize(first=st.integers(1, 3))
    def open(self, first):
        for _ in range(first):
            self.arrive([1, 2], 9)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        more=st.integers(1, 20),
    )
    def arrive(self, prompt, more):
        request_id = f"r{self.next_id}"
        self.next_id += 1
        limit = min(WIDTH, len(prompt) + more)
        self.prompts[request_id], self.texts[request_id] = prompt, list(prompt)
        self.limits[request_id] = limit
        self.waiting.append(request_id)
        self.runtime.begin(
            Arrival(request_id, prompt, len(prompt) + more, stop_token_ids=frozenset({STOP}))
        )

    @rule(mood=st.sampled_from(MOODS))
    def change_mood(self, mood):
        self.proposer.mood = mood

    @precondition(lambda self: self.in_rows)
    @rule(data=st.data())
    def preempt(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.in_rows)))
        del self.in_rows[request_id]
        self.drafts.pop(request_id, None)
        self.waiting.append(request_id)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data):
        self.forget(data.draw(st.sampled_from(sorted(self.texts))))

    def forget(self, request_id):
        self.runtime.end(request_id)
        del self.texts[request_id]
        self.drafts.pop(request_id, None)
        self.in_rows.pop(request_id, None)
        if request_id in self.waiting:
            self.waiting.remove(request_id)

    @rule(data=st.data(), most=st.sampled_from([None, None, 0, 2]), repeat=st.integers(1, 3))
    def run(self, data, most, repeat):
        for _ in range(repeat):
            self.run_step(data, most)

    def run_step(self, data, most):
        rows = data.draw(st.permutations(range(MOST_ROWS)))
        admitted = [*self.in_rows, *self.waiting][:MOST_ROWS]
        self.in_rows = dict(zip(admitted, rows, strict=False))
        self.waiting = [i for i in self.waiting if i not in self.in_rows]
        prefilling = {
            i for i in admitted if len(self.texts[i]) == len(self.prompts[i])
            and data.draw(st.booleans())
        }  # fmt: skip
        verified = {i: self.drafts[i] for i in admitted if self.drafts.get(i)}
        for request_id in admitted:
            if request_id not in prefilling:
                self.decode(request_id, verified.get(request_id, []))
            self.matrix[self.in_rows[request_id]] = -5
            text = self.texts[request_id]
            self.matrix[self.in_rows[request_id], : len(text)] = text
        drafts = self.runtime.step(
            Step(
                request_ids=admitted,
                token_ids=self.matrix,
                rows=np.array([self.in_rows[i] for i in admitted], np.int32),
                num_tokens=[len(self.texts[i]) for i in admitted],
                sampled=[i not in prefilling for i in admitted],
                verified=verified,
                num_speculative_tokens=most,
            )
        )
        self.take(admitted, drafts, K if most is None else most)

    def decode(self, request_id, draft):
        text = self.texts[request_id]
        if len(text) > len(self.prompts[request_id]):
            self.expected["steps"] += 1
            self.expected["drafts"] += bool(draft)
            self.expected["drafted"] += len(draft)
        stopped = False
        for position in range(len(draft) + 1):
            text.append(target(text))
            accepted = position < len(draft) and draft[position] == text[-1]
            if accepted and not stopped:
                self.expected["accepted"] += 1
                self.per_position[position] += 1
            stopped |= text[-1] == STOP
            if not accepted:
                return

    def take(self, admitted, drafts, most):
        assert isinstance(drafts, Drafts)
        for request_id, draft in zip(admitted, drafts.to_lists(), strict=True):
            text, limit = self.texts[request_id], self.limits[request_id]
            assert len(draft) <= max(0, min(most, limit - len(text) - 1))
            assert all(0 <= token < VOCAB for token in draft)
            assert STOP not in draft[:-1]
            self.drafts[request_id] = draft
            prompt, generated = self.prompts[request_id], text[len(self.prompts[request_id]) :]
            if STOP in generated:
                generated = generated[: generated.index(STOP) + 1]
            if STOP in generated or len(text) == limit:
                assert prompt + generated == plain(prompt, limit)
                assert draft == []
                self.forget(request_id)

    @invariant()
    def the_same_requests_are_alive(self):
        assert self.runtime.num_requests == len(self.texts)
        if not self.runtime.counters.switched_off:
            assert self.proposer.usage().num_requests == len(self.texts)

    @invariant()
    def the_proposer_was_told_the_truth(self):
        assert self.proposer.wrong == []

    @invariant()
    def counters_are_the_engines(self):
        counters = self.runtime.counters
        found = {
            "steps": counters.num_steps,
            "drafts": counters.num_drafts,
            "drafted": counters.num_draft_tokens,
            "accepted": counters.num_accepted_tokens,
        }
        assert found == {name: self.expected[name] for name in found}
        assert counters.num_accepted_tokens_per_pos == self.per_position

    def teardown(self):
        for request_id in list(self.texts):
            self.forget(request_id)
        assert self.runtime.num_requests == 0
        assert self.proposer.usage().num_requests == 0
        self.runtime.close()


TestSimulatedEngine = SimulatedEngine.TestCase
TestSimulatedEngine.settings = hypothesis_settings(max_examples=120, stateful_step_count=40)
