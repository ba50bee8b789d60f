"""The doctor without an engine: report, JSON, exit status, and what a proposer holds."""

import io
import json
import os
import sys

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from specplug import Options, PluginManager, Proposer, ProposerSpec, cli, doctor
from specplug.doctor import Check, Diagnosis, Status, diagnose, refused
from specplug.errors import OptionError
from specplug.probe import measured
from specplug.proposer import Capability, DeviceProposer, Usage

FINE = Check("release", Status.OK, "[bold] is no markup.")
ODD = Check("sampling", Status.WARNING, "It is odd.", "Change it.")
WRONG = Check("proposer", Status.PROBLEM, "There is none.", "Name one.")


@pytest.fixture
def backend(install, monkeypatch):
    """Put an ``examine`` in the place of the backend's; return how to say what it yields."""
    monkeypatch.setitem(cli.ENGINES, "vllm", ("invented",))
    install("invented", "9.8", entries={})

    def set_examine(*checks, error=None, said=""):
        def examine(arguments):
            os.write(1, said.encode())
            print(said)
            seen.append(list(arguments))
            yield from checks
            if error:
                raise error

        seen = []
        module = type(sys)("specplug.backends.vllm.doctor")
        module.examine = examine
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return seen

    return set_examine


def run(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def found(*checks):
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("checks", "status", "summary"),
    [
        ([FINE], 0, "no problems, no warnings"),
        ([FINE, ODD], 0, "no problems, 1 warning"),
        ([FINE, ODD, WRONG, WRONG], 1, "2 problems, 1 warning"),
    ],
)
def test_exit_status_and_summary(backend, checks, status, summary):
    backend(*checks)
    result = run("model")
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1] == summary


def test_the_report_shows_what_was_found_and_what_to_do():
    printed = io.StringIO()
    doctor.show(Diagnosis("vllm", [], [FINE, WRONG]), Console(file=printed, width=80))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert lines == [
        "ok       release   [bold] is no markup.",
        "problem  proposer  There is none.",
        "                   Name one.",
        "",
        "1 problem, no warnings",
    ]


def test_json_has_stable_keys_and_nothing_beside_it(backend, capfd):
    backend(ODD, WRONG, said="the engine says something")
    result = run("--json", "model")
    said = json.loads(result.stdout)
    assert result.exit_code == 1
    assert list(said) == ["version", "engine", "arguments", "problems", "warnings", "checks"]
    assert said["engine"] == "vllm"
    assert said["arguments"] == ["model"]
    assert (said["problems"], said["warnings"]) == (1, 1)
    assert said["checks"][-1] == {
        "name": "proposer", "status": "problem", "found": "There is none.", "advice": "Name one.",
    }  # fmt: skip
    assert capfd.readouterr().out == ""


ARGUMENTS = ["model", "-tp", "2", "--speculative-config", '{"model": "m"}', "--no-async-scheduling"]


@pytest.mark.parametrize("before", [[], ["--"]])
def test_the_engine_gets_its_arguments_as_they_are(backend, before):
    seen = backend()
    assert run("--json", *before, *ARGUMENTS).exit_code == 0
    assert seen == [ARGUMENTS]


def test_behind_two_dashes_everything_is_the_engines(backend):
    seen = backend()
    run("--", "--json", "--engine", "other")
    assert seen == [["--json", "--engine", "other"]]


def test_without_arguments_there_are_none(backend):
    seen = backend()
    run()
    assert seen == [[]]


def test_wrong_usage_is_status_2(backend):
    backend()
    assert run("--engine", "nothing").exit_code == 2


def test_a_look_that_fails_is_a_problem_after_what_was_found(backend):
    backend(FINE, error=KeyError("a name"))
    result = run("--json")
    checks = json.loads(result.stdout)["checks"]
    assert result.exit_code == 1
    assert [check["name"] for check in checks[-2:]] == ["release", "examination"]
    assert checks[-1]["found"] == "KeyError: 'a name'"


def test_no_engine_is_a_problem_and_is_not_examined(backend):
    seen = backend()
    checks = found(*diagnose("vllm", None, ["model"]).checks)
    assert checks["engine"].status is Status.PROBLEM
    assert not seen


def test_plugins_that_were_left_out_are_named(backend, plugins_left_out):
    backend()
    plugins = [c for c in diagnose("vllm", "vllm 9", []).checks if c.name == "plugin"]
    assert [(check.status, check.found) for check in plugins] == [
        ("warning", "broken 1.0 (entry) could not be loaded: ZeroDivisionError: division by zero"),
        (
            "warning",
            "'twice' is claimed by first 1.0 (twice) and second 1.0 (twice), so none of them is "
            "used.",
        ),
        ("ok", "unwanted 1.0 (entry) is blocked by SPECPLUG_BLOCK."),
    ]


