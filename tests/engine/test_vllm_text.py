"""Greedy text is the engine's own, whatever the proposer does and whatever the request asks for."""

from dataclasses import dataclass

import pytest
from harness import (
    ALL_PROMPTS,
    MAX_MODEL_LEN,
    PROMPTS,
    RUNNER,
    STRATEGIES,
    assert_counters_agree,
    sampling,
    strategy_for,
    thorough_on_v2,
)
from testproposers import ALPHABET, Random, Switch
from traffic import SCHEMA


@dataclass(frozen=True)
class Scenario:
    params: dict
    prompts: tuple = tuple(PROMPTS)
    from_baseline: str = ""  # a parameter that is chosen from the text without any


def ids(length: int) -> dict:
    return {"prompt_token_ids": [ALPHABET[i * 7 % 64] for i in range(length)]}


# Sampling that is as good as greedy, even without top_k, which Triton's interpreter cannot run: in
# the answers to these prompts the likeliest token leads by 0.2 or more in its logit. They are
# short, as vLLM 0.32 on a CPU fails, with no speculation too, where the prefill of a request with
# a seed is split.
CLEAR_PROMPTS = ("42", "Hello world", "42 42")
CERTAIN = {"temperature": 1.0, "top_k": 1} if RUNNER == "v1" else {"temperature": 0.01, "seed": 5}
SCENARIOS = {
    "greedy": Scenario({"max_tokens": 40}),
    "ignore_eos": Scenario({"max_tokens": 60, "ignore_eos": True}),
    "one request": Scenario({"max_tokens": 40}, prompts=(PROMPTS[0],)),
    "one token prompts": Scenario({"max_tokens": 30}, prompts=(ids(1), {"prompt_token_ids": [7]})),
    "one output token": Scenario({"max_tokens": 1}),
    "to the model's length": Scenario(
        {"max_tokens": MAX_MODEL_LEN, "ignore_eos": True},
        prompts=tuple(ids(MAX_MODEL_LEN - left) for left in (1, 2, 3, 4, 5, 6, 17, 40)),
    ),
    "stop string": Scenario({"max_tokens": 30}, from_baseline="stop"),
    "stop token": Scenario({"max_tokens": 30}, from_baseline="stop_token_ids"),
    "min_tokens": Scenario({"max_tokens": 30, "min_tokens": 20}, from_baseline="stop_token_ids"),
    "repetition penalty": Scenario({"max_tokens": 30, "repetition_penalty": 1.3}),
    "presence and frequency penalty": Scenario(
        {"max_tokens": 30, "presence_penalty": 0.8, "frequency_penalty": 0.4}
    ),
    "logprobs": Scenario({"max_tokens": 30, "logprobs": 3}),
    "prompt logprobs": Scenario({"max_tokens": 20, "prompt_logprobs": 2}),
    "bad words": Scenario({"max_tokens": 30}, from_baseline="bad_words"),
    "json schema": Scenario({"max_tokens": 32, "structured_outputs": SCHEMA}),
    "n above 1": Scenario({"max_tokens": 20, "n": 3, **CERTAIN}, prompts=CLEAR_PROMPTS),
    "fixed seed": Scenario({"max_tokens": 20, **CERTAIN, "seed": 7}, prompts=CLEAR_PROMPTS),
    "speculation off for the request": Scenario(
        {"max_tokens": 30, "extra_args": {"specplug_num_speculative_tokens": 0}}
    ),
}


ALL_K = (4, 1, 16)
V2_STRATEGIES_IN_CI = ("suffix", "lookahead", "random", "oracle", "raising", "nonsense")
V2_SCENARIOS_IN_CI = (
    "to the model's length", "stop token", "min_tokens", "json schema", "n above 1",
    "speculation off for the request",
)  # fmt: skip
AT_EVERY_K = ("greedy", "ignore_eos", "to the model's length", "stop token", "json schema")
AT_ONE_K = [name for name in SCENARIOS if name not in AT_EVERY_K]


@pytest.fixture(scope="module")
def baseline(start, tiny_model):
    return start(tiny_model)


@pytest.fixture(
    scope="module",
    params=[ALL_K[0], *(pytest.param(k, marks=thorough_on_v2) for k in ALL_K[1:])],
    ids="K={}".format,
)
def engine(request, baseline, start, tiny_model):
    # After the baseline: the metrics that vLLM reads are those of the engine started last.
    # Strategies that fail on purpose would switch the shared proposer off.
    return start(tiny_model, "switch", request.param, {"max_consecutive_faults": 10**9})


@pytest.fixture(scope="module")
def expected(baseline):
    """The answers without speculation; each scenario is run once."""
    known = {}

    def answer(name):
        if name not in known:
            scenario = SCENARIOS[name]
            params = dict(scenario.params)
            if scenario.from_baseline:
                params[scenario.from_baseline] = chosen(baseline, scenario)
            known[name] = params, baseline.generate(list(scenario.prompts), sampling(params))
        return known[name]

    return answer


