"""Proposers inside transformers' ``generate``: its own text, scores, stream and distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

import specplug
from specplug import SpecplugError
from specplug.errors import EngineSupportError, OptionError
from specplug.plugins import PluginManager
from specplug.proposer import Capability, Proposer, ProposerSpec

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-dev")
transformers = pytest.importorskip("transformers", reason="make setup-dev installs transformers")

import specplug.transformers as backend  # noqa: E402

VOCAB_SIZE = 32
BUILT_IN = ["ngram", "prompt_lookup", "suffix", "lookahead", "prediction", "cascade"]


class Oracle(Proposer):
    """Drafts what the model would say, from texts that it was given."""

    texts: ClassVar[list[list[int]]] = []
    wrong_at: int | None = None

    def propose(self, batch):
        drafts = []
        for i in range(len(batch)):
            tokens, most = batch.tokens(i).tolist(), int(batch.max_draft_tokens[i])
            known = next((t for t in self.texts if t[: len(tokens)] == tokens), tokens)
            draft = known[len(tokens) : len(tokens) + most]
            if self.wrong_at is not None and len(draft) > self.wrong_at:
                draft[self.wrong_at] = (draft[self.wrong_at] + 1) % VOCAB_SIZE
            drafts.append(draft)
        return drafts


class WrongAtTwo(Oracle):
    wrong_at = 2


class RandomTokens(Proposer):
    def propose(self, batch):
        chance = np.random.default_rng(int(batch.num_tokens.sum()))
        return [chance.integers(VOCAB_SIZE, size=int(n)).tolist() for n in batch.max_draft_tokens]


class Raising(Proposer):
    def propose(self, batch):
        raise RuntimeError("on purpose")


class OutOfVocabulary(Proposer):
    def propose(self, batch):
        return [[VOCAB_SIZE + 3, -1]] * len(batch)


OWN = {
    "oracle": Oracle, "wrong_at_two": WrongAtTwo, "guessing": RandomTokens,
    "failing": Raising, "out_of_vocabulary": OutOfVocabulary,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_proposers(monkeypatch):
    """Register the proposers of this file with every plugin manager."""
    discover = PluginManager._discover

    def with_ours(self):
        discover(self)
        for name, kind in OWN.items():
            self.add(ProposerSpec(name, lambda _options, kind=kind: kind()))

    monkeypatch.setattr(PluginManager, "_discover", with_ours)
    monkeypatch.setattr(Oracle, "texts", [])


@pytest.fixture(scope="module")
def model():
    """A made-up Llama whose text repeats itself now and then."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


PROMPT = [[5, 9, 3, 17, 5, 9, 3, 17, 5, 9]]


def plain(model, prompt=PROMPT, **options):
    standard = {"do_sample": False, "max_new_tokens": 40}
    return model.generate(torch.tensor(prompt), **standard | options)


def drafted(model, prompt=PROMPT, proposer="ngram", k=4, **options):
    return plain(
        model, prompt, custom_generate=backend.generate, proposer=proposer,
        num_speculative_tokens=k, **options,
    )  # fmt: skip


def counters(proposer, k=4):
    """Return the counters of the runtime that the module's model keeps for these."""
    [found] = [
        one.counters
        for one in specplug.running()
        if (one.name, one.engine.num_speculative_tokens) == (proposer, k)
    ]
    return found


def nothing_left():
    assert all(runtime.num_requests == 0 for runtime in specplug.running())


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("proposer", [*BUILT_IN, *OWN])
def test_text_is_the_models_own(model, proposer, k):
    expected = plain(model)
    Oracle.texts = expected.tolist()
    assert torch.equal(drafted(model, proposer=proposer, k=k), expected)
    nothing_left()
    if proposer == "oracle":
        assert counters("oracle", k).acceptance_rate == 1.0
        assert counters("oracle", k).num_steps <= 39 // (k + 1) + 1


@given(
    prompt=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=20),
    k=st.integers(1, 6),
    max_new_tokens=st.integers(1, 12),
)
@settings(max_examples=25)
def test_any_prompt_and_length(model, prompt, k, max_new_tokens):
    expected = plain(model, [prompt], max_new_tokens=max_new_tokens)
    found = drafted(model, [prompt], "suffix", k, max_new_tokens=max_new_tokens)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("proposer", ["ngram", "oracle", "guessing"])
def test_batches_with_padding_on_the_left(model, proposer):
    prompts = [[0, 0, 0, 5, 9, 3, 17, 5], [0, 7, 7, 2, 7, 7, 2, 7], [4, 1, 6, 8, 4, 1, 6, 8]]
    mask = torch.tensor(prompts).ne(0).long()
    options = {"attention_mask": mask, "eos_token_id": [9, 30]}
    expected = plain(model, prompts, **options)
    Oracle.texts = [row[row.index(next(filter(None, row))) :] for row in expected.tolist()]
    assert torch.equal(drafted(model, prompts, proposer, **options), expected)
    nothing_left()


