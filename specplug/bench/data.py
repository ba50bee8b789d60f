"""Where prompts come from: bundled, data sets by name, the user's files, recorded traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specplug.bench import datasets
from specplug.bench.bundled import PROMPTS
from specplug.bench.work import Content, Prompt
from specplug.errors import OptionError
from specplug.replay.records import RecordError, TokenId, lines

BUNDLED = "bundled"
NAMED = {
    "humaneval": datasets.human_eval,
    "mt-bench": datasets.mt_bench,
    "gsm8k": datasets.gsm8k,
}
"""Data sets of installed packages."""
_HINT = (
    "A line is a JSON object with one of 'prompt' (text), 'messages' and 'prompt_token_ids', and "
    "perhaps 'max_tokens' and 'id'. What record_folder holds is such a file too."
)


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: str


class _Line(BaseModel):
    """One line of a user's file, or of a recorded trace."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    output_token_ids: list[TokenId] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> _Line:
        if len(self._contents()) != 1:
            raise ValueError("it has to hold one of prompt, messages and prompt_token_ids")
        return self

    def _contents(self) -> list[Content]:
        messages = [message.model_dump() for message in self.messages or ()]
        found: list[Content | None] = [self.prompt, messages, self.prompt_token_ids]
        return [content for content in found if content]

    @property
    def content(self) -> Content:
        return self._contents()[0]


def load(sources: Sequence[str], limit: int | None, max_tokens: int) -> list[Prompt]:
    """Return the prompts of all sources; each but the bundled one is a workload.

    Args:
        sources: ``bundled``, the name of a data set, a JSONL file, or a folder of recorded traces.
        limit: the most prompts of each workload, spread over it; None for all.
        max_tokens: the most tokens of an answer, where the source does not say.

    Raises:
        OptionError: there is no such data set or file.
        RecordError: a line of a file is wrong.
    """
    prompts = [prompt for source in sources for prompt in _prompts(source, max_tokens)]
    workloads: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        workloads.setdefault(prompt.workload, []).append(prompt)
    return [prompt for own in workloads.values() for prompt in _spread(own, limit)]


def _prompts(source: str, max_tokens: int) -> list[Prompt]:
    if source == BUNDLED:
        return list(PROMPTS)
    if source in NAMED:
        return [Prompt(case.id, source, case.prompt, max_tokens) for case in NAMED[source]()]
    path = Path(source)
    if not path.exists():
        raise OptionError(
            f"There is no data set '{source}', and no such file.",
            hint=f"There are {', '.join([BUNDLED, *NAMED])}; or name a file or folder.",
        )
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    prompts = [
        _prompt(line, f"{file}:{number}", path.stem, max_tokens)
        for file in files
        for number, line in lines(file)
    ]
    if not prompts:
        raise RecordError(f"There is no prompt in {source}.", hint=_HINT)
    return prompts


def _prompt(line: bytes, where: str, workload: str, max_tokens: int) -> Prompt:
    try:
        found = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "the line"
        message = first["msg"].removeprefix("Value error, ")
        raise RecordError(f"{where}: {at}: {message}.", hint=_HINT) from None
    name = where if found.id is None else str(found.id)
    length = found.max_tokens or len(found.output_token_ids) or max_tokens
    return Prompt(name, workload, found.content, length)


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]
