"""All built-in proposers and length policies pass the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import strategies as st

from specplug.lengths import adaptive, fixed, match_scaled
from specplug.proposers import (
    cascade,
    draft_model,
    layer_skip,
    lookahead,
    ngram,
    prediction,
    prompt_lookup,
    suffix,
)
from specplug.testing import ENGINE, LengthPolicyConformance, ProposerConformance
from specplug.testing.schedules import tokens

CACHE = suffix.SuffixOptions().cache_bytes
POOL = lookahead.LookaheadOptions().pool_bytes


class TestNgram(ProposerConformance):
    spec = ngram.SPEC


class TestPromptLookup(ProposerConformance):
    spec = prompt_lookup.SPEC


class TestSuffix(ProposerConformance):
    spec = suffix.SPEC
    independent = False  # it drafts from what other requests were answered
    kept_bytes = CACHE


class TestSuffixWithoutCache(ProposerConformance):
    spec = suffix.SPEC
    options: ClassVar = {"cache_bytes": 0}


class TestLookahead(ProposerConformance):
    spec = lookahead.SPEC
    kept_bytes = POOL  # nobody sees what is in it of a request that has ended


class TestPrediction(ProposerConformance):
    spec = prediction.SPEC
    options: ClassVar = {"fallback": None}
    resumes_exactly = False  # where it is in the text follows from where it was

    def request_options(self, engine):
        texts = st.lists(tokens(engine), min_size=1, max_size=24)
        return st.fixed_dictionaries({"prediction_token_ids": texts})


class TestCascade(ProposerConformance):
    spec = cascade.SPEC
    independent = False
    kept_bytes = CACHE + POOL


class TestCascadeByExpectation(ProposerConformance):
    spec = cascade.SPEC
    options: ClassVar = {"parts": ["ngram", "lookahead"], "by": "expected"}
    independent = False  # what a part is worth, it learns from all requests
    resumes_exactly = False  # and from what each part offered
    kept_bytes = POOL


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    pytest.importorskip("torch", reason="needs specplug[draft-model]")
    pytest.importorskip("transformers", reason="needs specplug[draft-model]")
    from tinymodel import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class ModelConformance(ProposerConformance):
    """Of proposers with a language model, which costs more than all other tests."""

    num_examples = 6
    long_context = 1024

    @pytest.fixture
    def engine(self, model_folder):
        from tinymodel import VOCAB_SIZE

        return replace(ENGINE, vocab_size=VOCAB_SIZE, model_name=str(model_folder))

    @pytest.fixture(autouse=True)
    def one_thread(self, monkeypatch):
        import torch

        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the fresh process


class TestDraftModel(ModelConformance):
    spec = draft_model.SPEC

    @pytest.fixture(autouse=True)
    def name_model(self, model_folder, monkeypatch):
        options = {"model": str(model_folder), "cache_bytes": 2**23}
        monkeypatch.setattr(type(self), "options", options)


class TestLayerSkip(ModelConformance):
    spec = layer_skip.SPEC
    options: ClassVar = {"num_layers": 1, "cache_bytes": 2**23}
    test_determinism_across_processes = None  # takes 8 s, and TestDraftModel has the same drafter


class TestFixed(LengthPolicyConformance):
    spec = fixed.SPEC


class TestMatchScaled(LengthPolicyConformance):
    spec = match_scaled.SPEC


class TestAdaptive(LengthPolicyConformance):
    spec = adaptive.SPEC
    independent = False  # it shares out what a step can bear
