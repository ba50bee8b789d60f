"""The code blocks of the documentation: what can run is run, the rest is at least parsed.

A block with ``title="Needs an engine"`` is compiled only; one whose title is a file's name becomes
that file, for the blocks behind it.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from sybil import Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from typer.testing import CliRunner

from specplug import PluginManager, cli
from specplug.backends.vllm.settings import VllmSettings
from specplug.config import validate

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "specplug-pair-lookup"
TUTORIAL = ROOT / "docs" / "tutorial" / "first-proposer.md"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]

ENGINE = "Needs an engine"
INFO = re.compile(r"(?P<info>[^\n]*)\n")
TITLED = re.compile(r'(?P<language>\w+)(?: title="(?P<title>[^"]+)")?')
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def fences(document):
    """Yield language, title (perhaps None) and region of every fenced block."""
    for region in RawFencedCodeBlockLexer(INFO)(document):
        info = TITLED.fullmatch(region.lexemes["info"].strip())
        assert info, f"{document.path}: what is a block of {region.lexemes['info']!r}?"
        yield info["language"], info["title"], region


def blocks(document):
    """Parse for sybil: every fenced block with what checks its language."""
    for language, title, region in fences(document):
        source = region.lexemes["source"]
        if title and title != ENGINE:
            yield Region(region.start, region.start + 1, source, write_to(title))
        check = compiled if (language, title) == ("python", ENGINE) else CHECKS[language]
        if check:
            yield Region(region.start + 1, region.end, source, check)


def write_to(name):
    return lambda example: Path(name).write_text(str(example.parsed)) and None


def compiled(example):
    compile(str(example.parsed), example.path, "exec")


def session(example):
    test = doctest.DocTestParser().get_doctest(
        str(example.parsed), example.namespace, "session", example.path, example.line
    )
    doctest.DebugRunner().run(test)  # raises at the first difference


def json_lines(example):
    try:
        json.loads(str(example.parsed))
    except ValueError:
        for line in str(example.parsed).splitlines():
            json.loads(line)


def commands(text):
    """Yield (command, what it printed) of a console block."""
    command, printed = "", []
    for line in text.splitlines():
        if not command_is_whole(command):
            command += line + "\n"
        elif line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = line[2:] + "\n", []
        else:
            printed.append(line)
    yield command, printed


def command_is_whole(command):
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\\n")


def words(command):
    """Yield the words of each part of a pipe or list of commands."""
    part = []
    for word in shlex.split(command.replace("\\\n", " "), comments=True):
        if word in ("|", "&&"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def console(example):
    for command, printed in commands(str(example.parsed)):
        for first, *rest in words(command):
            if first in PROGRAMS:
                PROGRAMS[first](rest)
            if first == "specplug" and Path(example.path) == TUTORIAL:
                runs_as_shown(rest, printed)


def specplug_takes(arguments):
    group = typer.main.get_command(cli.app)
    name, *rest = map(existing, arguments)
    group.commands[name].make_context(name, rest, parent=group.context_class(group))


def existing(argument):
    """Make the records that a command names, empty, where it has none."""
    path = Path(Path(argument).name)
    if path.suffix != ".jsonl":
        return argument
    path.touch()
    return str(path)


def vllm_takes(arguments):
    options = dict(pairwise(arguments))
    flag = json.loads(options["--speculative-config"])
    settings = json.loads(options.get("--additional-config", "{}")).get("specplug", {})
    name = flag["model"].removeprefix("specplug.vllm.")
    assert flag.keys() == {"model", "num_speculative_tokens"}
    spec = PluginManager().get(name).spec
    validate(spec.options, validate(VllmSettings, settings, "the flag").options, name)


def pip_takes(arguments):
    for extras in re.findall(r"specplug\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(EXTRAS)


def make_takes(arguments):
    assert set(arguments) <= TARGETS


def curl_takes(arguments):
    for argument in arguments:
        if argument.startswith("{"):
            json.loads(argument)


def runs_as_shown(arguments, printed):
    """Run the command; its lines begin as shown (times, further on, are others)."""
    if arguments[0] not in ("list", "replay"):
        return
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    found = [line.split()[:6] for line in result.output.splitlines()]
    for line in printed:
        if re.search(r"\w", line):
            assert line.split()[:6] in found, result.output


PROGRAMS = {
    "specplug": specplug_takes,
    "vllm": vllm_takes,
    "pip": pip_takes,
    "make": make_takes,
    "curl": curl_takes,
}
CHECKS = {
    "python": PythonEvaluator(),
    "pycon": session,
    "console": console,
    "json": json_lines,
    "yaml": lambda example: yaml.safe_load(str(example.parsed)) and None,
    "toml": lambda example: tomllib.loads(str(example.parsed)) and None,
    "promql": None,  # tests/test_prometheus.py
    "text": None,
}


def check(page):
    for example in Sybil([blocks]).parse(page).examples():
        example.evaluate()


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks(page):
    check(page)


def test_the_tutorial_shows_the_example_package():
    document = Sybil([blocks]).parse(TUTORIAL)
    shown = {title: str(region.lexemes["source"]) for _, title, region in fences(document)}
    files = {path.name for path in EXAMPLE.iterdir() if path.suffix in (".py", ".toml")}
    assert files <= set(shown)
    assert {name: shown[name] for name in files} == {
        name: (EXAMPLE / name).read_text() for name in files
    }


@pytest.mark.parametrize(
    "block",
    [
        "python\n1 / 0",
        'python title="Needs an engine"\n1 +',
        "pycon\n>>> 1 + 1\n3",
        'json\n{"a": 1}\n{b}',
        "yaml\na: [",
        "toml\na =",
        "unheard-of\n",
        "python hl_lines=1\n",
        "console\n$ specplug lst",
        "console\n$ specplug replay a.jsonl --propser x",
        "console\n$ specplug demo \\\n    --engine none",
        "console\n$ make everything",
        "console\n$ pip install 'specplug[nothing]'",
        """console
$ vllm serve M \\
    --speculative-config '{"model": "specplug.vllm.sufix", "num_speculative_tokens": 4}'""",
        "console\n$ true && curl -d '{a}'",
    ],
)
def test_mistakes_are_noticed(tmp_path, block):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{block}\n```\n")
    with pytest.raises((Exception, SystemExit)):
        check(page)
