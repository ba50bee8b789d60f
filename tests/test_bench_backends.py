"""What each backend compares in ``specplug bench``, and the flags that it advises."""

from __future__ import annotations

import json
import shlex

import pytest

from specplug.bench.methods import NO_SPECULATION, compared, imported
from specplug.replay.run import Candidate

SUFFIX = Candidate("suffix", {"min_confidence": 0.2, "length_policy": "fixed"})


def methods_of(engine, *candidates, ks=(5,), own=()):
    return compared(imported(engine), candidates, ks, own)


def test_vllm():
    plain, usual, more, ours = methods_of("vllm", SUFFIX)
    assert (plain.label, plain.speculation) == (NO_SPECULATION, None)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    assert usual.speculation == {"speculative_config": config}
    assert more.speculation == {
        "speculative_config": {**config, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    }
    words = shlex.split(ours.flags)
    assert words[::2] == ["--speculative-config", "--additional-config"]
    speculative, additional = map(json.loads, words[1::2])
    assert speculative == {"model": "specplug.vllm.suffix", "num_speculative_tokens": 5}
    assert additional == {
        "specplug": {"length_policy": "fixed", "options": {"min_confidence": 0.2}}
    }


def test_transformers():
    plain, usual, ours = methods_of("transformers", SUFFIX)
    assert plain.speculation is None
    assert usual.speculation is not None
    assert usual.speculation["prompt_lookup_num_tokens"] == 5
    assert ours.speculation == {
        "proposer": "suffix",
        "num_speculative_tokens": 5,
        "options": {"min_confidence": 0.2},
        "settings": {"length_policy": "fixed"},
    }
    assert ours.flags == (
        "custom_generate=specplug.transformers.generate, proposer='suffix', "
        "num_speculative_tokens=5, options={'min_confidence': 0.2}, "
        "settings={'length_policy': 'fixed'}"
    )


def test_llamacpp():
    _, usual, ours = methods_of("llamacpp", SUFFIX)
    assert usual.flags == "draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5)"
    assert ours.flags == (
        "draft_model=specplug.llamacpp.draft('suffix', num_speculative_tokens=5, "
        "min_confidence=0.2, settings={'length_policy': 'fixed'})"
    )


@pytest.mark.parametrize("engine", ["vllm", "transformers", "llamacpp"])
def test_every_k_is_a_method_and_own_methods_can_be_chosen(engine):
    labels = [method.label for method in methods_of(engine, Candidate("ngram"), ks=(2, 4))]
    assert len(set(labels)) == len(labels)
    assert [label for label in labels if label.startswith("specplug")] == [
        "specplug ngram K=2", "specplug ngram K=4",
    ]  # fmt: skip
    assert len(methods_of(engine, Candidate("ngram"), own=["none"])) == 2
    assert methods_of(engine, own=['mine={"a": 1}'])[1].label == "mine"
