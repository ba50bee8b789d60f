"""Checks what a proposer returned, so that the engine only ever sees valid drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from specplug.proposer import Batch, Drafts, FloatArray, Int32Array

_NEAR_ONE = 1e-3
"""How far the sum of a distribution may be from 1: half-precision types are coarse."""

ReportFault = Callable[[str, str], None]
"""Called with the kind of fault (one log entry each) and what exactly was found."""


def validated(result: Any, batch: Batch, vocab_size: int, report: ReportFault) -> Drafts:
    """Return what is valid of ``result``: int32 drafts within vocabulary and length limits.

    A draft is cut at its limit, silently, and before its first invalid token, which is
    reported. A request whose row is unusable gets an empty draft and costs the others nothing.
    """
    check = _checked_columns if isinstance(result, Drafts) else _checked_rows
    try:
        drafts = check(result, batch, report)
    except Exception as error:  # a container may fail while it is read
        report(f"result raised {type(error).__name__} when read", shown(error))
        return Drafts.empty(len(batch))
    drafts = _cut_invalid(drafts, batch.max_draft_tokens, vocab_size, report)
    if drafts.probabilities is None:
        return drafts
    return replace(drafts, probabilities=_checked_probabilities(drafts, vocab_size, report))


def _checked_columns(drafts: Drafts, batch: Batch, report: ReportFault) -> Drafts:
    ids, lengths = drafts.token_ids, drafts.lengths
    n = len(batch)
    for label, array, ndim in (("token_ids", ids, 2), ("lengths", lengths, 1)):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            found = getattr(array, "dtype", type(array).__name__)
            report(f"{label} not integers", f"Drafts.{label} is {found}, expected integers")
            return Drafts.empty(n)
        if array.ndim != ndim or len(array) != n:
            report(
                f"{label} of wrong shape",
                f"Drafts.{label} has shape {array.shape} for {n} requests",
            )
            return Drafts.empty(n)
    ids, lengths = np.asarray(ids), np.asarray(lengths)  # subclasses index differently
    width = ids.shape[1]
    scores = drafts.scores
    if scores is not None and not (
        isinstance(scores, np.ndarray) and scores.dtype.kind == "f" and scores.shape == ids.shape
    ):
        report("scores not floats beside the tokens", f"expected floats of shape {ids.shape}")
        scores = None
    outside = (lengths < 0) | (lengths > width)
    if outside.any():
        report("length outside the draft", f"a length is not in [0, {width}]")
        lengths = np.where(outside, 0, lengths)
    return replace(drafts, token_ids=ids, lengths=lengths, scores=scores)


def _checked_rows(result: Any, batch: Batch, report: ReportFault) -> Drafts:
    n = len(batch)
    if not isinstance(result, Sequence) or isinstance(result, str | bytes) or len(result) != n:
        report(
            "not one row per request",
            f"propose returned {_describe(result)}, expected Drafts or {n} rows of token ids",
        )
        return Drafts.empty(n)
    limits = batch.max_draft_tokens.tolist()
    rows = [_readable_row(row, limit, report) for row, limit in zip(result, limits, strict=True)]
    drafts = Drafts.empty(n, max(map(len, rows), default=0))
    for i, row in enumerate(rows):
        drafts.token_ids[i, : len(row)] = row
        drafts.lengths[i] = len(row)
    return drafts


def _readable_row(row: Any, limit: int, report: ReportFault) -> list[int]:
    try:
        return _row(row, limit, report)
    except Exception as error:
        report(f"row raised {type(error).__name__} when read", shown(error))
        return []


def _row(row: Any, limit: int, report: ReportFault) -> list[int]:
    if isinstance(row, Exception):
        report(f"raised {type(row).__name__}", shown(row))
        return []
    if isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "iu":
        row = row[:limit].tolist()
    if not isinstance(row, Sequence) or isinstance(row, str | bytes):
        report("row is not a sequence", f"a draft is {_describe(row)}, expected token ids")
        return []
    ids: list[int] = []
    for token in islice(row, limit):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            report("token is not an integer", f"a draft holds {_describe(token)}")
            break
        # -1 stands for everything that int32 cannot hold: invalid either way.
        ids.append(int(token) if 0 <= token < 2**31 else -1)
    return ids


def _cut_invalid(
    drafts: Drafts, limits: Int32Array, vocab_size: int, report: ReportFault
) -> Drafts:
    ids, lengths = drafts.token_ids, np.minimum(drafts.lengths, limits)
    if ids.size and lengths.any():
        inside = np.arange(ids.shape[1]) < lengths[:, None]
        invalid = inside & ((ids < 0) | (ids >= vocab_size))
        if invalid.any():
            row, column = np.argwhere(invalid)[0]
            report(
                "token outside the vocabulary",
                f"token {ids[row, column]} is not in [0, {vocab_size})",
            )
            first = np.where(invalid.any(axis=1), invalid.argmax(axis=1), ids.shape[1])
            lengths = np.minimum(lengths, first)
    width = int(lengths.max(initial=0))
    kept = np.where(np.arange(width) < lengths[:, None], ids[:, :width], 0)
    scores = drafts.scores[:, :width] if drafts.scores is not None else None
    probabilities = drafts.probabilities
    if isinstance(probabilities, np.ndarray) and probabilities.shape[:2] == ids.shape:
        probabilities = probabilities[:, :width]
    return Drafts(kept.astype(np.int32), lengths.astype(np.int32), scores, probabilities)


def _checked_probabilities(
    drafts: Drafts, vocab_size: int, report: ReportFault
) -> FloatArray | None:
    """Return the probabilities if they can be what the tokens were drawn from, else None.

    A draft without them costs acceptance, not the distribution: the verifier then draws the
    target's token as if nothing had been drafted, and goes on while the two are equal.
    """
    found, shape = drafts.probabilities, (*drafts.token_ids.shape, vocab_size)
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.shape != shape:
        what = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else _describe(found)
        report("probabilities of wrong shape", f"they are {what}, expected floats {shape}")
        return None
    inside = np.arange(shape[1]) < drafts.lengths[:, None]
    found = np.where(inside[:, :, None], np.asarray(found), 0)
    rows, tokens = found[inside], drafts.token_ids[inside]
    sums = rows.sum(axis=-1, dtype=np.float64)
    right = (np.abs(sums - 1) < _NEAR_ONE) & (rows.min(axis=-1, initial=0) >= 0)
    if not right.all():
        report("probabilities are no distribution", f"one has the sum {sums[~right][0]}")
        return None
    if not (rows[np.arange(len(rows)), tokens] > 0).all():
        report("token of probability 0", "a draft holds a token that cannot have been drawn")
        return None
    return found.astype(np.float32)  # whatever it was, every engine can read that


def _describe(value: Any) -> str:
    text = shown(value, repr)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"


def shown(value: Any, form: Callable[[Any], str] = str) -> str:
    """Return ``form(value)``, also for objects that fail to say what they are."""
    try:
        return form(value)
    except Exception:
        return f"({type(value).__name__} that cannot be shown)"
