"""TensorRT-LLM's executor, as a double of each generation: with proposers the text is its own."""

from __future__ import annotations

import random
from types import MappingProxyType

import numpy as np
import pytest
from trtllm_double import END, GENERATIONS, VOCAB_SIZE, CorruptedError, ToyTarget, install

import specplug.trtllm
from specplug.backends.trtllm import adapter as adapter_module
from specplug.plugins import PluginManager
from specplug.proposer import Proposer, ProposerSpec

BUILT_IN = ["ngram", "prompt_lookup", "suffix", "lookahead", "prediction", "cascade"]


class Oracle(Proposer):
    """Drafts what the toy target would say, to the full length allowed."""

    target = ToyTarget()

    def propose(self, batch):
        drafts = []
        for i in range(len(batch)):
            tokens = batch.tokens(i).tolist()
            for _ in range(batch.max_draft_tokens[i]):
                tokens.append(self.target.next_token(tokens))
            drafts.append(tokens[batch.num_tokens[i] :])
        return drafts


class Guesser(Proposer):
    """Drafts tokens by the request's length alone: mostly wrong, now and then right."""

    def propose(self, batch):
        limits = zip(batch.num_tokens.tolist(), batch.max_draft_tokens.tolist(), strict=True)
        return [[(length * 7 + j) % VOCAB_SIZE for j in range(most)] for length, most in limits]


class Broken(Proposer):
    """Returns what no engine can take."""

    def propose(self, batch):
        return [[VOCAB_SIZE + 5, -1, None, 1.5]] * len(batch)


def spec(kind):
    return ProposerSpec(kind.__name__.lower(), lambda _options: kind())


SPECS = {kind.__name__.lower(): spec(kind) for kind in (Oracle, Guesser, Broken)}


@pytest.fixture(params=GENERATIONS)
def generation(request):
    return request.param


@pytest.fixture
def engine(generation, monkeypatch):
    """The engine's module, in one process so that proposers of this file can be served."""
    module = install(generation, monkeypatch)
    monkeypatch.setattr(module.LLM, "single_process", True)
    return module


@pytest.fixture
def make_llm(engine, trtllm_model):
    def make(proposer, k, settings=MappingProxyType({"length_policy": "fixed"}), **options):
        config = specplug.trtllm.speculative_config(
            SPECS.get(proposer, proposer), num_speculative_tokens=k, settings=settings, **options
        )
        return engine.LLM(str(trtllm_model), speculative_config=config)

    return make


def prompts(number, seed=0):
    """Return prompts of which most hold what the target will say."""
    chance, target = random.Random(seed), ToyTarget()
    made = []
    for _ in range(number):
        head = [chance.randrange(END) for _ in range(chance.randint(1, 10))]
        said = target.text(head, chance.choice([0, 20, 60]))
        made.append([token for token in [*head, *said] if token != END])
    return made


def serve(executor, requests, *, also=lambda executor: None):
    """Serve requests to their ends, compare all texts, and look for anything left behind."""
    queued = [executor.add(prompt, length) for prompt, length in requests]
    while executor.waiting or executor.running:
        executor.step()
        also(executor)
    for request, (prompt, length) in zip(queued, requests, strict=True):
        assert request.output == executor.target.text(prompt, length)
    return queued


def check_counts(executor):
    """Compare specplug's counters with what the executor saw, padding left out."""
    runtime = executor.drafter.adapter.runtime
    counters = runtime.counters
    assert runtime.num_requests == 0
    seen = executor.num_drafted, executor.num_accepted
    counted = counters.num_draft_tokens, counters.num_accepted_tokens
    if executor.generation == "A":  # there the drafter pads, and the executor cannot tell
        assert counted <= seen
    else:
        assert counted == seen
    return counters


def beyond_prefill(requests):
    """Return how many requests had a use for drafts: others end with their first token."""
    return sum(len(request.output) > 1 for request in requests)


@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("proposer", [*BUILT_IN, *SPECS])
def test_text_is_the_targets_own(make_llm, proposer, k):
    executor = make_llm(proposer, k).executor()
    lengths = [1, 2, 3, 5, 40, 60, 80, 120, 30, 12]
    serve(executor, list(zip(prompts(len(lengths)), lengths, strict=True)))
    counters = check_counts(executor)
    assert counters.num_faults == 0 or proposer == "broken"
    if proposer not in ("broken", "prediction"):
        assert counters.num_accepted_tokens > 0
    if proposer == "oracle":
        assert counters.acceptance_rate > 0.97  # less only where an end cuts a draft


def test_every_draft_length(make_llm):
    for k in range(1, 17):
        executor = make_llm("oracle", k).executor()
        serve(executor, [(prompt, 50) for prompt in prompts(3)])
        assert max(map(len, executor.drafts.values())) <= k


