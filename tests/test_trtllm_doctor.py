"""``specplug doctor --engine trtllm``: what it finds before TensorRT-LLM starts."""

from __future__ import annotations

import json

import pytest
from trtllm_double import install
from typer.testing import CliRunner

from specplug import cli
from specplug.backends.trtllm import doctor as trtllm_doctor

YAML = """
speculative_config:
  decoding_type: User_Provided
  max_draft_len: {k}
  drafter: {drafter}
"""


@pytest.fixture
def doctor(monkeypatch, trtllm_model, tmp_path):
    """Run the doctor on arguments of trtllm-serve beside a YAML file."""
    install("C", monkeypatch)
    there = {"engine": "tensorrt-llm", "version": "1.2.1"}
    monkeypatch.setattr(cli, "installed", lambda backend: there)
    monkeypatch.setattr(trtllm_doctor.metadata, "version", lambda name: "1.2.1")
    monkeypatch.setattr(trtllm_doctor, "in_source", lambda hook: None)

    def run(*arguments, drafter="specplug:suffix", k=6, hook=("--custom_module_dirs", "d")):
        file = tmp_path / "speculation.yaml"
        file.write_text(YAML.format(drafter=drafter, k=k))
        given = [str(trtllm_model), "--config", str(file), *hook, *arguments]
        command = ["doctor", "--engine", "trtllm", "--json", "--", *given]
        result = CliRunner().invoke(cli.app, command)
        found = json.loads(result.stdout)
        return result.exit_code, {check["name"]: check for check in found["checks"]}

    return run


def test_all_is_well(doctor):
    status, checks = doctor("--max_batch_size", "16")
    assert status == 0
    assert checks["release"]["status"] == checks["hooks"]["status"] == "ok"
    assert checks["proposer"]["found"].startswith("suffix, of specplug")
    assert "for 16 of them" in checks["memory"]["found"]
    assert checks["engine"]["status"] == "warning"  # the overlap scheduler


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"drafter": "specplug:sufix"}, "proposer", "There is no proposer 'sufix'"),
        ({"k": 0}, "proposer", "num_speculative_tokens is 0"),
        ({"drafter": "null"}, "selection", "No proposer of specplug's"),
        ({"hook": ()}, "selection", "no --custom_module_dirs"),
        ({"drafter": "{specplug: suffix, opt: 1}"}, "selection", "unknown keys: opt"),
    ],
)
def test_problems_in_the_file(doctor, changes, name, words):
    status, checks = doctor(**changes)
    assert status == 1
    assert words in checks[name]["found"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--pp_size", "2"), "pipeline_parallel_size"), (("--max_beam_width", "2"), "max_beam_width")],
)
def test_problems_in_the_arguments(doctor, arguments, words):
    status, checks = doctor(*arguments)
    assert status == 1
    assert words in checks["arguments"]["found"]


def test_no_model(doctor):
    result = CliRunner().invoke(cli.app, ["doctor", "--engine", "trtllm", "--json", "--", "--x=1"])
    assert result.exit_code == 1
    assert "No model is given" in result.stdout


def test_a_release_out_of_range_and_a_hook_that_differs(doctor, monkeypatch):
    monkeypatch.setattr(trtllm_doctor.metadata, "version", lambda name: "0.20.0")
    monkeypatch.setattr(trtllm_doctor, "in_source", lambda hook: "no such module")
    status, checks = doctor()
    assert status == 1
    assert "0.20.0 is installed" in checks["release"]["found"]
    assert "no such module" in checks["hooks"]["found"]


def test_without_the_engine():
    result = CliRunner().invoke(cli.app, ["doctor", "--engine", "trtllm"])
    assert result.exit_code == 1
    assert "trtllm is not installed" in result.stdout
