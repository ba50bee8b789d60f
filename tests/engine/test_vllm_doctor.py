"""The doctor with vLLM's real parser and config; no engine is started."""

import json
import os
import subprocess
import sys

import pytest
from harness import RUNNER
from typer.testing import CliRunner

from specplug import cli

pytestmark = pytest.mark.skipif(RUNNER != "v1", reason="configs only; what V2 needs is set here")


@pytest.fixture
def doctor(tiny_model):
    """Run the command on the tiny model; return the exit status and the checks by name."""

    def run(proposer="ngram", k=4, *more, settings=None):
        speculative = {"model": f"specplug.vllm.{proposer}", "num_speculative_tokens": k}
        result = CliRunner().invoke(
            cli.app,
            [
                "doctor", "--json", str(tiny_model), "--max-model-len", "256",
                "--speculative-config", json.dumps(speculative),
                "--additional-config", json.dumps({"specplug": settings or {}}), *more,
            ],
        )  # fmt: skip
        report = json.loads(result.stdout)
        return result.exit_code, {check["name"]: check for check in report["checks"]}

    return run


def problems(checks):
    return [name for name, check in checks.items() if check["status"] == "problem"]


def test_all_is_well(doctor):
    status, checks = doctor()
    assert status == 0
    assert not problems(checks)
    assert {name for name, check in checks.items() if check["status"] == "warning"} == set()
    assert "ngram, of specplug" in checks["proposer"]["found"]
    assert "for a request of 256 tokens" in checks["memory"]["found"]
    assert "Triton" in checks["model runner"]["found"]
    assert checks["model runner"]["found"].startswith("V1: ")
    assert "pipeline parallelism" not in checks


def test_the_real_command_prints_json_alone(tiny_model):
    done = subprocess.run(
        [
            sys.executable, "-c", "from specplug.cli import main; main()", "doctor", "--json", "--",
            str(tiny_model), "--speculative-config.model", "specplug.vllm.suffix",
            "--speculative-config.num_speculative_tokens", "3", "-tp", "1",
        ],
        capture_output=True, text=True, check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG"},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["problems"] == 0
    assert "DEBUG" in done.stderr, "vLLM does log"


@pytest.mark.parametrize(
    ("proposer", "k", "settings", "name", "words"),
    [
        ("ngrm", 4, {}, "proposer", ["[unknown-proposer]", "Did you mean 'ngram'?"]),
        ("ngram", 4, {"options": {"mn_n": 3}}, "proposer", ["[bad-option]", "'mn_n'"]),
        ("ngram", 4, {"min_n": 3}, "arguments", ["[bad-option]", "unknown option 'min_n'"]),
        ("ngram", 129, {}, "draft length", ["is 129", "from 1 to 128"]),
        ("ngram", 0, {}, "arguments", ["greater than 0"]),
    ],
)
def test_what_the_user_gets_wrong_about_the_proposer(doctor, proposer, k, settings, name, words):
    status, checks = doctor(proposer, k, settings=settings)
    assert status == 1
    assert problems(checks) == [name]
    for word in words:
        assert word in checks[name]["found"]


def test_several_things_wrong_are_all_said(doctor):
    _, checks = doctor("ngrm", 129)
    assert problems(checks) == ["proposer", "draft length"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-length-of-it", "5"], "unrecognized arguments: --max-model-length-of-it"),
        (["--async-scheduling"], "async scheduling is only supported"),
        (["--max-model-len", "many"], "many"),
    ],
)
def test_what_vllm_refuses_is_said_in_its_words(doctor, arguments, words):
    status, checks = doctor("ngram", 4, *arguments)
    assert status == 1
    assert problems(checks) == ["arguments"]
    assert words in checks["arguments"]["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No speculation"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'], "'ngram'"),
    ],
)
def test_other_speculation_is_not_specplugs(tiny_model, arguments, words):
    result = CliRunner().invoke(cli.app, ["doctor", "--json", str(tiny_model), *arguments])
    check = json.loads(result.stdout)["checks"][-1]
    assert result.exit_code == 1
    assert (check["name"], check["status"]) == ("selection", "problem")
    assert words in check["found"]


@pytest.fixture
def exclude_plugin(monkeypatch):
    """Do what VLLM_PLUGINS does before vLLM loads plugins, which it does once in a process."""
    from vllm.config import VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    def exclude(plugins):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__.__wrapped__)

    return exclude


@pytest.mark.parametrize("plugins", ["other", "other, specplug"])  # vLLM keeps the space
@pytest.mark.parametrize(("runner", "status"), [("auto", "warning"), ("v2", "problem")])
def test_the_plugin_may_be_excluded(doctor, exclude_plugin, plugins, runner, status):
    exclude_plugin(plugins)
    _, checks = doctor(settings={"runner": runner})
    assert checks["general plugin"]["status"] == status
    assert checks["model runner"]["found"].startswith("V1: specplug's general plugin is not")


def test_the_plugin_may_be_named(doctor, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,specplug")
    assert doctor()[1]["general plugin"]["status"] == "ok"


@pytest.mark.parametrize("excluded", [False, True])
def test_pipeline_parallelism(doctor, exclude_plugin, excluded):
    if excluded:
        exclude_plugin("other")
    status, checks = doctor("ngram", 4, "-pp", "2")
    assert status == 1
    assert problems(checks) == ["arguments"]
    assert "pipeline_parallel_size is 2" in checks["arguments"]["found"]


def test_v1_by_force(doctor, monkeypatch):
    status, checks = doctor(settings={"runner": "v1"})
    assert status == 0
    assert checks["model runner"]["found"] == "V1: the setting 'runner' is 'v1'."
    assert "settings" not in checks
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    _, checks = doctor(settings={"runner": "v1"})
    assert "VLLM_USE_V2_MODEL_RUNNER is 1" in checks["settings"]["found"]


def test_v2_by_force_without_triton(doctor):
    status, checks = doctor(settings={"runner": "v2"})
    assert status == 1
    assert checks["arguments"]["found"] == "Model Runner V2 requires Triton."


def test_a_default_that_vllm_refuses_with_speculation(doctor):
    status, checks = doctor("ngram", 4, "--override-generation-config", '{"min_p": 0.1}')
    assert status == 0
    assert checks["sampling"]["status"] == "warning"


def test_a_setting_without_effect(doctor):
    _, checks = doctor(settings={"check_rank_agreement": True})
    assert "check_rank_agreement" in checks["settings"]["found"]


@pytest.mark.parametrize(("settings", "status"), [({}, "problem"), ({"x": True}, "warning")])
def test_an_unknown_release(doctor, monkeypatch, settings, status):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    _, checks = doctor(settings={"allow_untested_engine": True} if settings else {})
    assert checks["release"]["status"] == status


def test_a_hook_that_differs(doctor, monkeypatch):
    from specplug.backends.vllm import compat
    from specplug.compat import Hook

    other = Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", ("logits",))
    monkeypatch.setattr(compat, "V1_HOOKS", (other,))
    status, checks = doctor()
    assert status == 1
    assert "expected (logits, …), found (self, logits" in checks["hooks of V1"]["found"]


def test_nothing_of_a_request_is_saved(doctor, tmp_path):
    cache = tmp_path / "cache.npz"
    options = {"cache_file": str(cache), "cache_prompts": True}
    status, checks = doctor("suffix", settings={"options": options})
    assert status == 0
    assert "for a request of 256 tokens" in checks["memory"]["found"]
    assert not cache.exists()
