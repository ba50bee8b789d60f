"""What a proposer that never drafts adds to a step of the V2 runner: counted, not timed.

Triton's interpreter takes nearly all the time here, which says nothing about a GPU. How often
kernels are launched and how many bytes are copied does.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
from harness import PROMPTS, RUNNER, sampling
from testproposers import Counted, Switch

pytestmark = pytest.mark.skipif(
    RUNNER != "v2",
    reason="V1 has no kernels on a CPU, and with async scheduling V2 verifies K slots anyway",
)

PARAMS = {"max_tokens": 12, "ignore_eos": True}


@contextmanager
def counted_launches():
    from triton.runtime.interpreter import GridExecutor

    launches: Counter[str] = Counter()
    execute = GridExecutor.__call__

    def counting(self, *arguments, **named):
        launches[self.fn.__name__] += 1
        return execute(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counting)
        yield launches


def launched(engine, prompts):
    with counted_launches() as launches:
        outputs = engine.generate(prompts, sampling(PARAMS))
    return [output.tokens for output in outputs], launches


def test_without_drafts_nothing_more_is_launched(start, tiny_model):
    plain = start(tiny_model)
    speculative = start(tiny_model, "switch", 4)
    Switch.to(Counted)

    answers, expected = launched(plain, PROMPTS[:2])
    tokens, launches = launched(speculative, PROMPTS[:2])

    assert tokens == answers
    assert launches == expected and len(launches) > 5