# -- where a sequence ends ------------------------------------------------------------------


def test_without_an_end_of_sequence(model):
    assert model.generation_config.eos_token_id is None
    assert len(drafted(model)[0]) == len(PROMPT[0]) + 40


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("as_list", [False, True])
def test_an_end_of_sequence_in_a_draft(model, place, as_list):
    text = plain(model)
    token = int(text[0, len(PROMPT[0]) + place])
    eos = [31, token] if as_list else token
    expected = plain(model, eos_token_id=eos)
    Oracle.texts = text.tolist()  # goes on behind the end
    assert torch.equal(drafted(model, proposer="oracle", k=8, eos_token_id=eos), expected)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5])
def test_fewer_tokens_than_k(model, max_new_tokens):
    Oracle.texts = plain(model).tolist()
    found = drafted(model, proposer="oracle", k=8, max_new_tokens=max_new_tokens)
    assert torch.equal(found, plain(model, max_new_tokens=max_new_tokens))


class EndsBehind(transformers.StoppingCriteria):
    """Ends a sequence behind two tokens, and counts how often it is asked."""

    def __init__(self, pair):
        self.pair, self.asked = pair, 0

    def __call__(self, input_ids, scores, **_):
        self.asked += 1
        return torch.tensor([row[-2:].tolist() == self.pair for row in input_ids])


def test_a_criterion_of_ones_own_is_asked_for_every_token(model):
    text = plain(model)
    Oracle.texts = text.tolist()
    pair = text[0, len(PROMPT[0]) + 6 : len(PROMPT[0]) + 8].tolist()
    ours, theirs = EndsBehind(pair), EndsBehind(pair)
    expected = plain(model, stopping_criteria=[theirs])
    found = drafted(model, proposer="oracle", k=5, stopping_criteria=[ours])
    assert torch.equal(found, expected)
    assert ours.asked == theirs.asked


# -- processors, scores, stream -------------------------------------------------------------

PROCESSORS = {
    "repetition": {"repetition_penalty": 1.3},
    "no repeated n-gram": {"no_repeat_ngram_size": 3},
    "at least": {"min_new_tokens": 12, "eos_token_id": list(range(2, 12))},
    "bad words": {"bad_words_ids": [[5, 9], [17]]},
    "suppressed": {"suppress_tokens": [3, 4, 5]},
}


