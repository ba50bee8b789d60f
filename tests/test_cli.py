"""The command line: what ``list`` shows, how errors look, and what starting it loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import specplug
from specplug import ProposerSpec, cli

ROOT = Path(__file__).parent.parent

invoke = CliRunner().invoke


def listed(*arguments):
    result = invoke(cli.app, ["list", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_version():
    assert invoke(cli.app, ["--version"]).output.strip() == f"specplug {specplug.__version__}"


def test_list_json_has_stable_keys():
    found = json.loads(listed("--json"))
    assert list(found) == [
        "version", "proposers", "length_policies", "backends", "conflicts", "blocked", "problems"
    ]  # fmt: skip
    assert [policy["name"] for policy in found["length_policies"]] == [
        "adaptive", "fixed", "match_scaled"
    ]  # fmt: skip
    for proposer in found["proposers"]:
        assert list(proposer) == ["name", "summary", "origin", "needs", "options"]
        assert list(proposer["origin"]) == ["distribution", "version", "entry"]
        for option in proposer["options"]:
            assert list(option) == ["name", "type", "default", "description"]
    for backend in found["backends"]:
        assert list(backend) == ["name", "engine", "version"]


def test_list_shows_options_with_type_and_default():
    text = listed()
    assert "  ngram  specplug" in text
    assert "min_n: int = 2  The shortest match" in text
    assert "prefer: 'recent' | 'earliest' = 'recent'" in text  # brackets are no markup
    assert "Left out" not in text


def test_list_shows_needs(install):
    spec = "ProposerSpec(name='needy', factory='x:y', needs=frozenset({Capability.LOGITS}))"
    source = f"from specplug import Capability, ProposerSpec\nSPEC = {spec}\n"
    install("needy", entries={"needy": "needy_module:SPEC"}, needy_module=source)
    assert "needs: logits" in listed()


def test_list_shows_what_was_left_out_and_why(plugins_left_out):
    found = json.loads(listed("--json"))
    assert [origin["distribution"] for origin in found["conflicts"]["twice"]] == ["first", "second"]
    assert [origin["distribution"] for origin in found["blocked"]] == ["unwanted"]
    [problem] = found["problems"]
    assert problem["origin"] == {"distribution": "broken", "version": "1.0", "entry": "entry"}
    assert problem["reason"] == "ZeroDivisionError: division by zero"
    text = listed()
    assert "conflict: 'twice' is claimed by first 1.0 (twice) and second 1.0 (twice)" in text
    assert "blocked: unwanted 1.0 (entry)" in text
    assert "broken 1.0 (entry): ZeroDivisionError: division by zero" in text


def test_an_engine_is_found_by_its_distribution(install, monkeypatch):
    monkeypatch.setitem(cli.ENGINES, "vllm", ("invented", "invented-cpu"))
    assert "vllm: no engine installed" in listed()
    install("invented-cpu", "9.8", entries={})
    assert "vllm: invented-cpu 9.8 installed" in listed()


def test_every_backend_names_its_engine():
    folders = [path.parent.name for path in ROOT.glob("backends/*/__init__.py")]
    assert sorted(cli.ENGINES) == sorted(folders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--proposer", "ngrm"], "There is no proposer 'ngrm'. Did you mean 'ngram'?"),
        (["demo", "--engine", "nothing"], "nothing"),
        (["demo", "--rounds", "0"], "rounds"),
        (["demo", "--model", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_an_error_is_one_message_and_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["specplug", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err + printed.out


def test_starting_the_command_line_loads_no_engine(run_python):
    loaded = json.loads(
        run_python("import sys, json, specplug.cli; print(json.dumps(sorted(sys.modules)))")
    )
    heavy = {"torch", "vllm", "transformers", "numba", "scipy"}
    assert not {name.partition(".")[0] for name in loaded} & heavy


def test_inventory_takes_plugins_added_by_hand():
    plugins = specplug.PluginManager(discover=False)
    plugins.add(ProposerSpec(name="mine", factory="x:y"), origin="here")
    [mine] = cli.inventory(plugins)["proposers"]
    assert mine["origin"] == {"distribution": "here", "version": "", "entry": "mine"}
