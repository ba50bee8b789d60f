"""``specplug bench`` and ``specplug demo`` with a played engine: turns, resuming, what fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from specplug.bench import answering, command
from specplug.bench.session import Session, SessionError
from specplug.demo import run as demo
from specplug.demo.prompts import PROMPTS as DEMO
from specplug.errors import DependencyError, OptionError, UnknownProposerError


@pytest.fixture
def bench(played, make_console, tmp_path):
    """Run ``specplug bench`` with the played engine; return whether texts agreed, and the text."""

    def start(**changes):
        standard = {
            "engine": "played",
            "model": str(tmp_path),
            "proposers": ["ngram"],
            "num_speculative_tokens": [4],
            "batch_sizes": [1],
            "data": ["bundled"],
            "rounds": 2,
            "limit": 1,
            "max_tokens": 9,
            "engine_methods": [],
            "engine_arguments": {},
            "tokenizer": None,
            "at_once": None,
            "output": tmp_path / "out",
        }
        console = make_console()
        same = command.run_bench(command.BenchSettings(**{**standard, **changes}), console)
        return same, console.file.getvalue()

    return start


def report(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


def test_a_whole_run(bench, tmp_path):
    same, text = bench(batch_sizes=[1, 2], num_speculative_tokens=[2, 4])
    assert same
    assert "2.00x" in text
    found = report(tmp_path)
    labels = [
        "no speculation", "its own K=2", "specplug ngram K=2", "its own K=4", "specplug ngram K=4",
    ]  # fmt: skip
    assert list(found["configuration"]["methods"]) == labels
    assert {cell["batch_size"] for cell in found["cells"]} == {1, 2}
    assert all(
        cell["ratio"]["value"] == pytest.approx(1.0 if cell["method"] == labels[0] else 2.0)
        for cell in found["cells"]
    )
    assert found["verdicts"][0]["text"].startswith("Keep it: ")
    assert "--play" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "configuration.json", "measured.jsonl", "logs",
        "report.json", "report.md", "report.html", "report.png",
    }  # fmt: skip


def test_engines_get_what_was_asked_for(bench, played):
    bench(
        engine_arguments={"dtype": "half"},
        engine_methods=['mine={"x": 1}'],
        proposers=["suffix:min_confidence=0.1,length_policy=fixed"],
        tokenizer="other",
        batch_sizes=[3],
    )
    plain, *others = played()
    assert plain["speculation"] is None
    speculation = [one["speculation"] for one in others]  # started at the same time
    assert {"x": 1} in speculation
    assert {
        "name": "suffix", "k": 4, "length_policy": "fixed", "options": {"min_confidence": 0.1},
    } in speculation  # fmt: skip
    assert plain["engine_arguments"] == {"dtype": "half"}
    assert (plain["batch_size"], plain["tokenizer"]) == (3, "other")
    assert len(plain["contents"]) == 7  # one of each workload, and one to warm up


def test_a_run_goes_on_where_it_was_interrupted(bench, played, tmp_path, monkeypatch):
    monkeypatch.setenv("PLAY_CRASH", "suffix")
    arguments = {"proposers": ["ngram", "suffix"], "engine_methods": ["none"], "at_once": 2}
    with pytest.raises(SessionError, match=r"(?s)'specplug suffix' ended.*no memory left.*log is"):
        bench(**arguments)
    measured = (tmp_path / "out" / "measured.jsonl").read_text()
    assert len(measured.splitlines()) == 2 * 6  # both rounds with ngram
    with (tmp_path / "out" / "measured.jsonl").open("a") as file:
        file.write('{"round": 0, "unit"')  # interrupted while writing
    monkeypatch.delenv("PLAY_CRASH")
    before = len(played())
    same, text = bench(**arguments)
    assert same
    assert "12 turns were measured before" in text
    started = [one["speculation"] for one in played()[before:]]
    assert [one and one["name"] for one in started] == [None, "suffix"]
    assert len((tmp_path / "out" / "measured.jsonl").read_text().splitlines()) == 2 * 12
    # All is there: nothing is started, and further rounds are added.
    before = len(played())
    bench(**arguments)
    assert len(played()) == before
    bench(**{**arguments, "rounds": 3})
    assert len((tmp_path / "out" / "measured.jsonl").read_text().splitlines()) == 3 * 12


def test_a_folder_with_another_run_is_refused(bench):
    bench()
    with pytest.raises(OptionError, match=r"another run: its batch_sizes was \[1\], not \[2\]"):
        bench(batch_sizes=[2])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_however_many_engines_live_at_once_all_is_measured(bench, tmp_path, at_once):
    same, _ = bench(proposers=["ngram", "suffix"], at_once=at_once)
    assert same
    cells = [cell for cell in report(tmp_path)["cells"] if cell["workload"] == "quotes"]
    assert [cell["method"] for cell in cells] == [
        "no speculation", "its own", "specplug ngram", "specplug suffix",
    ]  # fmt: skip
    assert {cell["num_outputs"] for cell in cells[1:]} == {2}


def test_engines_that_do_not_fit_run_one_after_the_other(bench, played, monkeypatch):
    monkeypatch.setenv("PLAY_FREE", "1000000000")
    _, text = bench(engine_methods=["none"])
    assert "An engine takes 1.0 GB: 1 at a time." in text
    # To see what it takes; then no speculation and ngram in each round.
    assert [one["speculation"] and one["speculation"]["name"] for one in played()] == [
        None, None, "ngram", None, "ngram",
    ]  # fmt: skip


def test_a_differing_text_is_said_aloud(bench, monkeypatch):
    monkeypatch.setenv("PLAY_DIFFERENT", "yes")
    same, text = bench()
    assert not same
    assert "TEXT DIFFERS from no speculation with: its own (12 answers), specplug ngram" in text
    assert "BUT 2 of 2 texts differ" in text


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"proposers": ["ngrm"]}, UnknownProposerError, "ngram"),
        ({"proposers": ["ngram:nonsense=1"]}, OptionError, "nonsense"),
        ({"proposers": ["ngram", "ngram"]}, OptionError, "Given twice: specplug ngram"),
        ({"engine": "not_there"}, DependencyError, "not_there is not installed"),
        ({"batch_sizes": [8]}, OptionError, "serves 4 request at a time, not 8"),
        ({"engine_methods": ["mine"]}, OptionError, "neither 'none' nor a label"),
        ({"engine_methods": ["mine=[1]"]}, OptionError, "neither 'none' nor a label"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(bench, played, changes, error, message):
    with pytest.raises(error, match=message):
        bench(**changes)
    assert played() == []


def test_the_demo_is_a_bench_with_everything_chosen(played, make_console, tmp_path):
    console = make_console()
    settings = demo.DemoSettings(
        engine="played",
        proposers=["ngram", "suffix"],
        model=tmp_path,
        num_speculative_tokens=4,
        rounds=2,
        json_path=tmp_path / "measured.json",
    )
    assert demo.run_demo(settings, console)
    assert "2.00x" in console.file.getvalue()
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["configuration"]["rounds"] == 2
    [whole] = [
        cell
        for cell in found["cells"]
        if (cell["method"], cell["workload"]) == ("specplug suffix", "all")
    ]
    assert whole["num_outputs"] == 2 * len(DEMO)


# -- the processes ---------------------------------------------------------------------------


def test_closing_a_session_ends_what_the_engine_started(tmp_path, monkeypatch):
    (tmp_path / "forking.py").write_text(
        "import subprocess, time\n"
        "def serve():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    print('{\"pid\": %d}' % child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session = Session("forking", "forking", {}, tmp_path / "log", {})
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


ANSWERING = """\
import sys
from specplug.bench.answering import Arrivals, answer

