"""A debugging aid: do all tensor-parallel ranks draft the same?

Each rank runs its own proposer and verifies its own drafts, so ranks that differ corrupt the
output. A proposer that reads a clock, hash order or unseeded randomness makes them differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from specplug.backends.vllm.settings import VllmSettings
from specplug.proposer import Drafts

logger = logging.getLogger(__name__)

_MOST_REPORTS = 10


class RankCheck:
    """Compares the drafts of every step among tensor-parallel ranks.

    Args:
        group: vLLM's tensor-parallel group.

    Attributes:
        num_steps: steps compared.
        num_differing: steps in which ranks differed.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.num_steps = 0
        self.num_differing = 0

    @classmethod
    def make(cls, world_size: int, settings: VllmSettings) -> RankCheck | None:
        """Return a check if the user wants one and there is something to compare."""
        if not settings.check_rank_agreement or world_size == 1:
            return None
        from vllm.distributed import get_tp_group

        return cls(get_tp_group())

    def agreed(self, request_ids: Sequence[str], drafts: Drafts) -> Drafts:
        """Return the drafts if all ranks have the same, else none at all, and report it.

        Every rank must call this in every step: it is a collective.
        """
        import torch.distributed

        rows = list(zip(request_ids, map(tuple, drafts.to_lists()), strict=True))
        everyone: list[Any] = [None] * self._group.world_size
        torch.distributed.all_gather_object(everyone, rows, group=self._group.cpu_group)
        self.num_steps += 1
        differing = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if not differing:
            return drafts
        self.num_differing += 1
        if self._group.rank_in_group == 0 and self.num_differing <= _MOST_REPORTS:
            rank = differing[0]
            mine, other = next(
                pair for pair in zip(rows, everyone[rank], strict=False) if pair[0] != pair[1]
            )
            logger.error(
                "step %d: rank 0 drafted %s for request %s, rank %d drafted %s for request %s. "
                "The proposer depends on more than the tokens; nothing is drafted in this step.",
                self.num_steps, list(mine[1]), mine[0], rank, list(other[1]), other[0],
            )  # fmt: skip
        return Drafts.empty(len(rows))
