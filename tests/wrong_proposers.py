"""Proposers that each make one mistake, by the rule that they break."""

from __future__ import annotations

import random

import numpy as np

from specplug import Drafts, Proposer, ProposerSpec, Usage


class LastToken(Proposer):
    """Makes no mistake: drafts the last token, over and over."""

    def __init__(self, _options=None):
        pass

    def propose(self, batch):
        return [[self.token(batch, i)] * int(self.limit(batch, i)) for i in range(len(batch))]

    def token(self, batch, i):
        return int(batch.tokens(i)[-1])

    def limit(self, batch, i):
        return batch.max_draft_tokens[i]


class Silent(LastToken):
    def limit(self, batch, i):
        return 0


class Random(LastToken):
    """Chance decides."""

    def prepare(self, engine):
        self._vocab_size = engine.vocab_size

    def token(self, batch, i):
        return random.randrange(self._vocab_size)


class Hashing(LastToken):
    """The hash of a word decides."""

    def prepare(self, engine):
        self._vocab_size = engine.vocab_size

    def token(self, batch, i):
        return hash(str(super().token(batch, i))) % self._vocab_size


class TooLong(LastToken):
    def limit(self, batch, i):
        return batch.max_draft_tokens[i] + 1


class OutsideVocabulary(LastToken):
    """Takes the size of the vocabulary for a token."""

    def prepare(self, engine):
        self._vocab_size = engine.vocab_size

    def token(self, batch, i):
        return (super().token(batch, i) + 1) % (self._vocab_size + 1)


class Floats(LastToken):
    def token(self, batch, i):
        return float(super().token(batch, i))


class Percent(LastToken):
    """Gives scores in percent."""

    def propose(self, batch):
        width = int(batch.max_draft_tokens.max())
        tokens = np.array([[self.token(batch, i)] * width for i in range(len(batch))])
        return Drafts(tokens, batch.max_draft_tokens, np.full(tokens.shape, 90.0))


class NeedsTwoTokens(LastToken):
    """Raises for texts of two tokens, which prompts of one token bring."""

    def token(self, batch, i):
        return int(batch.tokens(i)[-3])


class NeedsDrafts(LastToken):
    """Raises when nothing was drafted."""

    def observe(self, acceptance):
        for draft in acceptance.draft_token_ids:
            draft[0]


class Remembering(LastToken):
    """Never forgets the requests it met."""

    def __init__(self, _options=None):
        self._known = {}

    def begin(self, request):
        self._known[request.id] = request.prompt_token_ids


class Counting(LastToken):
    """Counts requests that have ended."""

    def __init__(self, _options=None):
        self._count = 0

    def begin(self, request):
        self._count += 1

    def usage(self):
        return Usage(self._count, 0)


class Holding(LastToken):
    """Holds bytes that it does not give back."""

    def __init__(self, _options=None):
        self._bytes = 0

    def begin(self, request):
        self._bytes = 100

    def usage(self):
        return Usage(0, self._bytes)


class NotCleared(LastToken):
    """What a slot holds is left to the next request."""

    def __init__(self, _options=None):
        self._first = {}

    def begin(self, request):
        self._first.setdefault(request.slot, request.prompt_token_ids[0])

    def token(self, batch, i):
        return self._first[int(batch.slots[i])]


class Chained(LastToken):
    """Drafts for each request what came for the one before it."""

    def begin(self, request):
        self._latest, self._tokens = 0, [0] * 8

    def observe(self, acceptance):
        for slot, new in zip(acceptance.slots, acceptance.new_token_ids, strict=True):
            self._tokens[slot], self._latest = self._latest, new[-1]

    def token(self, batch, i):
        return self._tokens[batch.slots[i]]


class ByNeighbours(LastToken):
    """How many requests there are decides."""

    def limit(self, batch, i):
        return min(len(batch), batch.max_draft_tokens[i])


class OneNewToken(LastToken):
    """Counts the tokens of a text by the calls."""

    def __init__(self, _options=None):
        self._counts = {}

    def begin(self, request):
        self._counts[request.id] = 0

    def limit(self, batch, i):
        count = self._counts[batch.request_ids[i]] = self._counts[batch.request_ids[i]] + 1
        return min(1 + count % 2, batch.max_draft_tokens[i])

    def end(self, request_id):
        del self._counts[request_id]


class KeepsArrays(LastToken):
    """Drafts from what it was shown the last time, which is the engine's."""

    def __init__(self, _options=None):
        self._texts = {}

    def token(self, batch, i):
        text = self._texts.get(batch.request_ids[i], batch.tokens(i))
        self._texts[batch.request_ids[i]] = batch.tokens(i)
        return int(text[0])

    def end(self, request_id):
        self._texts.pop(request_id, None)


class ReadsBehind(LastToken):
    """Takes the whole row for the text."""

    def token(self, batch, i):
        return int(batch.token_ids[batch.rows[i], -1])


class Writing(LastToken):
    """Uses a column of the batch for itself."""

    def propose(self, batch):
        batch.num_new_tokens[:] = 0
        return super().propose(batch)


class Rereading(LastToken):
    """Reads the whole text in each step."""

    def token(self, batch, i):
        return batch.tokens(i).tolist()[-1]


WRONG = {
    "drafts": [Silent],
    "determinism": [Random],
    "determinism_across_processes": [Hashing],
    "limits": [TooLong, OutsideVocabulary, Floats, Percent],
    "faults": [NeedsTwoTokens, NeedsDrafts],
    "no_state_after_end": [Remembering, Counting, Holding],
    "new_after_end": [NotCleared],
    "order_independence": [Chained],
    "batch_independence": [ByNeighbours],
    "resume": [OneNewToken],
    "reads": [KeepsArrays, ReadsBehind],
    "inputs_unchanged": [Writing],
    "cost_growth": [Rereading],
}

SPECS = {
    kind.__name__: ProposerSpec("wrong", factory=f"{__name__}:{kind.__name__}")
    for kinds in ([LastToken], *WRONG.values())
    for kind in kinds
}