@pytest.mark.parametrize("proposer", ["ngram", "oracle", "wrong_at_two"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_logits_processors_see_the_text_before_each_token(model, processor, proposer):
    expected = plain(model, **PROCESSORS[processor])
    Oracle.texts = expected.tolist()
    assert torch.equal(drafted(model, proposer=proposer, **PROCESSORS[processor]), expected)


@pytest.mark.parametrize("batch", [1, 2])
def test_scores_and_logits(model, batch):
    prompts = [[5, 9, 3, 17], [8, 2, 8, 2]][:batch]
    options = {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "repetition_penalty": 1.2, "max_new_tokens": 20,
    }  # fmt: skip
    expected = plain(model, prompts, **options)
    Oracle.texts = expected.sequences.tolist()
    found = drafted(model, prompts, "oracle", **options)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        pairs = list(zip(found[name], expected[name], strict=True))
        assert len(pairs) == 20
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


class Stream(transformers.generation.streamers.BaseStreamer):
    def __init__(self, fails_at=None):
        self.tokens, self.ended, self.fails_at = [], False, fails_at

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if self.fails_at is not None and len(self.tokens) > self.fails_at:
            raise OSError("the client hung up")

    def end(self):
        self.ended = True


def test_a_stream_gets_every_token(model):
    Oracle.texts = plain(model).tolist()
    stream = Stream()
    found = drafted(model, proposer="oracle", streamer=stream)
    assert stream.tokens == found[0].tolist()
    assert stream.ended


def test_a_stream_that_fails_ends_the_request(model):
    with pytest.raises(OSError, match="hung up"):
        drafted(model, streamer=Stream(fails_at=15))
    nothing_left()


def test_transformers_still_withholds_the_streamer(model):
    """If this fails, ``backends/transformers/caller.py`` can go."""
    seen = {}

    def look(_model, input_ids, **arguments):
        seen.update(arguments)
        return input_ids

    plain(model, custom_generate=look, streamer=Stream())
    assert seen.get("streamer") is None


def test_a_conversation_goes_on_with_its_cache(model):
    texts = []
    for answer in (plain, drafted):
        first = answer(model, return_dict_in_generate=True, max_new_tokens=12)
        longer = [[*first.sequences[0].tolist(), 4, 8]]
        texts.append(answer(model, longer, past_key_values=first.past_key_values))
    assert torch.equal(*texts)


def test_several_sequences_of_one_prompt(model):
    torch.manual_seed(0)
    found = drafted(model, do_sample=True, num_return_sequences=3, max_new_tokens=9)
    assert found.shape == (3, len(PROMPT[0]) + 9)
    assert len({tuple(row) for row in found.tolist()}) > 1
    nothing_left()


# -- sampling -------------------------------------------------------------------------------


OURS = {
    "custom_generate": backend.generate, "proposer": "oracle", "num_speculative_tokens": 2,
    "settings": {"length_policy": "fixed"},
}  # fmt: skip


def sampled(model, seed, **options):
    """Return three sampled tokens."""
    torch.manual_seed(seed)
    text = plain(model, do_sample=True, max_new_tokens=3, top_k=4, temperature=1.3, **options)
    return tuple(text[0, len(PROMPT[0]) :].tolist())


def p_value(first, second):
    common = [key for key in first | second if first[key] + second[key] >= 10]
    rows = [[counts[key] for key in common] for counts in (first, second)]
    for row, counts in zip(rows, (first, second), strict=True):
        row.append(counts.total() - sum(row))
    return chi2_contingency(np.array(rows) + 1).pvalue


def test_sampled_tokens_have_the_models_distribution(model):
    Oracle.texts = plain(model).tolist()
    expected = Counter(sampled(model, seed) for seed in range(1000))
    found = Counter(sampled(model, seed, **OURS) for seed in range(1000, 2000))
    assert counters("oracle", 2).num_accepted_tokens > 50
    assert p_value(expected, found) > 1e-3
    # A control: a verifier that preferred drafts would be noticed.
    greedy = tuple(Oracle.texts[0][len(PROMPT[0]) :][:3])
    assert p_value(expected, found + Counter({greedy: 200})) < 1e-3


def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(model):
    """The random generator is asked once for each token that is kept, as in plain decoding."""
    Oracle.texts = plain(model).tolist()
    for seed in range(100):
        assert sampled(model, seed, **OURS) == sampled(model, seed)


# -- what is learnt, and what is refused ----------------------------------------------------


def test_requests_of_a_model_share_what_a_proposer_learns(model):
    drafted(model, proposer="suffix", k=7)
    first = counters("suffix", 7).num_requests
    drafted(model, proposer="suffix", k=7)
    assert counters("suffix", 7).num_requests == first + 1


def test_a_runtime_ends_with_its_model(model):
    config = model.config
    other = transformers.LlamaForCausalLM(config).eval()
    before = len(specplug.running())
    drafted(other, k=5)
    assert len(specplug.running()) == before + 1
    del other
    import gc

    gc.collect()
    assert len(specplug.running()) == before


def test_request_options(model):
    off = {"num_speculative_tokens": 0}
    Oracle.texts = plain(model).tolist()
    drafted(model, proposer="oracle", k=6)
    before = counters("oracle", 6).num_drafts
    drafted(model, proposer="oracle", k=6, request_options=off)
    assert counters("oracle", 6).num_drafts == before
    with pytest.raises(OptionError, match="request_options holds 2 mappings"):
        drafted(model, request_options=[off, off])


def test_lookahead_gets_the_targets_tokens(model):
    drafted(model, proposer="lookahead")
    [runtime] = [one for one in specplug.running() if one.name == "lookahead"][-1:]
    assert runtime.uses(Capability.TARGET_TOKENS)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 0}, OptionError, "num_speculative_tokens is 0"),
        ({"k": 4.0}, OptionError, "num_speculative_tokens is 4.0"),
        ({"proposer": "ngrm"}, SpecplugError, "Did you mean 'ngram'"),
        ({"options": {"n": 1}}, OptionError, "unknown option 'n'"),
        ({"num_beams": 2}, OptionError, "generation mode is beam_search"),
        ({"use_cache": False}, OptionError, "use_cache is False"),
        ({"cache_implementation": "static"}, EngineSupportError, "StaticCache"),
        (
            {"return_dict_in_generate": True, "output_attentions": True},
            OptionError,
            "output_attentions is set",
        ),
    ],
)
def test_what_is_refused(model, options, error, words):
    with pytest.raises(error, match=words):
        drafted(model, **options)
    nothing_left()


def test_models_with_a_state_instead_of_a_cache_are_refused():
    config = transformers.MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(SpecplugError):
        drafted(transformers.MambaForCausalLM(config).eval())
    nothing_left()


def test_a_sliding_window(model):
    config = transformers.MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=12, initializer_range=0.2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    windowed = transformers.MistralForCausalLM(config).eval()
    expected = plain(windowed)
    Oracle.texts = expected.tolist()
    for proposer, k in itertools.product(("oracle", "wrong_at_two"), (1, 5)):
        assert torch.equal(drafted(windowed, proposer=proposer, k=k), expected)
