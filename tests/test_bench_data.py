"""Where ``specplug bench`` takes its prompts from."""

from __future__ import annotations

import gzip
import json

import pytest

from specplug.bench import data, datasets
from specplug.bench.bundled import PROMPTS
from specplug.demo.prompts import PROMPTS as DEMO
from specplug.errors import OptionError
from specplug.replay.records import RecordError


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_bundled_prompts_cover_the_workloads():
    found = data.load(["bundled"], None, 5)
    assert sorted(found, key=PROMPTS.index) == list(PROMPTS)
    assert {prompt.workload for prompt in found} == {
        "code edit", "quotes", "JSON", "story", "chat", "code",
    }  # fmt: skip
    assert len({prompt.name for prompt in found}) == len(found)
    assert all(prompt.text.strip() and 100 <= prompt.max_tokens <= 300 for prompt in found)
    assert {prompt.workload for prompt in DEMO} == {"code edit", "quotes", "JSON", "story"}


def test_a_file_may_hold_texts_conversations_and_recorded_requests(tmp_path):
    file = written(
        tmp_path / "mine.jsonl",
        {"prompt": "Hello", "max_tokens": 3},
        {"id": "two", "messages": [{"role": "user", "content": "Hi"}]},
        {"id": 3, "prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5, 6], "other": 1},
    )
    found = data.load([file], None, 9)
    assert [prompt.workload for prompt in found] == ["mine"] * 3
    assert [prompt.name for prompt in found] == [f"{file}:1", "two", "3"]
    assert [prompt.max_tokens for prompt in found] == [3, 9, 4]
    assert [prompt.text for prompt in found] == ["Hello", "Hi", ""]
    assert found[2].content == [1, 2]


def test_a_folder_of_traces_is_one_workload(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in ("b", "a"):
        written(folder / f"{name}.jsonl", {"prompt": name})
    found = data.load([str(folder)], None, 9)
    assert [(prompt.workload, prompt.text) for prompt in found] == [
        ("traces", "a"), ("traces", "b"),
    ]  # fmt: skip


def test_a_limit_is_spread_over_each_workload(tmp_path):
    file = written(tmp_path / "many.jsonl", *({"prompt": str(i)} for i in range(1, 11)))
    found = data.load([file, "bundled"], 2, 9)
    assert [prompt.text for prompt in found if prompt.workload == "many"] == ["1", "6"]
    assert len([prompt for prompt in found if prompt.workload == "quotes"]) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "one of prompt, messages and prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "one of prompt, messages"),
        ({"prompt": 5}, "prompt: "),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: "),
        ({"messages": [{"role": "user"}]}, r"messages.0.content: "),
        ({"prompt_token_ids": [-1]}, r"prompt_token_ids.0: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, message):
    file = written(tmp_path / "wrong.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(RecordError, match=rf"wrong.jsonl:2: .*{message}"):
        data.load([file], None, 9)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(OptionError, match=r"no data set 'humaneva'.*bundled, humaneval"):
        data.load(["humaneva"], None, 9)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(RecordError, match="no prompt in"):
        data.load([str(empty)], None, 9)


def test_named_sets_come_from_their_packages(monkeypatch):
    rows = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}", "canonical_solution": "pass"}
            for i in range(2)]  # fmt: skip
    shipped = "\n".join(map(json.dumps, rows)).encode()
    monkeypatch.setattr(datasets, "read", lambda package, path: gzip.compress(shipped))
    found = data.load(["humaneval"], None, 9)
    assert [(p.name, p.workload, p.content, p.max_tokens) for p in found] == [
        ("HumanEval/0", "humaneval", "def f0", 9),
        ("HumanEval/1", "humaneval", "def f1", 9),
    ]