def test_an_error_of_specplug_brings_its_own_advice():
    check = refused("settings", OptionError("It is wrong.", hint="Do this."), "Do that.")
    assert check == Check("settings", Status.PROBLEM, "[bad-option] It is wrong.", "Do this.")
    assert refused("settings", ValueError("no"), "Do that.").advice == "Do that."


def test_the_doctor_loads_no_engine(run_python):
    code = "import sys, json, specplug.doctor, specplug.probe; print(json.dumps([*sys.modules]))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code))}
    assert not loaded & {"torch", "vllm", "transformers", "numba"}


class Holding(Proposer):
    """Holds 10 bytes for each token of a prompt, and 1000 for all."""

    def __init__(self, together=1000):
        self._held = together
        self.ended = False

    def begin(self, request):
        self._held += 10 * (len(request.prompt_token_ids) + 1)

    def propose(self, batch):
        assert batch.tokens(0).dtype == np.int32
        assert not batch.token_ids.flags.writeable
        return [[]]

    def end(self, request_id):
        self.ended = True

    def close(self):
        self.ended = True

    def usage(self):
        return Usage(0, self._held)


SPEC = ProposerSpec(name="tested", factory="x:y", install_hint="Install it.")
PLUGINS = PluginManager(discover=False)


@pytest.mark.parametrize("max_model_len", [64, 2**20])
def test_memory_is_that_of_a_request_of_the_models_length(make_engine, max_model_len):
    proposer = Holding()
    engine = make_engine(max_model_len=max_model_len, max_num_seqs=5)
    check = measured(proposer, SPEC, engine, PLUGINS)
    one, five = {64: ("640 bytes", "3.2 kB"), 2**20: ("10.5 MB", "52.4 MB")}[max_model_len]
    assert check.status is Status.OK
    assert check.found == (
        f"{one} for a request of {max_model_len} tokens, {five} for 5 of them, and 1.0 kB for all "
        "together. Caches that fill up later come on top."
    )
    assert not proposer.ended, "it might save the made-up text"


def test_memory_is_held_on_each_rank(make_engine):
    check = measured(Holding(0), SPEC, make_engine(world_size=2), PLUGINS)
    assert "for 8 of them; on each of 2 ranks." in check.found


class Uncounted(Proposer):
    def propose(self, batch):
        return [[]]


class Failing(Uncounted):
    def propose(self, batch):
        raise IndexError("too short")


class Refusing(Uncounted):
    def prepare(self, engine):
        raise ImportError("no module numba")


class OnDevice(DeviceProposer):
    def prepare(self, engine):
        raise AssertionError("the device is the engine's")

    def propose_on_device(self, batch): ...


@pytest.mark.parametrize(
    ("proposer", "check"),
    [
        (Uncounted(), Check("memory", Status.OK, "The proposer does not count its memory.")),
        (OnDevice(), Check("memory", Status.OK, "Not measured: it is on the model's device.")),
        (
            Refusing(),
            Check("proposer", Status.PROBLEM, "ImportError: no module numba", "Install it."),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_measured_is_said(make_engine, proposer, check):
    assert measured(proposer, SPEC, make_engine(), PLUGINS) == check


def test_a_proposer_that_fails_is_no_problem_but_a_warning(make_engine):
    check = measured(Failing(), SPEC, make_engine(), PLUGINS)
    assert check.status is Status.WARNING
    assert "IndexError: too short" in check.found


def test_proposers_made_of_others_find_them(make_engine):
    plugins = PluginManager(discover=False)
    plugins.add(ProposerSpec(name="part", factory=lambda _: Holding(7), options=Options))

    class Whole(Uncounted):
        def prepare(self, engine):
            self.part, _ = engine.make_proposer("part", {})

        def usage(self):
            return self.part.usage()

    assert "7 bytes for all together" in measured(Whole(), SPEC, make_engine(), plugins).found


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead", "prediction", "cascade"])
def test_the_built_in_proposers_are_measured(make_engine, name):
    plugins = PluginManager()
    engine = make_engine(max_model_len=4096, provides=frozenset(Capability))
    proposer, spec = plugins.create(name, {}, engine.provides)
    check = measured(proposer, spec, engine, plugins)
    assert check.status is Status.OK
    assert "for a request of 4096 tokens" in check.found
    assert not check.found.startswith("0 ")
