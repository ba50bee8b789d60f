"""What the engine tests share: an engine to hold, prompts, strategies, and a check of counters."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from testproposers import Nonsense, Oracle, Raising, Random

RUNNER = os.environ.get("SPECPLUG_TEST_RUNNER", "v1")
"""Which of vLLM's model runners is tested: v1, v2 or, with async scheduling, v2-async."""
assert RUNNER in ("v1", "v2", "v2-async"), RUNNER
MAX_MODEL_LEN = 256
WORDS = "the parser reads a file and the writer writes the file that the parser reads".split()  # noqa: SIM905
SHARED = " ".join(WORDS * 3)  # a prefix that several prompts share, for the prefix cache
ALL_PROMPTS = [
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
    "Once upon a time",
    f"{SHARED} and then",
    f"{SHARED} but now",
    " ".join(WORDS * 8),  # longer than one step's token budget: chunked prefill
    "x",
    "1 2 3 4 5 1 2 3 4 5 1 2 3",
    f"{SHARED} and then",
    "The end.",
]
# The V2 runner is interpreted here, which takes a fifth of a second a step.
PROMPTS = ALL_PROMPTS if RUNNER == "v1" else [ALL_PROMPTS[i] for i in (0, 2, 4, 5)]
thorough_on_v2 = pytest.mark.engine if RUNNER == "v1" else pytest.mark.thorough
STRATEGIES = {
    "ngram": "ngram",
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix",
    "prediction": "prediction",
    "lookahead": "lookahead",
    "cascade": "cascade",
    "random": Random,
    "oracle": None,  # made from the answers of the scenario
    "raising": Raising,
    "nonsense": Nonsense,
}


def strategy_for(name, answers):
    """What ``Switch.to`` takes to play the strategy ``name`` against a target with ``answers``."""
    return STRATEGIES[name] or (
        lambda: Oracle({tuple(answer.prompt): answer.tokens for answer in answers})
    )


def sampling(params: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = {"temperature": 0.0, **params}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(json=params["structured_outputs"])
    return SamplingParams(**params)


@dataclass
class Output:
    """One sequence that an engine produced."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: Any
    logprobs: list[dict[int, float]] | None


@dataclass
class Engine:
    """A vLLM engine in this process, and the specplug runtime inside it, if any."""

    llm: Any
    runtime: Any = None
    _metrics: dict[str, Any] = field(default_factory=dict)

    def generate(self, prompts, params, **arguments) -> list[Output]:
        """Generate and wait until the workers have heard that every request has ended."""
        self._metrics = self.read_metrics()
        results = self.llm.generate(prompts, params, use_tqdm=False, **arguments)
        self.settle()
        return [_output(result, completion) for result in results for completion in result.outputs]

    def settle(self) -> None:
        """vLLM tells its workers of the last finished request in the step that follows it."""
        self.llm.llm_engine.engine_core.get_output()

    def read_metrics(self) -> dict[str, Any]:
        return {
            metric.name: getattr(metric, "value", None) or getattr(metric, "values", 0)
            for metric in self.llm.get_metrics()
            if metric.name.startswith(("vllm:spec_decode", "vllm:num_preemptions"))
        }

    def engine_counts(self) -> dict[str, Any]:
        """What vLLM itself has counted since ``generate`` was last called."""
        now, before = self.read_metrics(), self._metrics
        return {
            name.removeprefix("vllm:").removeprefix("spec_decode_"): (
                [a - b for a, b in zip(value, before.get(name) or [0] * len(value), strict=True)]
                if isinstance(value, list)
                else value - before.get(name, 0)
            )
            for name, value in now.items()
        }

    def reset_counters(self) -> None:
        counters = type(self.runtime.counters)
        k = self.runtime.engine.num_speculative_tokens
        self.runtime.counters = counters(num_accepted_tokens_per_pos=[0] * k)

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()
        self.llm.llm_engine.engine_core.shutdown()


def _output(result, completion) -> Output:
    logprobs = completion.logprobs and [
        {token: entry.logprob for token, entry in position.items()}
        for position in completion.logprobs
    ]
    return Output(
        list(result.prompt_token_ids),
        list(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        logprobs,
    )


def assert_counters_agree(engine):
    """vLLM counts as specplug does, but for slots that nobody drafted for.

    These are the drafts of -1 with which it pads new requests and, with async scheduling, what is
    behind the drafts: there K slots are verified for every request, and may be right by chance.
    On the other hand, a step that is under way when a stop string ends its request is not vLLM's.
    """
    theirs, ours = engine.engine_counts(), engine.runtime.counters
    k = engine.runtime.engine.num_speculative_tokens
    if RUNNER == "v2-async":
        late = ours.num_requests
        assert theirs["num_drafts"] >= ours.num_drafts - late
        assert theirs["num_draft_tokens"] >= ours.num_draft_tokens - late * k
        assert theirs["num_accepted_tokens"] >= ours.num_accepted_tokens - late * k
        return
    padded = theirs["num_drafts"] - ours.num_drafts
    begun = ours.num_requests + theirs["num_preemptions"]
    assert 0 <= padded <= begun, (theirs, ours)
    assert theirs["num_draft_tokens"] == ours.num_draft_tokens + padded * k
    assert theirs["num_accepted_tokens"] == ours.num_accepted_tokens
    assert theirs["num_accepted_tokens_per_pos"] == ours.num_accepted_tokens_per_pos
