"""``layer_skip``: the first layers of a checkpoint, and how many of them pay."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs specplug[draft-model]")
pytest.importorskip("transformers", reason="needs specplug[draft-model]")

import torch
from tinymodel import VOCAB_SIZE, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from specplug import Request
from specplug.errors import CapabilityError, OptionError
from specplug.proposers import _layers
from specplug.proposers.layer_skip import LayerSkipOptions, LayerSkipProposer

K = 4
LAYERS = 6


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A checkpoint whose layers from the third on say little."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(path)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.01
        layer.mlp.down_proj.weight.data *= 0.01
    model.save_pretrained(path)
    return path


@pytest.fixture
def prepared(folder, make_engine):
    def make(**options):
        proposer = LayerSkipProposer(LayerSkipOptions(cache_bytes=2**21, **options))
        proposer.prepare(make_engine(vocab_size=VOCAB_SIZE, model_name=str(folder)))
        return proposer

    return make


def cut_by_hand(folder, count):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:count]
    return model


def test_it_samples_only_where_probabilities_are_used(prepared):
    with pytest.raises(CapabilityError, match=r"'temperature' is 1\.0"):
        prepared(num_layers=1, temperature=1.0)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_it_says_what_the_first_layers_say(prepared, make_batch, folder, count):
    proposer = prepared(num_layers=count)
    proposer.begin(Request("r", 0, [1], 64, K))
    text = [30, 31, 32, 33]
    draft = proposer.propose(make_batch([text])).to_lists()[0]
    model = cut_by_hand(folder, count)
    for _ in range(K):
        text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert draft == text[4:]


def test_only_these_layers_are_held(prepared, folder):
    sizes = [prepared(num_layers=count).usage().num_bytes for count in (1, 2, 3)]
    layer = sum(w.nbytes for w in cut_by_hand(folder, 1).model.layers[0].parameters())
    assert np.diff(sizes).tolist() == [layer, layer]


def test_the_number_is_chosen_by_what_is_counted(prepared, folder, caplog):
    with caplog.at_level(logging.INFO):
        proposer = prepared()
    assert "drafts with 2 of 6 layers" in caplog.text
    assert len(proposer.drafter._model.model.layers) == 2
    given_ = prepared(num_layers=2)
    assert proposer.usage() == given_.usage()


def test_agreement_is_measured_against_all_layers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder).encode(_layers._TEXT)
    measured = _layers._agreements(model, tokens)
    ids = torch.tensor([tokens])
    whole = model(input_ids=ids).logits[0].argmax(dim=-1)
    for count, agreement in measured.items():
        choices = cut_by_hand(folder, count)(input_ids=ids).logits[0].argmax(dim=-1)
        assert agreement == pytest.approx(float((choices == whole).float().mean()))
    assert measured.keys() == {1, 2, 3, 4, 5}
    assert len(model.model.layers) == LAYERS


@given(agreement=st.floats(0, 0.99), cost=st.floats(0.01, 1), k=st.integers(1, 8))
def test_the_expected_gain_is_the_papers(agreement, cost, k):
    """Leviathan et al., theorem 3.8, in closed form."""
    expected = (1 - agreement ** (k + 1)) / ((1 - agreement) * (k * cost + 1))
    assert _layers.expected_gain(agreement, cost, k) == pytest.approx(expected)


@pytest.mark.parametrize("count", [6, 60])
def test_all_layers_are_no_draft(prepared, count):
    with pytest.raises(OptionError, match=f"num_layers is {count}, and .* has 6 layers"):
        prepared(num_layers=count)


def test_a_served_name_that_is_no_checkpoint_is_refused(make_engine):
    proposer = LayerSkipProposer(LayerSkipOptions(num_layers=1))
    with pytest.raises(OptionError, match=r"(?s)'my-model' cannot be loaded.*option 'model'"):
        proposer.prepare(make_engine(model_name="my-model"))
