"""Compares the vocabularies of target and draft model."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two vocabularies compare.

    Attributes:
        num_common: ids below this stand for the same token in both, or for none in one of them.
        same: whether the draft model can read and write the target's ids as they are.
        difference: which tokens differ, in words; empty if none do.
    """

    num_common: int
    same: bool
    difference: str


def compare(target: dict[str, int], draft: dict[str, int]) -> Comparison:
    """Compare two vocabularies, each a mapping of tokens to ids.

    Vocabularies of which one only has more tokens behind the other's count as the same: ids that
    the draft model does not know are read as its first token, and none is drafted that the
    target does not know.
    """
    theirs, ours = _by_id(target), _by_id(draft)
    differing = sorted(id_ for id_ in theirs.keys() & ours.keys() if theirs[id_] != ours[id_])
    if differing:
        told = ", ".join(
            f"id {id_} is {theirs[id_]!r} for the target and {ours[id_]!r} for the draft model"
            for id_ in differing[:_SHOWN]
        )
        return Comparison(differing[0], False, f"{len(differing)} tokens differ: {told}")
    only_ours = ours.keys() - theirs.keys()
    num_common = min(only_ours, default=max(ours, default=-1) + 1)
    told = "; ".join(
        f"only the {whose} has {_listed(tokens)}"
        for whose, tokens in (
            ("target", [theirs[id_] for id_ in sorted(theirs.keys() - ours.keys())]),
            ("draft model", [ours[id_] for id_ in sorted(only_ours)]),
        )
        if tokens
    )
    return Comparison(num_common, True, told)


def _by_id(vocabulary: dict[str, int]) -> dict[int, str]:
    return {id_: token for token, id_ in vocabulary.items()}


def _listed(tokens: list[str]) -> str:
    shown = ", ".join(map(repr, tokens[:_SHOWN]))
    return shown if len(tokens) <= _SHOWN else f"{shown} and {len(tokens) - _SHOWN} more"
