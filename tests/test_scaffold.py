"""``specplug new``: what it writes installs, is found, passes its tests, and is tidy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specplug import cli, scaffold
from specplug.errors import OptionError

ROOT = Path(__file__).parent.parent
TEMPLATES = Path(scaffold.__file__).parent / "templates"
KINDS = {"proposer": [], "length_policy": ["--length-policy"]}
SEEN = "import specplug, json; print(json.dumps(specplug.cli.inventory(specplug.PluginManager())))"


def run(*command, cwd=None, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_installs_and_passes_its_tests(tmp_path, kind):
    folder, site = tmp_path / "fancy-thing", tmp_path / "site"
    result = CliRunner().invoke(
        cli.app, ["new", "fancy-thing", "--folder", str(folder), *KINDS[kind]]
    )
    assert result.exit_code == 0, result.output
    assert f"pip install --editable '{folder}[test]' && pytest {folder}" in result.output

    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--target", str(site), str(folder),
    )  # fmt: skip
    paths = os.pathsep.join([str(site), str(ROOT)])
    listed = json.loads(run(sys.executable, "-c", f"import specplug.cli; {SEEN}", PYTHONPATH=paths))
    found = [
        one
        for one in listed["proposers"] + listed["length_policies"]
        if one["origin"]["distribution"] == "fancy-thing"
    ]
    assert [one["name"] for one in found] == ["fancy_thing"]
    assert found[0]["summary"]

    tested = run(
        sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), str(folder / "tests"),
        PYTHONPATH=paths,
    )  # fmt: skip
    assert " passed" in tested
    assert "skipped" not in tested


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_tidy(tmp_path, kind):
    folder = scaffold.new_package("fancy_thing", kind, tmp_path / "new")
    files = [path for path in folder.rglob("*") if path.is_file()]
    text = "".join(f"{path}\n{path.read_text()}" for path in files).replace("-", "_").lower()
    assert "fancy_thing" in text
    assert "my_plugin" not in text
    assert "myplugin" not in text
    rules = "--select=E,F,W,I,UP,B,C4,SIM,RET,PTH,RUF"
    ruff = sys.executable, "-m", "ruff"
    run(*ruff, "check", "--isolated", "--line-length=100", rules, cwd=folder)
    run(*ruff, "format", "--isolated", "--line-length=100", "--check", cwd=folder)


def test_by_default_it_goes_into_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert scaffold.new_package("two_words", "proposer") == Path("two-words")
    assert (tmp_path / "two-words" / "src" / "two_words" / "proposer.py").exists()
    assert (
        "class TwoWords(Proposer)"
        in (tmp_path / "two-words" / "src" / "two_words" / "proposer.py").read_text()
    )


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("Fancy", "proposer", "'Fancy' cannot be the name of a proposer"),
        ("two--words", "proposer", "cannot be the name of a proposer"),
        ("words-", "length_policy", "cannot be the name of a length policy"),
        ("1st", "proposer", "cannot be the name of a proposer"),
        ("../up", "proposer", "cannot be the name of a proposer"),
        ("", "proposer", "cannot be the name of a proposer"),
        ("class", "proposer", "'class' cannot be the name of a package"),
        ("json", "proposer", "'json' cannot be the name of a package"),
        ("specplug", "proposer", "'specplug' cannot be the name of a package"),
        ("prompt-lookup", "proposer", "There is a proposer 'prompt_lookup' already, of specplug"),
        ("fixed", "length_policy", "There is a length policy 'fixed' already, of specplug"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path, name, kind, problem):
    with pytest.raises(OptionError, match=problem):
        scaffold.new_package(name, kind, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_not_touched(tmp_path):
    with pytest.raises(OptionError, match="is there already"):
        scaffold.new_package("fancy", "proposer", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_templates_are_package_data():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["specplug.scaffold"]
    shipped = {path for pattern in patterns for path in TEMPLATES.parent.glob(pattern)}
    assert shipped == {path for path in TEMPLATES.rglob("*") if path.is_file()}
