"""Lets a model draft for a target with another tokenizer: tokens to text, and back.

As universal assisted generation does (https://huggingface.co/blog/universal_assisted_generation):
the draft model reads the target's text in its own tokens, and what it goes on with is tokenised
as the target would have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specplug.proposer import Batch, Drafts, Int32Array, Request
from specplug.proposers._columns import with_room
from specplug.proposers._draft_blocks import BoolArray

_PIECE = 64
"""Tokens of the target between two boundaries."""
_TRIED = 16
"""How many places are tried for a boundary."""
_PIECES_PER_CALL = 64
"""How much of a long text a request is read on at once."""
_INCOMPLETE = "\ufffd"
"""What half a character decodes to."""


@dataclass(slots=True)
class _Text:
    """A request's text up to a boundary that both tokenizers have, and what follows it."""

    num_target: int = 0  # the target's tokens before the boundary
    num_draft: int = 0  # the draft model's tokens before it
    num_read: int = 0  # the draft model's tokens of all that was read
    complete: bool = False  # all of the target's tokens were read
    tail_ids: list[int] = field(default_factory=list)  # the target's, behind the boundary
    tail: str = ""  # their text


class Translator:
    """Keeps each request's text in the draft model's tokens.

    Args:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.
        max_tokens: the longest sequence that the draft model can take.
    """

    def __init__(self, target: Any, draft: Any, max_tokens: int) -> None:
        self._target, self._draft = target, draft
        self._specials = frozenset(draft.all_special_ids)
        begin = draft.bos_token_id
        self._begin = [begin] if begin is not None and draft.encode("")[:1] == [begin] else []
        self._texts: dict[int, _Text] = {}
        self._token_ids = np.zeros((0, max_tokens), np.int32)  # [slots, max_tokens]

    def begin(self, request: Request) -> None:
        """Meet a request."""
        skipped = int(list(request.prompt_token_ids[:1]) == [self._target.bos_token_id])
        num_begun = len(self._begin)
        self._texts[request.slot] = _Text(skipped, num_begun, num_begun)
        self._token_ids = with_room(self._token_ids, request.slot)
        self._token_ids[request.slot, :num_begun] = self._begin

    def end(self, slot: int) -> None:
        """Forget a request."""
        del self._texts[slot]

    def to_draft(self, batch: Batch) -> tuple[Batch, BoolArray, Int32Array]:
        """Return the batch in the draft model's tokens, as far as it can be drafted for.

        Returns:
            That batch; ``[n]``, which requests are in it: not those that are read on in the next
            call or are too long; int32 ``[n]``, how many tokens of each are as they were.
        """
        same = np.array([self._read(batch, i) for i in range(len(batch))], np.int32)
        texts = [self._texts[slot] for slot in batch.slots.tolist()]
        read = np.array([text.complete for text in texts], np.bool_)
        num_read = np.array([text.num_read for text in texts], np.int32)
        theirs = replace(batch, token_ids=self._token_ids, rows=batch.slots, num_tokens=num_read)
        return theirs.only(np.flatnonzero(read)), read, same

    def _read(self, batch: Batch, i: int) -> int:
        """Read a request on; return how many of its tokens are as they were."""
        slot, tokens = int(batch.slots[i]), batch.tokens(i)
        text, ids = self._texts[slot], list[int]()
        begin = text.num_draft
        for _ in range(_PIECES_PER_CALL):
            if len(tokens) - text.num_target < 2 * _PIECE:
                break
            size, piece = self._piece(tokens[text.num_target :][: 2 * _PIECE].tolist())
            ids += piece
            text.num_target += size
            text.num_draft += len(piece)
        text.tail_ids = tokens[text.num_target :][: 2 * _PIECE].tolist()
        text.tail = _text(self._target, text.tail_ids)
        ids += _ids(self._draft, text.tail)
        text.complete = text.num_target + len(text.tail_ids) == len(tokens)
        return self._store(slot, begin, ids)

    def _piece(self, rest: list[int]) -> tuple[int, list[int]]:
        """Find a boundary that both tokenizers have; return what is before it, in both."""
        text = _text(self._target, rest)
        ids = _ids(self._draft, text)
        for size in range(_PIECE, _PIECE + _TRIED):
            before = _text(self._target, rest[:size])
            piece = _ids(self._draft, before)
            if text.startswith(before) and ids[: len(piece)] == piece:
                return size, piece
        return _PIECE, _ids(self._draft, _text(self._target, rest[:_PIECE]))

    def _store(self, slot: int, begin: int, ids: list[int]) -> int:
        """Replace the tokens behind ``begin``; return how many of all are as they were."""
        text, row = self._texts[slot], self._token_ids[slot]
        room = len(row) - begin
        if len(ids) > room:
            ids, text.complete = ids[:room], False
        before = row[begin : text.num_read].tolist()
        text.num_read = begin + len(ids)
        row[begin : text.num_read] = ids
        return begin + _num_common(before, ids)

    def to_target(self, batch: Batch, read: BoolArray, drafts: Drafts) -> Drafts:
        """Return the drafts for a batch in the target's tokens; without scores."""
        written = Drafts.empty(len(batch), int(batch.max_draft_tokens.max()))
        for i, draft in zip(np.flatnonzero(read).tolist(), drafts.to_lists(), strict=True):
            if draft:
                ids = self._written(int(batch.slots[i]), draft)[: batch.max_draft_tokens[i]]
                written.token_ids[i, : len(ids)] = ids
                written.lengths[i] = len(ids)
        return written

    def _written(self, slot: int, draft: list[int]) -> list[int]:
        text = self._texts[slot]
        end = next((i for i, token in enumerate(draft) if token in self._specials), len(draft))
        read = self._token_ids[slot, text.num_draft : text.num_read].tolist()
        new = _text(self._draft, read + draft[:end])[len(_text(self._draft, read)) :]
        new = new.rstrip(_INCOMPLETE)
        ids, known = _ids(self._target, text.tail + new), len(text.tail_ids)
        # Where the target would have put the boundary elsewhere, the draft begins at its last.
        return ids[known:] if ids[:known] == text.tail_ids else _ids(self._target, new)


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _num_common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
