"""The target's own tokens at verified positions, and what ``lookahead`` makes of them."""

from __future__ import annotations

import pytest
from harness import PROMPTS, RUNNER, assert_counters_agree, sampling

PARAMS = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def answers(start, tiny_model):
    return start(tiny_model).generate(PROMPTS, sampling(PARAMS))


@pytest.fixture(scope="module")
def engine(answers, start, tiny_model):
    return start(tiny_model, "lookahead", 5)


def watched(engine, monkeypatch, params=PARAMS):
    """Generate; return the outputs and every acceptance that the proposer was shown."""
    seen = []
    observe = engine.runtime.proposer.observe

    def watch(acceptance):
        seen.append(acceptance)
        observe(acceptance)

    monkeypatch.setattr(engine.runtime.proposer, "observe", watch)
    engine.reset_counters()
    return engine.generate(PROMPTS, sampling(params)), seen


def test_the_text_is_the_engines_own_in_fewer_steps(engine, answers, monkeypatch):
    outputs, _ = watched(engine, monkeypatch)
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert engine.runtime.counters.tokens_per_step > 1.05
    assert engine.runtime.counters.num_faults == 0
    assert engine.runtime.proposer.usage().num_requests == 0
    assert_counters_agree(engine)


def rows(acceptances):
    for one in acceptances:
        targets = one.target_token_ids or [()] * len(one.request_ids)
        yield from zip(
            one.draft_token_ids, targets, one.num_accepted.tolist(), one.new_token_ids, strict=True
        )


def test_the_target_tokens_are_what_greedy_sampling_chose(engine, answers, monkeypatch):
    _, seen = watched(engine, monkeypatch)
    rejected = 0
    for draft, target, accepted, new in rows(seen):
        if draft:
            assert len(target) == len(draft) + 1
            assert list(target[: accepted + 1]) == new
            rejected += len(draft) - accepted
        else:
            assert not target
    assert rejected > 10 * len(PROMPTS)


def test_under_random_sampling_they_are_guesses_and_nothing_fails(engine, monkeypatch):
    # Triton's interpreter, on V2, cannot run top_k.
    top_k = {"top_k": 50} if RUNNER == "v1" else {}
    _, seen = watched(engine, monkeypatch, {"max_tokens": 30, "temperature": 1.0, **top_k})
    assert all(len(target) == len(draft) + 1 for draft, target, _, _ in rows(seen) if draft)
    assert engine.runtime.counters.num_faults == 0


def test_who_does_not_use_them_gets_none_and_pays_nothing(engine, answers, monkeypatch):
    import torch

    monkeypatch.setattr(engine.runtime, "uses", lambda capability: False)
    argmaxed = []
    argmax = torch.Tensor.argmax
    monkeypatch.setattr(
        torch.Tensor,
        "argmax",
        lambda self, *a, **k: argmaxed.append(self.shape) or argmax(self, *a, **k),
    )
    outputs, seen = watched(engine, monkeypatch)
    assert [output.tokens for output in outputs] == [answer.tokens for answer in answers]
    assert all(one.target_token_ids is None for one in seen)
    with_nothing = len(argmaxed)
    monkeypatch.setattr(engine.runtime, "uses", lambda capability: True)
    watched(engine, monkeypatch)
    assert len(argmaxed) - with_nothing > with_nothing
