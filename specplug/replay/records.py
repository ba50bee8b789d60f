"""Recorded requests: one JSON object a line, as token ids or as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specplug.errors import DependencyError, SpecplugError
from specplug.proposer import Int32Array

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RecordError(SpecplugError, ValueError):
    """A file of recorded requests cannot be read."""

    code = "bad-record"


class _TokenLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | int | None = None
    prompt_token_ids: list[TokenId]
    output_token_ids: list[TokenId]
    reference_token_ids: list[TokenId] | None = None


class _TextLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | int | None = None
    prompt: str
    output: str
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One request that was served.

    Attributes:
        id: its id, or the file and line where it stands.
        token_ids: int32 ``[n]``, prompt and output.
        num_prompt_tokens: how many of them are the prompt.
        reference_token_ids: int32 ``[m]``, what the output was expected to be, if something was.
    """

    id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    reference_token_ids: Int32Array | None = None


def read_records(paths: Sequence[Path], tokenizer: Path | None = None) -> list[Record]:
    """Read files of JSON lines; empty lines and requests without output are left out.

    Args:
        paths: the files.
        tokenizer: a ``tokenizer.json``, for lines with ``prompt`` and ``output`` as text.

    Raises:
        RecordError: naming the file, the line, the field and what was expected.
    """
    encode = _encoder(tokenizer) if tokenizer else None
    records = [
        record
        for path in paths
        for number, line in lines(path)
        if (record := _record(line, f"{path}:{number}", encode)) is not None
    ]
    if not records:
        raise RecordError(
            f"There is no request with an output in {', '.join(map(str, paths))}.",
            hint="A line is a JSON object with 'prompt_token_ids' and 'output_token_ids'.",
        )
    return records


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error


def _record(line: bytes, where: str, encode: Any) -> Record | None:
    try:
        if encode is None:
            tokens = _TokenLine.model_validate_json(line)
            name, prompt, output = tokens.id, tokens.prompt_token_ids, tokens.output_token_ids
            reference = tokens.reference_token_ids
        else:
            text = _TextLine.model_validate_json(line)
            name, prompt, output = text.id, encode(text.prompt), encode(text.output)
            reference = None if text.reference is None else encode(text.reference)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "the line"
        raise RecordError(
            f"{where}: {at}: {first['msg']}.",
            hint="A line is a JSON object with 'prompt_token_ids' and 'output_token_ids', lists "
            "of token ids, and perhaps 'id' and 'reference_token_ids'. With --tokenizer it has "
            "'prompt' and 'output', and perhaps 'reference', as text.",
        ) from None
    if not output:
        return None
    return Record(
        where if name is None else str(name),
        np.array([*prompt, *output], np.int32),
        len(prompt),
        None if reference is None else np.array(reference, np.int32),
    )


def _encoder(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DependencyError(
            f"--tokenizer needs a package that is not installed: {error}.",
            hint="Install it with: pip install 'specplug[replay]'.",
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise RecordError(f"{path} is no tokenizer file: {error}.") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