def chosen(baseline, scenario):
    """Something the model says a few tokens into its answers, so that it falls into drafts."""
    outputs = baseline.generate(list(scenario.prompts), sampling({"max_tokens": 30}))
    tokens = [output.tokens[at] for output, at in zip(outputs, (7, 9, 12), strict=False)]
    if scenario.from_baseline == "stop_token_ids":
        return tokens
    return [baseline.llm.get_tokenizer().decode([token]).strip() or "e" for token in tokens]


def cases(names):
    """Return scenarios with every strategy; on the slow V2 runner, CI takes a part of them."""
    return [
        pytest.param(name, strategy, marks=() if in_ci(name, strategy) else thorough_on_v2)
        for name in names
        for strategy in STRATEGIES
    ]


def in_ci(name, strategy):
    if name == "greedy":
        return strategy in V2_STRATEGIES_IN_CI
    return name in V2_SCENARIOS_IN_CI and strategy == "oracle"


@pytest.mark.parametrize(("scenario", "strategy"), cases(AT_EVERY_K))
def test_text_is_the_engines_own(engine, expected, scenario, strategy):
    check_text(engine, expected, scenario, strategy)


@pytest.mark.parametrize("engine", ALL_K[:1], indirect=True, ids="K={}".format)
@pytest.mark.parametrize(("scenario", "strategy"), cases(AT_ONE_K))
def test_text_is_the_engines_own_in_other_scenarios(engine, expected, scenario, strategy):
    check_text(engine, expected, scenario, strategy)


def check_text(engine, expected, scenario, strategy):
    params, answers = expected(scenario)
    proposer = Switch.to(strategy_for(strategy, answers))
    engine.reset_counters()

    outputs = engine.generate(list(SCENARIOS[scenario].prompts), sampling(params))

    for output, answer in zip(outputs, answers, strict=True):
        assert output.tokens == answer.tokens
        assert output.text == answer.text
        assert (output.finish_reason, output.stop_reason) == (
            answer.finish_reason,
            answer.stop_reason,
        )
        if answer.logprobs:
            assert_close(output.logprobs, answer.logprobs)
    assert proposer.usage().num_requests == engine.runtime.num_requests == 0
    assert_counters_agree(engine)
    if strategy in ("raising", "nonsense") and scenario == "greedy":
        assert engine.runtime.counters.num_faults > 0


def assert_close(found, wanted):
    for position, reference in zip(found, wanted, strict=True):
        assert position == pytest.approx(reference, abs=1e-3)


def test_a_right_draft_is_used_whole(engine, baseline):
    k = engine.runtime.engine.num_speculative_tokens
    params = sampling({"max_tokens": 1 + 3 * (k + 1), "ignore_eos": True})
    answers = baseline.generate(PROMPTS, params)
    Switch.to(strategy_for("oracle", answers))
    engine.reset_counters()

    # One at a time: where many share a step's token budget, the scheduler shortens drafts.
    outputs = [output for prompt in PROMPTS for output in engine.generate([prompt], params)]

    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    counters = engine.runtime.counters
    assert counters.acceptance_rate == 1.0
    assert counters.mean_acceptance_length == counters.tokens_per_step == k + 1
    assert counters.num_steps == 3 * len(PROMPTS)


def test_a_request_may_lower_k(engine, expected):
    params, answers = expected("ignore_eos")
    Switch.to(strategy_for("oracle", answers))
    engine.reset_counters()
    params = {**params, "extra_args": {"specplug_num_speculative_tokens": 2}}

    outputs = engine.generate(PROMPTS, sampling(params))

    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    k = min(2, engine.runtime.engine.num_speculative_tokens)
    assert engine.runtime.counters.acceptance_rate == 1.0
    assert k + 0.5 < engine.runtime.counters.mean_acceptance_length <= k + 1


@pytest.mark.parametrize(
    "value",
    ["4", None, *(pytest.param(one, marks=thorough_on_v2) for one in (-1, True, 1.5, [1]))],
)
def test_bad_request_options_are_left_out_and_said_so(engine, expected, caplog, value):
    params, answers = expected("greedy")
    Switch.to(Random)
    extra = {"specplug_num_speculative_tokens": value, "somebody_elses": 1}

    outputs = engine.generate(PROMPTS, sampling({**params, "extra_args": extra}))

    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    told = [record for record in caplog.records if "without its options" in record.getMessage()]
    assert len(told) == (0 if value is None else len(PROMPTS))


def test_aborted_requests_leave_nothing_behind(engine, baseline):
    params = sampling({"max_tokens": 30, "ignore_eos": True})
    answers = baseline.generate(ALL_PROMPTS, params)
    proposer = Switch.to(Random)
    llm_engine = engine.llm.llm_engine
    for i, prompt in enumerate(ALL_PROMPTS):
        llm_engine.add_request(str(i), prompt, params)
    finished = {}
    for step in range(1_000):
        for output in llm_engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        if step == 4:
            llm_engine.abort_request(["0", "2", "6"])  # two of them running, one waiting
        if not llm_engine.has_unfinished_requests():
            break
    engine.settle()

    for i, answer in enumerate(answers):
        if str(i) not in ("0", "2", "6"):
            assert finished[str(i)] == answer.tokens
    assert proposer.begun == len(ALL_PROMPTS) - 1
    assert proposer.alive == [] and engine.runtime.num_requests == 0
