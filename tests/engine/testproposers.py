"""Proposers that only tests need: one whose strategy is exchanged while the engine runs, and
the strategies that try to do harm."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from specplug import (
    Batch,
    Capability,
    DeviceProposer,
    Drafts,
    Options,
    PluginManager,
    Proposer,
    ProposerSpec,
    Usage,
)

ALPHABET = range(20, 84)
"""The tokens that the made-up model usually produces: characters."""


class Counted(Proposer):
    """Counts the requests it knows, so that a test can see that none is left."""

    def __init__(self):
        self.alive: list[str] = []
        self.begun = 0

    def begin(self, request):
        self.alive.append(request.id)
        self.begun += 1

    def end(self, request_id):
        self.alive.remove(request_id)

    def usage(self):
        return Usage(len(self.alive), 0)

    def propose(self, batch):
        return [[] for _ in range(len(batch))]


class Random(Counted):
    """Drafts tokens that are nearly always wrong; the same on every run."""

    def propose(self, batch: Batch):
        rows = []
        for i in range(len(batch)):
            rng = np.random.default_rng(batch.tokens(i).astype(np.int64))
            rows.append(rng.choice(ALPHABET, batch.max_draft_tokens[i]).tolist())
        return rows


class Coin(Counted):
    """Drafts uniformly among the tokens of a tiny vocabulary, anew each time."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self._vocab_size, self._rng = vocab_size, np.random.default_rng(0)

    def propose(self, batch: Batch):
        shape = len(batch), int(batch.max_draft_tokens.max())
        return Drafts(self._rng.integers(0, self._vocab_size, shape), batch.max_draft_tokens)


class Oracle(Counted):
    """Knows the answers: drafts exactly what the target is going to say."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]):
        super().__init__()
        self._answers = answers

    def propose(self, batch: Batch):
        rows = []
        for i in range(len(batch)):
            tokens, n = batch.tokens(i).tolist(), int(batch.num_prompt_tokens[i])
            rows.append(self._answers.get(tuple(tokens[:n]), [])[len(tokens) - n :])
        return rows


class ByRank(Counted):
    """Drafts something else on each tensor-parallel rank, as no proposer may."""

    def propose(self, batch: Batch):
        return [[ALPHABET[Switch.engine.rank]] for _ in range(len(batch))]


class Raising(Counted):
    """Fails every time, and with everything it is asked."""

    def propose(self, batch):
        raise IndexError("the window is longer than the prompt")

    def observe(self, acceptance):
        raise ZeroDivisionError


class Nonsense(Counted):
    """Returns something else each time, never anything right."""

    def __init__(self, vocab_size: int = 512):
        super().__init__()
        self._calls = 0
        v = vocab_size
        self._rows = [
            None, [v], [v + 5], [-1] * 4, [100, v, 101], [1.5, 2.5], [float("nan")], "text", 7,
            ["1"], [[1]], [True, False], [2**40], [100] * 500, np.array([1.0]), {1: 2},
            np.array([[1, 2]]), [None], ValueError("in a row"),
        ]  # fmt: skip

    def propose(self, batch: Batch):
        self._calls += 1
        n = len(batch)
        whole = [
            None, 3, [], [[1]] * (n + 1), Drafts(np.zeros((n, 4)), np.full(n, 4)),
            Drafts(np.zeros((n, 4), int), np.full(n, 9)), Drafts(None, None),
            Drafts(np.zeros(4, int), np.full(n, 4)), Drafts(np.full((n, 4), -1), np.full(n, 4)),
        ]  # fmt: skip
        if self._calls % 3 == 0:
            return whole[self._calls // 3 % len(whole)]
        return [self._rows[(self._calls + i) % len(self._rows)] for i in range(n)]


class Switch(Proposer):
    """Hands every call to ``Switch.current``, which a test sets between requests."""

    uses = frozenset({Capability.TARGET_TOKENS})
    current: Proposer = Counted()
    engine = None

    def prepare(self, engine):
        type(self).engine = engine

    def begin(self, request):
        self.current.begin(request)

    def propose(self, batch):
        return self.current.propose(batch)

    def observe(self, acceptance):
        self.current.observe(acceptance)

    def end(self, request_id):
        self.current.end(request_id)

    def usage(self):
        return self.current.usage()

    @classmethod
    def to(cls, make: "str | Callable[[], Proposer]") -> Proposer:
        """Switch to a registered proposer by name, or to what ``make`` returns."""
        if isinstance(make, str):
            cls.current, _ = PluginManager().create(make, {}, frozenset())
            cls.current.prepare(cls.engine)
        else:
            cls.current = make()
        return cls.current


class DeviceLookup(DeviceProposer):
    """Continues as the text went on after the last two tokens occurred before, in torch.

    Attributes:
        fault: what a test wants it to do instead.
        known: the requests that it knows.
    """

    fault = ""
    known: ClassVar[set[str]] = set()

    def begin(self, request):
        self.known.add(request.id)

    def end(self, request_id):
        self.known.remove(request_id)

    def propose_on_device(self, batch):
        import torch

        n, k = len(batch), batch.max_draft_tokens
        if self.fault == "raise":
            raise RuntimeError("no memory left on the device")
        if self.fault:
            return {
                "floats": torch.zeros(n, k),
                "nothing": None,
                "outside": torch.full((n, k), 512),
            }[self.fault]
        tokens, length = batch.token_ids[batch.rows].long(), batch.num_tokens.long().unsqueeze(1)
        last = tokens.gather(1, length - 1)
        before = tokens.gather(1, (length - 2).clamp(min=0))
        ends = torch.arange(1, tokens.shape[1])
        hits = (tokens[:, 1:] == last) & (tokens[:, :-1] == before) & (ends < length - 1)
        end = (hits * ends).amax(1, keepdim=True)  # 0 if there is none
        positions = end + 1 + torch.arange(k)
        drafts = tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1))
        return torch.where((end > 0) & (positions < length), drafts, -1)


def spec(name: str, factory, needs=frozenset()) -> ProposerSpec:
    return ProposerSpec(name, lambda _options: factory(), options=Options, needs=needs)


switch = spec("switch", Switch)
raising = spec("raising", Raising)
random_tokens = spec("random_tokens", Random)
device_lookup = spec("device_lookup", DeviceLookup, frozenset({Capability.DEVICE_TENSORS}))
