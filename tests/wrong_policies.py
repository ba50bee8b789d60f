"""Length policies that each make one mistake, by the rule that they break."""

from __future__ import annotations

import random
import time

import numpy as np

from specplug import LengthPolicy, LengthPolicySpec


class Half(LengthPolicy):
    """Makes no mistake: half of each draft."""

    def __init__(self, _options=None):
        pass

    def choose(self, batch, drafts, load):
        return drafts.lengths // 2


class Chance(Half):
    def choose(self, batch, drafts, load):
        return np.array([random.randint(0, length) for length in drafts.lengths])


class Hashing(Half):
    def choose(self, batch, drafts, load):
        odd = np.array([hash(name) % 2 for name in batch.request_ids])
        return np.maximum(drafts.lengths - odd, 0)


class Longer(Half):
    def choose(self, batch, drafts, load):
        return drafts.lengths + 1


class Negative(Half):
    def ask(self, batch, load):
        return batch.max_draft_tokens - 2


class Fractions(Half):
    def choose(self, batch, drafts, load):
        return drafts.lengths * 0.5


class TooFew(Half):
    def choose(self, batch, drafts, load):
        return drafts.lengths[:1]


class NeedsScores(Half):
    def choose(self, batch, drafts, load):
        return drafts.lengths * (drafts.scores[:, 0] > 0)


class NeedsCosts(Half):
    def choose(self, batch, drafts, load):
        return np.minimum(drafts.lengths, int(load.costs.per_draft_token / load.costs.seconds[0]))


class Remembering(Half):
    def __init__(self, _options=None):
        self._known = []

    def begin(self, request):
        self._known.append(request)


class NotCleared(Half):
    def __init__(self, _options=None):
        self._right = {}

    def observe(self, outcome):
        for slot, matched in zip(outcome.slots.tolist(), outcome.num_matched, strict=True):
            self._right[slot] = matched

    def choose(self, batch, drafts, load):
        most = [self._right.get(slot, 1) for slot in batch.slots.tolist()]
        return np.minimum(drafts.lengths, most)


class FirstOnly(Half):
    def choose(self, batch, drafts, load):
        return np.where(np.arange(len(batch)) == 0, drafts.lengths, 0)


class Writing(Half):
    def choose(self, batch, drafts, load):
        drafts.lengths[:] //= 2
        return drafts.lengths


class Slow(Half):
    def ask(self, batch, load):
        time.sleep(1e-4 * len(batch))
        return super().ask(batch, load)


WRONG = {
    "determinism": [Chance],
    "determinism_across_processes": [Hashing],
    "limits": [Longer, Negative, Fractions, TooFew],
    "faults": [NeedsScores, NeedsCosts],
    "no_state_after_end": [Remembering],
    "new_after_end": [NotCleared],
    "order_independence": [FirstOnly],
    "inputs_unchanged": [Writing],
    "cost": [Slow],
}

SPECS = {
    kind.__name__: LengthPolicySpec("wrong", factory=f"{__name__}:{kind.__name__}")
    for kinds in ([Half], *WRONG.values())
    for kind in kinds
}
