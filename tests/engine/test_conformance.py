"""What holds in every engine: one suite over the backends that CI can run.

The text is the engine's own, every request ends, a proposer's faults are counted and cost no text.
TensorRT-LLM, which needs a GPU, has its own suite on a double; llama.cpp, which is built from
source and has weights of four bits, a test that knows near ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from harness import ALL_PROMPTS, sampling

from specplug import Runtime

K = 4
MAX_TOKENS = 24


@dataclass
class Served:
    """A backend with or without a proposer: answers all prompts, in tokens or text."""

    answers: Callable[[], list[Any]]
    runtime: Runtime | None


def vllm(request, proposer) -> Served:
    start, model = request.getfixturevalue("start"), request.getfixturevalue("tiny_model")
    engine = start(model, proposer, K) if proposer else start(model)
    params = sampling({"max_tokens": MAX_TOKENS})
    return Served(
        lambda: [output.tokens for output in engine.generate(ALL_PROMPTS, params)], engine.runtime
    )


def transformers(request, proposer) -> Served:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import specplug.transformers
    from specplug.backends.transformers.adapter import runtime_of

    folder = request.getfixturevalue("tiny_model")
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    arguments: dict[str, Any] = {"do_sample": False, "max_new_tokens": MAX_TOKENS}
    if proposer:
        arguments |= {
            "custom_generate": specplug.transformers.generate,
            "proposer": proposer,
            "num_speculative_tokens": K,
        }

    def answers():
        inputs = [tokenizer(prompt, return_tensors="pt") for prompt in ALL_PROMPTS]
        return [model.generate(**one, **arguments)[0].tolist() for one in inputs]

    runtime = runtime_of(model, proposer, K, {"options": {}}) if proposer else None
    return Served(answers, runtime)


BACKENDS = {"vllm": vllm, "transformers": transformers}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    """A backend and its own answers."""
    make = BACKENDS[request.param]
    own = make(request, None).answers()
    return lambda proposer: (make(request, proposer), own)


@pytest.mark.parametrize(
    "proposer", ["ngram", "suffix", "lookahead", "cascade", "random_tokens", "raising"]
)
def test_conformance(backend, proposer):
    served, own = backend(proposer)
    assert served.answers() == own
    assert served.answers() == own  # and with what was learnt from the first time
    runtime = served.runtime
    counters = runtime.counters
    assert runtime.num_requests == 0
    assert counters.num_requests == 2 * len(ALL_PROMPTS)
    assert counters.num_accepted_tokens <= counters.num_draft_tokens
    assert sum(counters.num_accepted_tokens_per_pos) == counters.num_accepted_tokens
    assert (counters.num_faults > 0) == (proposer == "raising")
    assert (counters.num_drafts > 0) == (proposer != "raising")
    runtime.close()
