"""What an engine is asked: prompts, and the batches in which it gets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Content = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A plain text, token ids, or the messages of a conversation."""


def text_of(content: Content) -> str:
    """Return a plain text, or what the messages say; token ids have no text: it is empty."""
    if isinstance(content, str):
        return content
    messages = [message for message in content if not isinstance(message, int)]
    return "\n\n".join(message["content"] for message in messages)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        name: unique in its workload.
        workload: the kind of work, which gets a verdict of its own.
        content: what is asked.
        max_tokens: the most tokens of the answer.
    """

    name: str
    workload: str
    content: Content
    max_tokens: int

    @property
    def text(self) -> str:
        """What is asked, in words; see :func:`text_of`."""
        return text_of(self.content)


def chat(name: str, workload: str, text: str, max_tokens: int) -> Prompt:
    """Return a prompt that is the first message of a conversation."""
    return Prompt(name, workload, [{"role": "user", "content": text}], max_tokens)


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests that are sent at once; every method answers them next to the others.

    Attributes:
        workload: of its prompts.
        batch_size: how many requests there are.
        number: counts the units of a workload and batch size.
        prompts: the place of each request's prompt in the list of all.
    """

    workload: str
    batch_size: int
    number: int
    prompts: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the unit in files."""
        return f"{self.workload}/{self.batch_size}/{self.number}"

    def namespaces(self, round_number: int) -> list[str]:
        """Return for each request what keeps it from drafting from answers to the same prompt."""
        copies = [self.prompts[:i].count(prompt) for i, prompt in enumerate(self.prompts)]
        return [f"{round_number}/{self.batch_size}/{copy}" for copy in copies]


def units(prompts: Sequence[Prompt], batch_sizes: Iterable[int]) -> list[Unit]:
    """Put the prompts of each workload into batches, so that each is asked at every batch size.

    The last batch is filled up from the workload's beginning.
    """
    workloads: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        workloads.setdefault(prompt.workload, []).append(i)
    return [
        Unit(name, size, number, _batch(own, number * size, size))
        for size in batch_sizes
        for name, own in workloads.items()
        for number in range(-(-len(own) // size))
    ]


def _batch(own: Sequence[int], first: int, size: int) -> tuple[int, ...]:
    return tuple(own[i % len(own)] for i in range(first, first + size))
