"""``specplug tune`` on recorded requests, and with a played engine."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from specplug.bench import methods
from specplug.bench.tune import Choice, TuneSettings, run_tune
from specplug.cli import app
from specplug.cli_measure import Goal
from specplug.replay.run import Candidate


def tune(*arguments):
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    return result.exit_code, result.stdout


@pytest.fixture
def records(tmp_path):
    """Write requests whose output repeats the prompt, or nothing at all."""

    def write(repeats):
        rows = []
        for i in range(8):
            prompt = list(range(100 * i, 100 * i + 60))
            output = prompt[5:55] if repeats else list(range(5000 + 60 * i, 5050 + 60 * i))
            rows.append({"prompt_token_ids": prompt, "output_token_ids": output})
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_copies_are_worth_it_and_the_flags_say_how(records):
    status, text = tune(records(repeats=True), "--proposer", "suffix", "--length-policy", "fixed")
    assert status == 0
    assert "For latency (1 at a time, 0.005 of a step per token): suffix, K=16, fixed" in text
    [flags] = [line for line in text.splitlines() if "--speculative-config" in line]
    assert '"model": "specplug.vllm.suffix", "num_speculative_tokens": 16' in flags
    assert '{"specplug": {"length_policy": "fixed"}}' in flags


def test_the_flags_are_those_of_the_engine(records):
    _, text = tune(records(repeats=True), "--engine", "transformers")
    assert "custom_generate=specplug.transformers.generate" in text


def test_free_text_is_left_alone_and_why(records):
    status, text = tune(records(repeats=False))
    assert status == 1
    assert "Leave it off (1 at a time, 0.005 of a step per token): low acceptance" in text


def test_a_loaded_engine_is_left_alone_and_why(records):
    status, text = tune(
        records(repeats=True), "--length-policy", "fixed", "--goal", "throughput",
        "--token-cost", "100",
    )  # fmt: skip
    assert status == 1
    assert "Leave it off (16 at a time" in text
    assert "compute-bound" in text


def test_a_choice_is_a_method_with_its_policy():
    choice = Choice(Candidate("ngram", {"min_n": 2}), 4, "fixed")
    assert str(choice) == "ngram:min_n=2, K=4, fixed"
    method = choice.method(methods.imported("vllm"), methods.PluginManager())
    assert '"num_speculative_tokens": 4' in method.flags
    assert '"length_policy": "fixed", "options": {"min_n": 2}' in method.flags


# -- a played engine -------------------------------------------------------------------------


@pytest.fixture
def live(played, make_console, tmp_path):
    """Tune with the played engine; return what was decided, and the text."""

    def start(**changes):
        standard = {
            "files": [],
            "engine": "played",
            "goal": Goal.LATENCY,
            "proposers": ["ngram", "suffix"],
            "num_speculative_tokens": [8, 2, 4],
            "length_policies": ["adaptive", "fixed"],
            "token_cost": 0.0,
            "concurrency": None,
            "tokenizer": None,
            "model": str(tmp_path),
            "data": ["bundled"],
            "engine_arguments": {"dtype": "half"},
            "output": tmp_path / "tuned",
        }
        console = make_console()
        worth_it = run_tune(TuneSettings(**{**standard, **changes}), console)
        return worth_it, console.file.getvalue()

    return start


def test_the_engine_is_asked_for_proposer_then_k_then_policy(live, played, monkeypatch):
    monkeypatch.setenv("PLAY_FAST", json.dumps({"name": "suffix"}))
    monkeypatch.setenv("PLAY_FASTER", json.dumps({"k": 2}))
    worth_it, text = live()
    assert worth_it
    asked = [one["speculation"] for one in played() if one["speculation"]]
    assert {(one["name"], one["k"]) for one in asked[:2]} == {("ngram", 4), ("suffix", 4)}
    assert {(one["name"], one["k"]) for one in asked[2:4]} == {("suffix", 2), ("suffix", 8)}
    assert [(one["name"], one["k"], one["length_policy"]) for one in asked[4:]] == [
        ("suffix", 2, "fixed")
    ]
    assert "Keep it: suffix, K=2, adaptive, 8.00x" in text
    assert '--play {"name": "suffix", "k": 2, "length_policy": "adaptive"}' in text


def test_throughput_asks_for_as_many_as_the_engine_serves(live, played):
    live(goal=Goal.THROUGHPUT)
    assert {one["batch_size"] for one in played()} == {4}


def test_an_engine_that_gains_nothing_is_left_alone(live, played, monkeypatch):
    monkeypatch.setenv("PLAY_SPEED", "1.0")
    worth_it, text = live(
        proposers=["ngram"], num_speculative_tokens=[4], length_policies=["fixed"]
    )
    assert not worth_it
    assert "Leave it off" in text
    assert len(played()) == 2
