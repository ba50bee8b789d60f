"""The kit's suite for backends, on a toy engine that is right and on some that are wrong."""

from __future__ import annotations

import inspect
from itertools import count

import numpy as np
import pytest

from specplug import EngineInfo, Runtime
from specplug.config import Settings, validate
from specplug.runtime import Arrival, Step
from specplug.testing import BackendConformance
from specplug.testing.backends import PROPOSERS, install

VOCAB_SIZE = 50
MAX_LEN = 64


def says(text):
    """What the toy model says behind a text: mostly what it said three tokens before."""
    return (text[-3] if len(text) % 7 else sum(text)) % VOCAB_SIZE


class ToyEngine:
    """Serves one request after the other, greedily."""

    def __init__(self, proposer, settings, k):
        info = EngineInfo("toy", VOCAB_SIZE, MAX_LEN, 1, k)
        self.runtime = Runtime(proposer, info, validate(Settings, settings, "settings"))
        self._ids = count()

    def generate(self, prompt, max_tokens):
        name, text, draft = str(next(self._ids)), list(prompt), []
        end = len(prompt) + max_tokens
        self.runtime.begin(Arrival(name, prompt, end))
        while len(text) < end:
            new = self.verify(text, draft)[: end - len(text)]
            text += new
            draft = self.next_draft(name, text, draft)
        self.end(name)
        return text[len(prompt) :]

    def verify(self, text, draft):
        new = []
        for token in [*draft, None]:
            new.append(says([*text, *new]))
            if new[-1] != token:
                break
        return new

    def next_draft(self, name, text, verified):
        drafts = self.runtime.step(
            Step([name], np.array([text], np.int32), np.zeros(1, np.int32), [len(text)], [True],
                 {name: verified} if verified else {})
        )  # fmt: skip
        return drafts.to_lists()[0]

    def end(self, name):
        self.runtime.end(name)


class Trusting(ToyEngine):
    """Keeps what was drafted."""

    def verify(self, text, draft):
        return [*draft, says([*text, *draft])]


class Forgetful(ToyEngine):
    """Does not say that requests end."""

    def end(self, name):
        pass


class OtherRow(ToyEngine):
    """Shows a text that is not the request's."""

    def next_draft(self, name, text, verified):
        return super().next_draft(name, [text[0] + 1, *text[1:]], verified)


class OtherDrafts(ToyEngine):
    """Says that it verified something else than what was drafted."""

    def next_draft(self, name, text, verified):
        return super().next_draft(name, text, [token + 1 for token in verified])


class Mute(ToyEngine):
    """Never asks for a draft."""

    def next_draft(self, name, text, verified):
        return []


class Suite(BackendConformance):
    prompts = ([1, 2, 3, 1, 2, 3], [4, 5, 6], [7, 7, 8, 9])
    engine = ToyEngine

    def plain(self, prompts, max_tokens):
        answers = []
        for prompt in prompts:
            text = list(prompt)
            for _ in range(max_tokens):
                text.append(says(text))
            answers.append(text[len(prompt) :])
        return answers

    def with_proposer(self, name, settings, num_speculative_tokens, prompts, max_tokens):
        engine = self.engine(name, settings, num_speculative_tokens)
        try:
            return [engine.generate(prompt, max_tokens) for prompt in prompts]
        finally:
            self.served = engine.runtime  # or it would be closed before its counters are read


class TestToyEngine(Suite):
    pass


@pytest.fixture
def broken_rules(tmp_path, monkeypatch):
    """Run the rules on an engine with one proposer; return those that it breaks."""

    install(tmp_path, monkeypatch)

    def run(engine, proposer="ngram"):
        suite = type("Wrong", (Suite,), {"engine": engine})()
        found = set()
        for rule in (name for name in dir(Suite) if name.startswith("test_")):
            try:
                getattr(suite, rule)(proposer)
            except AssertionError:
                found.add(rule)
        return found

    return run


@pytest.mark.parametrize(
    ("engine", "rules"),
    [
        (ToyEngine, set()),
        (Trusting, {"test_text", "test_tokens"}),
        (Forgetful, {"test_requests"}),
        (OtherRow, {"test_tokens"}),
        (OtherDrafts, {"test_tokens"}),
        (Mute, {"test_tokens", "test_drafts"}),
    ],
)
def test_each_mistake_is_found(broken_rules, engine, rules):
    assert broken_rules(engine) == rules


def test_what_counts_as_the_same_text_may_be_overridden(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    asked = []

    class Lenient(Suite):
        engine = Trusting

        def check_same(self, prompt, own, answer):
            asked.append((prompt, len(own), len(answer)))

    Lenient().test_text("ngram")
    assert [prompt for prompt, *_ in asked] == [*Suite.prompts, *Suite.prompts]
    assert {length for _, length, _ in asked} == {Suite.max_tokens}


def test_an_engine_that_runs_elsewhere_is_refused(broken_rules):
    class Elsewhere(Suite):
        def with_proposer(self, *arguments):
            return self.plain(arguments[3], arguments[4])

    with pytest.raises(AssertionError, match="No proposer has begun to serve in this process"):
        Elsewhere().test_text("ngram")


def test_every_rule_is_checked_with_every_proposer():
    rules = [rule for name, rule in inspect.getmembers(BackendConformance) if name[:5] == "test_"]
    assert len(rules) == 5
    for rule in rules:
        assert [mark.args for mark in rule.pytestmark] == [("proposer", PROPOSERS)]