class Engine:
    def __init__(self, setup):
        self.count = setup.batch_size
        print("loaded")  # engines print: it must not be taken for an answer

    def generate(self, batch, namespaces):
        self.count += len(batch)
        found = Arrivals()
        found.add(0.5, [])
        found.add(1.0, [len(batch), 5])
        return [found]

    def counts(self):
        return {"num_drafts": self.count}

answer(Engine)
"""


def test_an_engine_answers_line_by_line():
    setup = asdict(answering.Setup("m", None, {}, ["a", "b"], [8, 8], batch_size=3))
    lines = [setup, {"batch": [0, 1], "namespaces": ["", ""]}]
    ended = subprocess.run(
        [sys.executable, "-c", ANSWERING],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ready, answer = map(json.loads, ended.stdout.splitlines())
    assert ready["memory"]["host"] > 10**6
    assert answer["outputs"] == [{"token_ids": [2, 5], "arrivals": [[1.0, 2]]}]
    assert answer["counts"] == {"num_drafts": 2}
    assert 0 <= answer["seconds"] < 5
    assert "loaded" in ended.stderr


class Tokenizer:
    """Knows characters, and says what it was asked."""

    chat_template = "there is one"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **_):
        return "|".join(message["content"] for message in messages) + ">"


def test_prompts_are_tokenised_as_the_model_was_trained():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = Tokenizer()
    assert answering.tokenised(tokenizer, [5, 6]) == [5, 6]
    assert answering.tokenised(tokenizer, "ab") == [97, 98]
    assert answering.tokenised(tokenizer, messages) == [ord(letter) for letter in "a|b>"]
    tokenizer.chat_template = None
    assert answering.tokenised(tokenizer, messages) == [ord(letter) for letter in "a\n\nb"]
