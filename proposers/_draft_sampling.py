"""Sampled drafts: the same tokens on every rank and in every run."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.errors import CapabilityError
from specplug.proposer import Capability, EngineInfo, Int32Array
from specplug.proposers._columns import with_room
from specplug.proposers._draft_options import DrafterOptions


class Sampling:
    """At which temperature, and with which random numbers, tokens are drawn.

    The numbers follow from a seed, how many requests came before, and the position in the text.
    Requests need numbers of their own: with the same for all, equal prompts would be drafted alike,
    and their samples, each right by itself, would depend on each other.

    Args:
        temperature: above 0.
        seed: of all requests.
        vocab_size: the target's.
    """

    def __init__(self, temperature: float, seed: int, vocab_size: int) -> None:
        self.temperature = temperature
        self.vocab_size = vocab_size
        self._seed = seed
        self._num_begun = 0
        self._numbers = np.zeros(0, np.int64)  # [slots]

    def begin(self, slot: int) -> None:
        """Meet a request."""
        self._numbers = with_room(self._numbers, slot)
        self._numbers[slot] = self._num_begun
        self._num_begun += 1

    def uniform(self, slots: Int32Array, positions: Int32Array) -> NDArray[np.float64]:
        """Return a number in [0, 1) for a position of each request, ``[n]``.

        A position that was drafted and not looked at by the verifier gets the same one again, which
        is as good as new.
        """
        pairs = zip(self._numbers[slots].tolist(), positions.tolist(), strict=True)
        return np.array([self._number(*pair) for pair in pairs])

    def _number(self, request: int, position: int) -> float:
        key = np.array([self._seed, request], np.uint64)
        return np.random.Generator(np.random.Philox(counter=position, key=key)).random()


def sampling_of(options: DrafterOptions, engine: EngineInfo) -> Sampling | None:
    """Return how drafts are sampled, None if they are not.

    Raises:
        CapabilityError: they are to be, and the engine cannot use their probabilities.
    """
    if not options.temperature:
        return None
    if Capability.DRAFT_PROBABILITIES not in engine.provides:
        raise CapabilityError(
            f"The option 'temperature' is {options.temperature}, and here the probabilities of "
            f"drafts cannot be used (backend '{engine.backend}'; no cascade can): a sampled draft "
            "would only be accepted less often.",
            hint="Leave it at 0.",
        )
    return Sampling(options.temperature, options.seed, engine.vocab_size)


def drawn(
    logits: torch.Tensor, temperature: float, uniform: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row, by the inverse of the cumulative distribution.

    Args:
        logits: float32 ``[m, vocab_size]``.
        temperature: above 0.
        uniform: ``[m]``, in [0, 1).

    Returns:
        int64 ``[m]``, the tokens; float32 ``[m, vocab_size]``, what they were drawn from.
    """
    probabilities = (logits / temperature).softmax(dim=-1)
    # In 32 bits, the rounding of a sum over a whole vocabulary would show.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    at = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    # The first token whose sum is above: so one of probability 0 is not drawn.
    tokens = torch.searchsorted(cumulative, at, right=True)[:, 0]
    return tokens.clamp_max(logits.shape[1] - 1), probabilities
