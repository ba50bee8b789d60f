"""Two tensor-parallel ranks draft the same; a proposer that does not is found out."""

from __future__ import annotations

import logging
import time
from logging.handlers import MemoryHandler

import pytest
from harness import PROMPTS, sampling, strategy_for, thorough_on_v2
from testproposers import ByRank, Switch
from tinymodel import make_tiny_model

from specplug import PluginManager
from specplug.config import Settings
from specplug.length_control import LengthControl

pytestmark = thorough_on_v2
BUILT_IN = ("ngram", "prompt_lookup", "suffix", "prediction", "lookahead", "cascade")
PARAMS = {"max_tokens": 40, "ignore_eos": True}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "two ranks"
    return make_tiny_model(path, hidden_size=256, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def answers(start, model):
    """What one rank says to prompts that repeat what it likes to say."""
    engine = start(model)
    first = engine.generate(PROMPTS, sampling(PARAMS))
    prompts = [answer.prompt + answer.tokens[:20] * 2 for answer in first]
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling(PARAMS))


@pytest.fixture(scope="module")
def two_ranks(answers, start, model, one_core_each):
    settings = {"check_rank_agreement": True, "max_consecutive_faults": 10**9}
    return start(model, "switch", 4, settings, **TWO)


@pytest.fixture(scope="module")
def one_core_each():
    from vllm import envs

    # Read once otherwise, and the engine with one rank has been started already.
    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


def on_each_rank(engine, function):
    return engine.llm.collective_rpc(function)


def switch_to(make):
    def switch(worker):
        Switch.to(make)
        worker.log = MemoryHandler(1000, flushLevel=logging.CRITICAL)
        logging.getLogger("specplug.backends.vllm.ranks").addHandler(worker.log)
        check = adapter_of(worker).ranks
        check.num_steps = check.num_differing = 0

    return switch


def adapter_of(worker):
    runner = worker.model_runner
    ours = getattr(runner, "drafter", None) or runner.speculator
    return ours._adapter


def state(worker):
    adapter = adapter_of(worker)
    runtime, check = adapter.runtime, adapter.ranks
    return {
        "rank": runtime.engine.rank,
        "world_size": runtime.engine.world_size,
        "alive": runtime.num_requests,
        "drafted": runtime.counters.num_draft_tokens,
        "accepted": runtime.counters.num_accepted_tokens,
        "steps": check.num_steps,
        "differing": check.num_differing,
    }


def said(worker):
    return [record.getMessage() for record in worker.log.buffer]


def served(engine, make, answers):
    on_each_rank(engine, switch_to(make))
    before = on_each_rank(engine, state)
    prompts = [{"prompt_token_ids": answer.prompt} for answer in answers]
    outputs = engine.generate(prompts, sampling(PARAMS))
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    first, second = on_each_rank(engine, state)
    assert (first["rank"], second["rank"], first["world_size"]) == (0, 1, 2)
    assert first["alive"] == second["alive"] == 0
    assert first["steps"] == second["steps"] > 10
    assert {**first, "rank": 1} == second
    return first["drafted"] - before[0]["drafted"], first["differing"]


@pytest.mark.parametrize("name", [*BUILT_IN, "random", "oracle", "nonsense"])
def test_both_ranks_draft_the_same_and_the_text_is_that_of_one(two_ranks, answers, name):
    drafted, differing = served(two_ranks, strategy_for(name, answers), answers)
    assert differing == 0
    assert drafted > 0


def decide_lengths(worker):
    """Let the runtime of this rank cut drafts; the second rank's clock runs ten times as fast."""
    runtime = adapter_of(worker).runtime
    runtime.whole = runtime.length
    speed = 1 + 9 * runtime.engine.rank
    runtime.length = LengthControl(
        runtime.engine, Settings(), PluginManager(), clock=lambda: speed * time.perf_counter()
    )


def whole_drafts_again(worker):
    runtime = adapter_of(worker).runtime
    costs, runtime.length = runtime.length.costs, runtime.whole
    return costs.costs(4), costs.learnt()


def test_both_ranks_choose_the_same_lengths_though_their_clocks_differ(two_ranks, answers):
    on_each_rank(two_ranks, decide_lengths)
    drafted, differing = served(two_ranks, strategy_for("suffix", answers), answers)
    first, second = on_each_rank(two_ranks, whole_drafts_again)
    assert drafted > 0
    assert differing == 0
    assert first[0] == second[0], "the second decides by what the first has measured"
    assert second[1].steps != first[1].steps


def test_drafts_that_depend_on_the_rank_are_found_and_dropped(two_ranks, answers):
    drafted, differing = served(two_ranks, ByRank, answers)
    assert differing > 20
    assert drafted == 0
    first, second = on_each_rank(two_ranks, said)
    assert len(first) == 10 and second == [], "one rank says so, and not at every step"
    for words in ("rank 0 drafted [20]", "rank 1 drafted [21]", "more than the tokens"):
        assert words in first[0]
