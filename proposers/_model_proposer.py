"""What `draft_model` and `layer_skip` share: a proposer around a drafter."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from specplug.proposer import Batch, Drafts, EngineInfo, Proposer, Request, Usage

if TYPE_CHECKING:
    from specplug.proposers._drafter import Drafter


class ModelProposer(Proposer):
    """Drafts with a language model that reads the target's own tokens."""

    def __init__(self) -> None:
        self._drafter: Drafter | None = None
        self.slots: dict[str, int] = {}

    def prepare(self, engine: EngineInfo) -> None:
        """Load the model and allocate its cache.

        Raises:
            OptionError: the model cannot be loaded, does not fit, or does not draft as it should.
        """
        from specplug.proposers._draft_check import check

        self._drafter = self.load(engine)
        check(self._drafter, engine)

    @abstractmethod
    def load(self, engine: EngineInfo) -> Drafter:
        """Return the model, ready to draft."""

    @property
    def drafter(self) -> Drafter:
        """The model; there from ``prepare`` to ``close``."""
        assert self._drafter is not None
        return self._drafter

    def begin(self, request: Request) -> None:
        """Note the request; its tokens are read with its first draft."""
        self.slots[request.id] = request.slot
        self.drafter.begin(request.slot)

    def propose(self, batch: Batch) -> Drafts:
        """Draft what the model finds most likely."""
        drafts: Drafts = self.drafter.draft(batch)
        return drafts

    def end(self, request_id: str) -> None:
        """Free the request's part of the cache."""
        self.drafter.end(self.slots.pop(request_id))

    def close(self) -> None:
        """Free the model and its cache."""
        self._drafter = None

    def usage(self) -> Usage:
        """Return the requests known, and the bytes of the model and of what they hold."""
        return Usage(len(self.slots), self._drafter.num_bytes if self._drafter else 0)
