"""A causal language model that drafts for a batch and keeps its KV cache in step with the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specplug.proposer import Batch, Drafts, Int32Array
from specplug.proposers._columns import with_room
from specplug.proposers._draft_blocks import SCRATCH, BlockTable, BoolArray
from specplug.proposers._draft_cache import PooledCache, weight_bytes
from specplug.proposers._draft_sampling import Sampling, drawn

_NONE = -1


@dataclass(frozen=True, slots=True)
class _Front:
    """The drafts' newest tokens, for the requests that are still drafted for.

    Attributes:
        index: int64 ``[m]``, their rows in the batch, on the host.
        tokens: int64 ``[m]``.
        probabilities: float32 ``[m]``, the model's own, of these tokens.
        confidence: float32 ``[m]``, of the whole draft: the product of the largest probabilities.
            It must not follow from the token itself: of a sampled draft, only the unlikely tokens
            would then be left out, and those left would come from another distribution.
        drawn_from: float32 ``[m, vocab_size]``, what the tokens were sampled from; ``[m, 0]`` if
            the most likely ones were taken.
    """

    index: Any
    tokens: torch.Tensor
    probabilities: torch.Tensor
    confidence: torch.Tensor
    drawn_from: torch.Tensor

    def only(self, kept: BoolArray) -> _Front:
        if kept.all():
            return self
        at = torch.from_numpy(np.flatnonzero(kept)).to(self.tokens.device)
        columns = (self.tokens, self.probabilities, self.confidence, self.drawn_from)
        return _Front(self.index[kept], *(column[at] for column in columns))

    @classmethod
    def joined(cls, fronts: list[_Front]) -> _Front:
        return cls(
            np.concatenate([front.index for front in fronts]),
            torch.cat([front.tokens for front in fronts]),
            torch.cat([front.probabilities for front in fronts]),
            torch.cat([front.confidence for front in fronts]),
            torch.cat([front.drawn_from for front in fronts]),
        )


class Drafter:
    """Drafts greedily, or samples: one forward per drafted position for the whole batch.

    The cache of a request holds the text as far as it is *confirmed*, and behind that the tokens
    that were *guessed* last time. Of these, those that came are confirmed by the next batch, and
    the others are overwritten.

    Args:
        model: a causal language model of transformers.
        cache: its cache.
        blocks: who holds which block of it.
        max_tokens: the longest sequence that the model can take.
        vocab_size: tokens from here on are not drafted.
        num_speculative_tokens: K.
        max_prefill_tokens: the most tokens per call that requests far behind catch up, together.
        min_confidence: a draft ends before the probability of the most likely one falls below this.
        sampling: how to sample; None for the most likely tokens.
    """

    def __init__(
        self,
        model: Any,
        cache: PooledCache,
        blocks: BlockTable,
        *,
        max_tokens: int,
        vocab_size: int,
        num_speculative_tokens: int,
        max_prefill_tokens: int,
        min_confidence: float,
        sampling: Sampling | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._blocks = blocks
        self._max_tokens = max_tokens
        self.vocab_size = vocab_size
        self._weight_bytes = weight_bytes(model)
        self._num_embeddings = model.get_input_embeddings().num_embeddings
        self._near = num_speculative_tokens + 1  # what a step can bring
        self._max_prefill_tokens = max_prefill_tokens
        self._min_confidence = min_confidence
        self._sampling = sampling
        self._confirmed = np.zeros(0, np.int32)  # [slots], tokens
        self._guessed = np.zeros((0, num_speculative_tokens), np.int32)  # [slots, K]

    @property
    def model_name(self) -> str:
        """What the model is called in messages."""
        return f"The draft model '{self._model.name_or_path}' ({type(self._model).__name__})"

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights, and of the cache as far as requests hold it."""
        return self._weight_bytes + self._blocks.num_held * self._cache.block_bytes

    def begin(self, slot: int) -> None:
        """Meet a request."""
        self._blocks.begin(slot)
        self._confirmed = with_room(self._confirmed, slot)
        self._guessed = with_room(self._guessed, slot)
        self._confirmed[slot] = 0
        self._guessed[slot] = _NONE
        if self._sampling:
            self._sampling.begin(slot)

    def end(self, slot: int) -> None:
        """Free what a request holds."""
        self._blocks.end(slot)

    def rewind(self, slots: Int32Array, num_tokens: Int32Array) -> None:
        """Give up what is cached behind the first ``num_tokens[i]`` tokens, if they changed."""
        changed = num_tokens < self._confirmed[slots]
        self._confirmed[slots[changed]] = num_tokens[changed]
        self._guessed[slots[changed]] = _NONE

    @torch.inference_mode()
    def draft(self, batch: Batch) -> Drafts:
        """Take in what is new and draft for every request that is up to date then.

        Returns:
            Tokens, lengths and, as scores, the model's own probability of each token; if they were
            sampled, the probabilities of all tokens. Empty for requests that are too far behind,
            too long for the model, or without memory.
        """
        self._confirm(batch)
        limits = np.minimum(batch.max_draft_tokens, self._max_tokens - batch.num_tokens)
        served = limits > 0
        served &= self._blocks.reserve(batch.slots, np.where(served, batch.num_tokens + limits, 0))
        fronts = self._catch_up(batch, served)
        if not fronts:
            return Drafts.empty(len(batch))
        return self._drafts(batch, _Front.joined(fronts), limits)

    def _confirm(self, batch: Batch) -> None:
        """Keep the guessed tokens that came; leave at least one token to be fed."""
        slots = batch.slots
        guessed, confirmed = self._guessed[slots], self._confirmed[slots]
        at = confirmed[:, None] + np.arange(guessed.shape[1])
        there = at < batch.num_tokens[:, None]
        came = batch.token_ids[batch.rows[:, None], np.where(there, at, 0)]
        right = np.logical_and.accumulate(there & (guessed == came), axis=1)
        self._confirmed[slots] = np.minimum(confirmed + right.sum(axis=1), batch.num_tokens - 1)
        self._guessed[slots] = _NONE

    def _catch_up(self, batch: Batch, served: BoolArray) -> list[_Front]:
        """Feed what is not in the cache yet; return those for whom that was all of it.

        Requests that have about the same to catch up share a forward: as a rule, all of them.
        """
        backlog = np.where(served, batch.num_tokens - self._confirmed[batch.slots], 0)
        take = bounded(backlog, self._near, self._max_prefill_tokens)
        size = np.ceil(np.log2(np.maximum(take, self._near)))
        fronts = []
        for group in np.unique(size[take > 0]):
            index = np.flatnonzero((size == group) & (take > 0))
            logits = self._feed(batch, index, take[index])
            done = take[index] == backlog[index]
            if done.any():
                fronts.append(self._chosen(batch, index, 0, logits).only(done))
        self._confirmed[batch.slots] += take
        return fronts

    def _feed(self, batch: Batch, index: Any, take: Int32Array) -> torch.Tensor:
        """Feed the next ``take[i]`` tokens of some rows, padded on the left; return logits."""
        slots, rows = batch.slots[index], batch.rows[index]
        begins = self._confirmed[slots][:, None]
        positions = begins + take[:, None] - np.arange(int(take.max()), 0, -1)
        padding = positions < begins
        positions = np.where(padding, 0, positions)
        places = self._blocks.places(slots, int(positions.max()) + 1)
        write = np.where(padding, SCRATCH, np.take_along_axis(places, positions, axis=1))
        tokens = batch.token_ids[rows[:, None], positions]
        tokens = np.where(tokens < self._num_embeddings, tokens, 0)
        return self._forward(*map(self._tensor, (tokens, positions, places, write)))

    def _drafts(self, batch: Batch, front: _Front, limits: Int32Array) -> Drafts:
        """Go on from the first token of each draft, position by position."""
        width = int(limits[front.index].max())
        sizes = batch.num_tokens
        places = self._tensor(self._blocks.places(batch.slots, int(sizes.max()) + width))
        begins, lengths = self._tensor(sizes), np.zeros(len(batch), np.int32)
        tokens = torch.zeros((len(batch), width), dtype=torch.int64, device=places.device)
        scores = torch.zeros((len(batch), width), device=places.device)
        from_all = self._room_for_probabilities(len(batch), width)
        for position in range(width):
            front = front.only(self._sure(front) & (limits[front.index] > position))
            if not len(front.index):
                break
            at = self._tensor(front.index)
            tokens[at, position], scores[at, position] = front.tokens, front.probabilities
            from_all[at, position, : front.drawn_from.shape[1]] = front.drawn_from
            lengths[front.index] += 1
            if position + 1 < width:
                now = (begins[at] + position)[:, None]
                read = places[at, : int(sizes[front.index].max()) + position + 1]
                logits = self._forward(front.tokens[:, None], now, read, read.gather(1, now))
                front = self._chosen(batch, front.index, position + 1, logits, front.confidence)
        drafted = tokens.cpu().numpy().astype(np.int32)
        self._guessed[batch.slots, : width - 1] = np.where(
            np.arange(width - 1) < lengths[:, None], drafted[:, : width - 1], _NONE
        )
        return Drafts(
            drafted,
            lengths,
            scores.cpu().numpy(),
            from_all.cpu().numpy() if self._sampling else None,
        )

    def _room_for_probabilities(self, num_requests: int, width: int) -> torch.Tensor:
        size = self._sampling.vocab_size if self._sampling else 0
        return torch.zeros((num_requests, width, size), device=self._model.device)

    def _sure(self, front: _Front) -> BoolArray:
        if not self._min_confidence:  # then nothing has to come from the device
            return np.ones(len(front.index), np.bool_)
        return (front.confidence >= self._min_confidence).cpu().numpy()  # type: ignore[no-any-return]

    def _chosen(
        self, batch: Batch, index: Any, position: int, logits: torch.Tensor, confidence: Any = 1.0
    ) -> _Front:
        """Choose a token for each of some rows, at a position of their drafts."""
        most, tokens = logits.max(dim=-1)
        total = logits.logsumexp(dim=-1)
        largest = probabilities = torch.exp(most - total)
        drawn_from = logits[:, :0]
        if self._sampling:
            uniform = self._sampling.uniform(batch.slots[index], batch.num_tokens[index] + position)
            tokens, drawn_from = drawn(logits, self._sampling.temperature, uniform)
            probabilities = torch.exp(logits.gather(1, tokens[:, None])[:, 0] - total)
        return _Front(index, tokens, probabilities, largest * confidence, drawn_from)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, read: torch.Tensor, write: torch.Tensor
    ) -> torch.Tensor:
        """Run the model over the newest tokens of some requests.

        Args:
            tokens: int64 ``[n, width]``.
            positions: int64 ``[n, width]``, their places in the text.
            read: int64 ``[n, length]``, where the text lies in the cache, these tokens included.
            write: int64 ``[n, width]``, where these tokens lie.

        Returns:
            Logits behind the last token, float32 ``[n, vocab_size]``.
        """
        self._cache.read, self._cache.write = read, write
        later = torch.arange(read.shape[1], device=read.device) > positions[:, None, :, None]
        dtype = self._model.dtype
        mask = torch.zeros(later.shape, dtype=dtype, device=read.device)
        result = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask.masked_fill_(later, torch.finfo(dtype).min),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return result.logits[:, -1, : self.vocab_size].float()

    def plain_logits(self, tokens: list[int]) -> torch.Tensor:
        """Return what the model says without a cache, float32 ``[len(tokens), vocab_size]``."""
        result = self._model(input_ids=self._tensor(np.array([tokens])), use_cache=False)
        return result.logits[0, :, : self.vocab_size].float()

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._model.device)


def bounded(backlog: Int32Array, near: int, most: int) -> Int32Array:
    """Return how many tokens each request catches up now.

    Args:
        backlog: int32 ``[n]``, what each is behind.
        near: who is behind by no more is brought up to date at once.
        most: what the others may catch up together; who comes first in the batch goes first.
    """
    far = np.where(backlog > near, backlog, 0)
    left = np.maximum(most - (np.cumsum(far) - far), 0)
    return np.where(backlog > near, np.minimum(far, left), backlog)