def test_batches_grow_and_shrink(make_llm):
    executor = make_llm("suffix", 6).executor(max_batch_size=32)
    chance = random.Random(1)

    def arrive_and_leave(executor):
        if executor.iteration < 60:
            for prompt in prompts(chance.randint(0, 4), seed=executor.iteration):
                executor.add(prompt, chance.randint(1, 50))
        if executor.iteration % 7 == 0 and executor.running:
            executor.end(chance.choice(executor.running))

    first = [(prompt, 30) for prompt in prompts(3)]
    queued = [executor.add(prompt, length) for prompt, length in first]
    seen = {}
    while executor.waiting or executor.running:
        seen.update((request.py_request_id, request) for request in executor.running)
        executor.step()
        arrive_and_leave(executor)
    assert len(seen) > 60
    for request in [*queued, *seen.values()]:
        prompt = request.tokens[: request.py_orig_prompt_len]
        text = executor.target.text(prompt, request.py_max_new_tokens)
        assert text[: len(request.output)] == request.output
    check_counts(executor)


def test_256_requests_at_once(make_llm):
    executor = make_llm("suffix", 4).executor(max_batch_size=256)
    serve(executor, [(prompt, 20) for prompt in prompts(256)])
    check_counts(executor)


def test_evicted_and_resumed(make_llm):
    executor = make_llm("ngram", 4).executor()
    chance = random.Random(2)

    def evict(executor):
        running = [one for one in executor.running if one.py_batch_idx is not None and one.output]
        if executor.iteration % 5 == 0 and running:
            executor.evict(chance.choice(running))

    serve(executor, [(prompt, 60) for prompt in prompts(6)], also=evict)
    check_counts(executor)


def test_no_memory_for_drafts(make_llm):
    executor = make_llm("oracle", 4).executor(
        has_pages=lambda request, iteration: (request.py_request_id + iteration) % 3 > 0
    )
    serve(executor, [(prompt, 40) for prompt in prompts(6)])
    assert check_counts(executor).num_accepted_tokens > 0


def test_disabled_requests_get_no_draft(make_llm):
    executor = make_llm("oracle", 4).executor()
    off = executor.add([7, 3, 1], 30, py_disable_speculative_decoding=True)
    on = executor.add([7, 3, 1], 30)
    executor.run()
    assert off.output == on.output == executor.target.text([7, 3, 1], 30)
    assert executor.drafts[off.py_request_id] == []
    assert check_counts(executor).num_drafts > 0


def test_dummies_keep_their_tokens_and_are_not_served(make_llm):
    executor = make_llm("oracle", 4).executor(has_dummies=True)
    executor.step()  # warm-up: nothing but dummies
    served = serve(executor, [(prompt, 40) for prompt in prompts(3)])
    assert check_counts(executor).num_requests == beyond_prefill(served)


def test_disaggregated_requests_come_without_a_batch_index(make_llm):
    executor = make_llm("oracle", 4).executor()
    request = executor.add([7, 3, 1], 30, disagg=True)
    assert request.py_batch_idx is None
    executor.run()
    assert request.output == executor.target.text([7, 3, 1], 30)
    assert check_counts(executor).num_accepted_tokens > 0


def test_chunked_contexts_wait(make_llm):
    executor = make_llm("oracle", 4).executor(chunk=7)
    serve(executor, [(prompt * 3, 30) for prompt in prompts(5)])
    check_counts(executor)


def test_end_of_sequence_may_be_ignored(make_llm):
    executor = make_llm("oracle", 4).executor()
    request = executor.add([1, 2, 3], 200, py_end_id=-1)
    executor.run()
    assert len(request.output) == 200
    assert END in request.output


def test_a_long_request_is_copied_once(make_llm):
    executor = make_llm("ngram", 4).executor()
    prompt = np.random.default_rng(0).integers(0, END, 131_000).tolist()
    [request] = serve(executor, [(prompt, 40)])
    assert request.num_whole_copies == 1


def test_latency_is_told(make_llm):
    executor = make_llm("ngram", 4).executor()
    executor.add([1, 2, 3], 5)
    executor.drafter.last_draft_latency_ms = -1.0
    executor.run()
    assert executor.drafter.last_draft_latency_ms >= 0.0


def test_a_fault_of_specplugs_own_leaves_the_engine_alive(make_llm, monkeypatch, caplog):
    executor = make_llm("oracle", 4).executor()
    monkeypatch.setattr(adapter_module, "room", lambda request: 1 / 0)
    serve(executor, [(prompt, 20) for prompt in prompts(3)])
    assert executor.num_drafted == 0
    assert caplog.text.count("TensorRT-LLM goes on") == 1


