"""``ngram``: continue as the text went on after the last tokens occurred before.

Same idea as vLLM's ``ngram`` method, with the most recent occurrence by default, any request
served from an incremental index, and repetitions continued past the end of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt, model_validator

from specplug.proposer import (
    Batch,
    Drafts,
    EngineInfo,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    Usage,
)

if TYPE_CHECKING:
    from specplug.proposers._ngram_index import NgramIndex


class LookupOptions(Options):
    """Which matches count."""

    min_n: PositiveInt = Field(2, description="The shortest match, in tokens.")
    max_n: PositiveInt = Field(5, description="The longest match looked for, in tokens.")

    @model_validator(mode="after")
    def _ordered(self) -> LookupOptions:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n ({self.min_n}) must not be above max_n ({self.max_n})")
        return self


class NgramOptions(LookupOptions):
    """Which matches count, and which of several wins."""

    prefer: Literal["recent", "earliest"] = Field(
        "recent", description="Which occurrence to continue from."
    )


class LookupProposer(Proposer):
    """Base of the proposers that look up n-grams of the request's own tokens."""

    _index: NgramIndex

    def __init__(self, options: LookupOptions, *, most_recent: bool = True) -> None:
        self._options = options
        self._most_recent = most_recent

    def prepare(self, engine: EngineInfo) -> None:
        """Compile the kernel, or load it from numba's cache."""
        from specplug.proposers._ngram_index import NgramIndex

        self._index = NgramIndex(
            self._options.min_n, self._options.max_n, most_recent=self._most_recent
        )

    def begin(self, request: Request) -> None:
        """Note the request; its index is made with its first draft."""
        self._index.begin(request.id, request.slot)

    def end(self, request_id: str) -> None:
        """Free the request's index."""
        self._index.end(request_id)

    def usage(self) -> Usage:
        """Return the indexed requests and the bytes of their tables."""
        return self._index.usage()


class NgramProposer(LookupProposer):
    """Looks the last tokens up in everything before them, prompt and output."""

    def __init__(self, options: NgramOptions) -> None:
        super().__init__(options, most_recent=options.prefer == "recent")

    def propose(self, batch: Batch) -> Drafts:
        """Draft what followed the longest match."""
        return self._index.draft(batch, batch.num_tokens)


SPEC = ProposerSpec(
    name="ngram",
    factory="specplug.proposers.ngram:NgramProposer",
    options=NgramOptions,
    summary="Continues the longest match of the last tokens in prompt and output.",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
