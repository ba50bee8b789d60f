"""The benchmark's texts as JSONL for ``specplug replay``, taken from installed packages.

``python -m benchmarks.datasets FOLDER`` writes one file per set. Nothing is downloaded: the
packages ship the texts, and only their data files are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from tokenizers import Tokenizer

from specplug.bench.datasets import DATASETS, Case, Message
from specplug.demo.model import prepare_model
from specplug.errors import SpecplugError


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