def test_ranks_draft_the_same(engine, trtllm_model, monkeypatch):
    monkeypatch.setattr(engine.LLM, "single_process", False)
    config = specplug.trtllm.speculative_config("suffix", num_speculative_tokens=5)
    llm = engine.LLM(str(trtllm_model), speculative_config=config, tensor_parallel_size=2)
    assert llm.ranks[0].drafter is not llm.ranks[1].drafter
    executors = [llm.executor(rank) for rank in (0, 1)]
    chance = random.Random(3)
    num_steps = 0
    for num_steps in range(500):
        if num_steps % 3 == 0:
            [prompt] = prompts(1, seed=num_steps)
            length = chance.randint(1, 60)
            for executor in executors:
                executor.add(prompt, length)
        for executor in executors:
            executor.step()
        assert executors[0].drafts == executors[1].drafts
    assert executors[0].num_accepted > 100


# -- each rule of the adapter is one that a test would miss ---------------------------------


def broken_rule(rule, patch):
    """Break one rule of the adapter."""
    from specplug.backends.trtllm import drafter as drafter_module

    drafter, manager = drafter_module.SpecplugDrafter, drafter_module.SpecplugResourceManager
    prepare = drafter.prepare_draft_tokens

    def after(change):
        def changed(self, scheduled, resource_manager=None):
            presets = [request.py_draft_tokens for request in scheduled.generation_requests]
            prepare(self, scheduled, resource_manager)
            for request, preset in zip(scheduled.generation_requests, presets, strict=True):
                change(self, request, preset)

        patch.setattr(drafter, "prepare_draft_tokens", changed)

    def pad_early(self, request, _preset):
        missing = self.max_draft_len - len(request.py_draft_tokens)
        request.py_draft_tokens.extend([0] * missing)

    def leave_a_tuple(_self, request, _preset):
        request.py_draft_tokens = tuple(request.py_draft_tokens)

    def keep_the_preset(_self, request, preset):
        request.py_draft_tokens = preset or []

    def replace_dummies(_self, request, _preset):
        request.py_draft_tokens = [] if request.is_dummy else request.py_draft_tokens

    def one_too_many(self, request, _preset):
        if request.py_draft_tokens:
            request.py_draft_tokens.extend([0] * (self.max_draft_len + 1))

    changes = {
        "pad early": pad_early, "leave a tuple": leave_a_tuple, "keep the preset": keep_the_preset,
        "replace dummies": replace_dummies, "one too many": one_too_many,
    }  # fmt: skip
    if rule in changes:
        after(changes[rule])
    elif rule == "forget free":
        patch.setattr(manager, "free_resources", lambda self, request: None)
    elif rule == "ignore no pages":
        patch.setattr(adapter_module, "can_use_a_draft", lambda request: not request.is_dummy)
        patch.setattr(adapter_module, "room", lambda request: request.py_max_new_tokens)
    elif rule == "serve dummies":
        patch.setattr(adapter_module, "can_use_a_draft", lambda request: True)
    elif rule == "share the list":
        patch.setattr(adapter_module, "list", lambda draft: draft, raising=False)
    else:
        assert rule == "none"


def one_of_each(executor):
    """Serve all kinds of requests at once, and compare what was counted to the last token."""
    off = executor.add([7, 3, 1], 20, py_disable_speculative_decoding=True)
    served = serve(executor, [(prompt, 30) for prompt in prompts(6)])
    assert off.output == executor.target.text([7, 3, 1], 20)
    counters = check_counts(executor)
    assert counters.num_faults == 0
    assert counters.num_requests == beyond_prefill(served)
    assert 0.9 < counters.acceptance_rate <= 1


RULES = [
    "pad early", "leave a tuple", "keep the preset", "replace dummies", "one too many",
    "forget free", "ignore no pages", "serve dummies", "share the list", "none",
]  # fmt: skip


@pytest.mark.parametrize("generation", ["B", "F"], indirect=True)
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(make_llm, monkeypatch, rule):
    executor = make_llm("oracle", 4).executor(
        has_pages=lambda request, iteration: (request.py_request_id + iteration) % 4 > 0,
        has_dummies=True,
    )
    broken_rule(rule, monkeypatch)
    if rule == "none":
        one_of_each(executor)
        return
    with pytest.raises((CorruptedError, AssertionError, AttributeError)):
        one_of_each(executor)


def test_prediction_has_no_way_in():
    """Requests cannot carry their expected output here; the proposer itself is served."""
    assert not adapter_module.PROVIDES
    assert not PluginManager().get("prediction").spec.needs
