"""``suffix``: continue as text went on wherever the end of the sequence occurred before.

Looks for the longest match in the request's own tokens and in what other requests were answered,
and lets the occurrences vote on each next token: the longer their match and the more recent they
are, the more they count. Suffix decoding (Oliaro et al., arXiv 2411.04975), with hash chains in
place of suffix trees: the index of a prompt is built step by step, at 60 bytes a token.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat

from specplug.proposer import (
    Acceptance,
    Batch,
    Drafts,
    EngineInfo,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    RequestOptions,
    Usage,
)

if TYPE_CHECKING:
    from specplug.proposers._kernel import Int64Array
    from specplug.proposers._suffix_cache import SuffixCache
    from specplug.proposers._suffix_index import SuffixIndex


class SuffixOptions(Options):
    """How long drafts are, and what of other requests they may come from."""

    min_confidence: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Drafts end before the estimated probability that all of one is accepted "
        "falls below this. 0.1 about halves what is drafted and keeps nearly all that is accepted.",
    )
    tokens_per_match: PositiveFloat = Field(
        8.0,
        allow_inf_nan=False,
        description="The most draft tokens for each token of the longest match.",
    )
    cache_bytes: NonNegativeInt = Field(
        64 * 2**20,
        description="Memory for other requests' text, which then serves all of the same "
        "namespace; 0 for none.",
    )
    cache_prompts: bool = Field(
        False, description="Whether prompts are taken into the cache; outputs always are."
    )
    cache_file: Path | None = Field(
        None,
        description="Where the cache is saved, and loaded from at start-up. It holds the text of "
        "requests, as token ids.",
    )
    cache_save_seconds: PositiveFloat = Field(
        60.0,
        description="How often the cache is saved while it changes; and once at shutdown.",
    )


class SuffixRequestOptions(RequestOptions):
    """What a request may set.

    Attributes:
        cache_namespace: requests draft from the cached text of their own namespace only.
    """

    cache_namespace: str = Field("", max_length=1024)


class SuffixProposer(Proposer):
    """Looks up the end of each sequence in its own and in other requests' text."""

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self._slots: dict[str, int] = {}
        self._outputs: dict[str, array[int]] = {}
        self._index: SuffixIndex
        self._cache: SuffixCache
        self._owners: Int64Array = np.zeros(0, np.int64)

    def prepare(self, engine: EngineInfo) -> None:
        """Compile the kernels, or load them from numba's cache; load the cached text."""
        from specplug.proposers._suffix_cache import SuffixCache
        from specplug.proposers._suffix_index import SuffixIndex

        self._index = SuffixIndex.shared(engine)
        self._cache = SuffixCache(self._options.cache_bytes)
        self._file = None
        if self._options.cache_file:
            from specplug.proposers._suffix_file import SuffixFile

            self._file = SuffixFile(
                self._options.cache_file, self._options.cache_save_seconds, engine
            )
            self._file.load(self._cache)

    def begin(self, request: Request) -> None:
        """Note the request; its index is made with its first draft."""
        from specplug.proposers._columns import with_room
        from specplug.proposers._suffix_cache import owner_of

        self._slots[request.id] = request.slot
        self._index.begin(request.id, request.slot)
        self._outputs[request.id] = array("i")
        self._owners = with_room(self._owners, request.slot)
        namespace = getattr(request.options, "cache_namespace", "")
        self._owners[request.slot] = owner_of(namespace) if self._options.cache_bytes else 0
        if self._options.cache_prompts:
            prompt = np.asarray(request.prompt_token_ids, np.int32)
            self._cache.add(prompt, int(self._owners[request.slot]))

    def observe(self, acceptance: Acceptance) -> None:
        """Collect what requests are answered."""
        for request_id, new in zip(acceptance.request_ids, acceptance.new_token_ids, strict=True):
            self._outputs[request_id].extend(new)

    def propose(self, batch: Batch) -> Drafts:
        """Draft what the occurrences of each sequence's end agree on most."""
        self._cache.update()
        return self._index.draft(
            batch,
            self._owners[batch.slots],
            self._cache,
            min_confidence=self._options.min_confidence,
            tokens_per_match=self._options.tokens_per_match,
        )

    def end(self, request_id: str) -> None:
        """Free the request's index and take its output into the cache."""
        slot = self._slots.pop(request_id)
        self._index.end(request_id, slot)
        output = np.frombuffer(self._outputs.pop(request_id), np.int32)
        self._cache.add(output, int(self._owners[slot]))
        if self._file:
            self._file.save_now_and_then(self._cache)

    def close(self) -> None:
        """Save the cache if it has a file."""
        if self._file:
            self._file.close(self._cache)

    def usage(self) -> Usage:
        """Return the requests known and the bytes of indexes, cache and collected outputs."""
        outputs = sum(4 * len(output) for output in self._outputs.values())
        held = self._index.usage().num_bytes + self._cache.num_bytes + outputs
        return Usage(len(self._slots), held)


SPEC = ProposerSpec(
    name="suffix",
    factory="specplug.proposers.suffix:SuffixProposer",
    options=SuffixOptions,
    request_options=SuffixRequestOptions,
    summary="Continues the longest matches of the last tokens in own and other requests' text.",
    install_hint="Install what it needs with: pip install 'specplug[compiled]'.",
)
