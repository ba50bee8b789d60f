"""The conformance kit itself: each mistake breaks the right rule, and is shown."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import wrong_policies
import wrong_proposers

from specplug import Options, ProposerSpec, proposer
from specplug.testing import (
    ENGINE,
    BackendConformance,
    BrokenRuleError,
    LengthPolicyConformance,
    ProposerConformance,
    policies,
    proposers,
)
from specplug.testing.examples import Examples

pytest_plugins = ["pytester"]
SUITES = {ProposerConformance: wrong_proposers, LengthPolicyConformance: wrong_policies}
DOCS = Path(__file__).parent.parent / "docs"


def rules(suite):
    return [name for name in dir(suite) if name.startswith("test_")]


@pytest.fixture
def first_found(monkeypatch):
    """Show the first failing example: shortening it takes seconds."""
    monkeypatch.setattr(Examples, "_shortened", lambda _self, _check, found: found)


def broken_rules(suite, spec, leave_out=(), **attributes):
    """Return what a plugin is told, by the rule that it breaks."""
    instance = type("Suite", (suite,), {"spec": spec, **attributes})()
    given = {"engine": ENGINE}
    if suite is ProposerConformance:
        given["make_proposer"] = proposers.maker(spec, instance.options, ENGINE)
    else:
        given["make_policy"] = policies.maker(spec, instance.options)
    found = {}
    for rule in sorted({*rules(suite)} - {*leave_out}):
        test = getattr(instance, rule)
        try:
            test(*(given[name] for name in inspect.signature(test).parameters))
        except BrokenRuleError as error:
            found[rule.removeprefix("test_")] = str(error)
        except pytest.skip.Exception:
            pass
    return found


CASES = [
    pytest.param(suite, kind, rule, id=f"{suite.__name__}-{kind.__name__}")
    for suite, wrong in SUITES.items()
    for rule, kinds in wrong.WRONG.items()
    for kind in kinds
]


@pytest.mark.parametrize(("suite", "kind", "rule"), CASES)
def test_each_mistake_breaks_one_rule(first_found, suite, kind, rule):
    # A process takes a second.
    leave_out = () if "determinism" in rule else ("test_determinism_across_processes",)
    found = broken_rules(suite, SUITES[suite].SPECS[kind.__name__], leave_out)
    assert list(found) == [rule]
    assert found[rule].startswith(f"rule '{rule}' is broken: ")


@pytest.mark.parametrize(
    ("suite", "kind"),
    [
        (ProposerConformance, wrong_proposers.LastToken),
        (LengthPolicyConformance, wrong_policies.Half),
    ],
)
def test_no_mistake_breaks_no_rule(suite, kind):
    assert broken_rules(suite, SUITES[suite].SPECS[kind.__name__]) == {}


@pytest.mark.parametrize("suite", SUITES)
def test_there_is_a_mistake_for_every_rule(suite):
    tried = set(SUITES[suite].WRONG)
    if suite is ProposerConformance:
        tried.add("pickling")  # test_what_cannot_be_pickled
    assert tried == {rule.removeprefix("test_") for rule in rules(suite)}


def test_what_cannot_be_pickled():
    spec = ProposerSpec("local", factory=lambda _: wrong_proposers.LastToken())
    found = broken_rules(ProposerConformance, spec)
    assert list(found) == ["pickling"]
    assert "lambda" in found["pickling"]


SWITCHES = [
    (ProposerConformance, "Chained", {"independent": False}),
    (ProposerConformance, "OneNewToken", {"resumes_exactly": False}),
    (ProposerConformance, "Rereading", {"rescans": True}),
    (ProposerConformance, "Holding", {"kept_bytes": 100}),
    (LengthPolicyConformance, "FirstOnly", {"independent": False}),
    (LengthPolicyConformance, "Slow", {"max_seconds": 10}),
]


@pytest.mark.parametrize(("suite", "kind", "switch"), SWITCHES)
def test_a_switch_allows_what_is_a_mistake_without(suite, kind, switch):
    leave_out = ("test_determinism_across_processes",)
    assert broken_rules(suite, SUITES[suite].SPECS[kind], leave_out, **switch) == {}


def test_the_shortest_calls_are_shown():
    leave_out = set(rules(ProposerConformance)) - {"test_faults"}
    found = broken_rules(ProposerConformance, wrong_proposers.SPECS["NeedsDrafts"], leave_out)
    _, _, calls = found["faults"].partition("\n\nThe shortest sequence of calls that shows it:\n\n")
    assert [line.strip().partition("(")[0] for line in calls.strip().splitlines()] == [
        "proposer = make_proposer",
        "proposer.prepare",
        "proposer.begin",
        "proposer.observe",
        "proposer.propose",
        "proposer.end",
    ]
    assert "raises IndexError: list index out of range" in calls


@proposer()
def last_token(tokens, max_tokens):
    """Drafts the last token, over and over."""
    return [int(tokens[-1])] * max_tokens


def test_a_function_may_read_all_of_the_text():
    assert broken_rules(ProposerConformance, last_token) == {}


def test_a_function_that_raises(first_found):
    @proposer()
    def picky(tokens, max_tokens):
        return [int(tokens[2])] * max_tokens

    assert list(broken_rules(ProposerConformance, picky)) == ["faults", "pickling"]


class TestWithOptions(ProposerConformance):
    """Options reach the proposer; ``make_proposer`` may stand in for ``spec``."""

    class Times(Options):
        times: int

    options = {"times": 2}  # noqa: RUF012
    spec = ProposerSpec("times", factory="wrong_proposers:LastToken", options=Times)
    num_examples = 5


class TestWithoutSpec(ProposerConformance):
    num_examples = 5

    @pytest.fixture
    def make_proposer(self):
        return wrong_proposers.LastToken


def test_under_pytest(pytester):
    pytester.makepyfile(
        test_mine="""
        from specplug import ProposerSpec
        from specplug.testing import ProposerConformance

        class TestMine(ProposerConformance):
            spec = ProposerSpec("mine", factory="wrong_proposers:NeedsDrafts")

        class TestNothing(ProposerConformance):
            pass
        """
    )
    result = pytester.runpytest("-p", "no:randomly", "-k", "faults")
    result.assert_outcomes(failed=1, errors=1)
    text = result.stdout.str()
    assert "draft[0]" in text  # the proposer's own line
    assert "proposer.observe(acceptance)   # 'request-a': 0 of [] accepted, new [0]" in text
    assert "TestNothing says not what it tests: set the class attribute 'spec'" in text
    assert "examples.py" not in text  # nor any other line of the kit


@pytest.mark.parametrize("suite", [*SUITES, BackendConformance])
def test_every_rule_and_switch_stands_in_the_docs(suite):
    page = (DOCS / "reference" / "conformance-kit.md").read_text()
    switches = [] if suite is BackendConformance else inspect.get_annotations(suite)
    for name in [*(rule.removeprefix("test_") for rule in rules(suite)), *switches]:
        assert f"| `{name}` |" in page


def test_importing_specplug_does_not_load_what_tests_need(run_python):
    loaded = json.loads(
        run_python("import sys, json, specplug.cli; print(json.dumps(list(sys.modules)))")
    )
    assert not {"pytest", "hypothesis", "specplug.testing"} & set(loaded)
