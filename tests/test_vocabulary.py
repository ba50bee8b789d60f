"""Other vocabularies: told apart in words, and translated through text."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs specplug[draft-model]")
pytest.importorskip("transformers", reason="needs specplug[draft-model]")

from tinymodel import VOCAB_SIZE, WORDS, make_tiny_model, make_tokenizer

from specplug import Drafts, Request
from specplug.errors import OptionError
from specplug.proposers._translation import Translator
from specplug.proposers._vocabulary import compare
from specplug.proposers.draft_model import DraftModelOptions, DraftModelProposer

K = 6
MAX_LEN = 1000
OTHER_WORDS = """parsers readers files filed writers rewrite therefore another heap said upstairs
ended atonement timer undefined addition bye returned thenceforth nowhere butter assistance youth"""

SAME = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("target", "draft", "same", "num_common", "words"),
    [
        (SAME, SAME, True, 3, ""),
        (SAME | {"<pad>": 3}, SAME, True, 3, "only the target has '<pad>'"),
        (SAME, SAME | {"<x>": 4, "<y>": 5}, True, 4, "only the draft model has '<x>', '<y>'"),
        (SAME, {"a": 0, "c": 1, "b": 2}, False, 1, "2 tokens differ: id 1 is 'b' for the target "
         "and 'c' for the draft model, id 2 is 'c'"),
        (SAME, {"x": 0}, False, 0, "1 tokens differ: id 0 is 'a' for the target and 'x'"),
    ],
)  # fmt: skip
def test_vocabularies_compare(target, draft, same, num_common, words):
    comparison = compare(target, draft)
    assert (comparison.same, comparison.num_common) == (same, num_common)
    assert words in comparison.difference
    assert bool(words) == bool(comparison.difference)


def test_of_many_tokens_a_few_are_told():
    many = {f"t{i}": 3 + i for i in range(9)}
    assert compare(SAME | many, SAME).difference.endswith("'t0', 't1', 't2', 't3' and 5 more")


# -- at start-up ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizers():
    """A target's tokenizer, and another for its draft model."""
    return make_tokenizer(VOCAB_SIZE), make_tokenizer(320, OTHER_WORDS)


def prepared(make_engine, folder, tokenizer, vocab_size=VOCAB_SIZE, **options):
    proposer = DraftModelProposer(
        DraftModelOptions(model=str(folder), cache_bytes=2**21, **options)
    )
    proposer.prepare(
        make_engine(
            vocab_size=vocab_size,
            num_speculative_tokens=K,
            load_tokenizer=tokenizer and (lambda: tokenizer),
        )
    )
    return proposer


@pytest.mark.parametrize("rows", [VOCAB_SIZE, VOCAB_SIZE + 128, VOCAB_SIZE - 2])
def test_padding_rows_do_no_harm(make_engine, folder, tokenizers, rows):
    proposer = prepared(make_engine, folder, tokenizers[0], rows, strict_vocabulary=True)
    assert proposer._translator is None
    assert proposer.drafter.vocab_size == min(len(tokenizers[0]), rows)


def test_another_vocabulary_is_refused_when_told_to_be_strict(make_engine, folder, tokenizers):
    with pytest.raises(OptionError) as caught:
        prepared(make_engine, folder, tokenizers[1], strict_vocabulary=True)
    for word in ("has another vocabulary", "tokens differ: id", "for the target and", "strict"):
        assert word in str(caught.value)


def test_what_is_translated_cannot_be_sampled(make_engine, folder, tokenizers):
    with pytest.raises(OptionError, match=r"'temperature' is 0\.8") as caught:
        prepared(make_engine, folder, tokenizers[1], temperature=0.8)
    assert "no probabilities in the target's tokens" in str(caught.value)


def test_another_vocabulary_is_translated_and_that_is_said(make_engine, folder, tokenizers, caplog):
    with caplog.at_level(logging.WARNING):
        proposer = prepared(make_engine, folder, tokenizers[1])
    assert proposer._translator is not None
    assert "translates drafts through text" in caplog.text
    assert "tokens differ: id" in caplog.text


def test_without_a_tokenizer_only_the_size_can_be_compared(make_engine, folder):
    assert prepared(make_engine, folder, None).drafter
    with pytest.raises(OptionError, match="a vocabulary of 512 and the target one of 600"):
        prepared(make_engine, folder, None, 600)


# -- through text -----------------------------------------------------------------------------


class Reader:
    """One request whose text grows, read by a translator."""

    def __init__(self, translator, make_batch, ids):
        self.translator, self.make_batch, self.ids = translator, make_batch, ids
        translator.begin(Request("r0", 0, ids[:1], MAX_LEN, K))
        self.before = []

    def read(self, size):
        """Read the first ``size`` tokens; return the draft model's, None if not done yet."""
        self.batch = self.make_batch([self.ids[:size]], [K])
        theirs, self.rows, same = self.translator.to_draft(self.batch)
        row = self.translator._token_ids[0, : self.translator._texts[0].num_read].tolist()
        assert row[: same[0]] == self.before[: same[0]]
        assert row[same[0] :][:1] != self.before[same[0] :][:1] or row == self.before
        self.before = row
        assert len(theirs) == self.rows.sum()
        return theirs.tokens(0).tolist() if len(theirs) else None

    def written(self, draft):
        ids = np.array([draft], np.int32)
        drafts = Drafts(ids, np.array([len(draft)]))
        return self.translator.to_target(self.batch, self.rows, drafts).to_lists()[0]


texts = st.lists(st.sampled_from([*WORDS.split(" "), "é", "日本", "🙂", "  \n"]), min_size=2).map(
    " ".join
)


@given(text=texts, steps=st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_the_draft_model_reads_the_targets_text(tokenizers, make_batch, text, steps):
    target, draft = tokenizers
    ids = target.encode(text * 3)
    reader = Reader(Translator(target, draft, MAX_LEN), make_batch, ids)
    for size in np.minimum(np.cumsum(steps), len(ids)).tolist():
        read = reader.read(size)
        if read is not None and "\ufffd" not in target.decode(ids[:size]):
            assert draft.decode(read).replace("\ufffd", "") == target.decode(ids[:size])


@given(text=texts, at=st.floats(0.1, 0.9))
def test_a_right_draft_is_written_as_the_target_would(tokenizers, make_batch, text, at):
    target, draft = tokenizers
    ids = target.encode(text)
    size = max(1, int(len(ids) * at))
    if "\ufffd" in target.decode(ids[:size]):
        return  # half a character: what the draft model would read is no text
    reader = Reader(Translator(target, draft, MAX_LEN), make_batch, ids)
    reader.read(size)
    rest = target.decode(ids)[len(target.decode(ids[:size])) :]
    written = reader.written(draft.encode(rest))
    assert written == ids[size:][:K]


def test_a_draft_ends_where_the_draft_model_ends_its_text(tokenizers, make_batch):
    target, draft = tokenizers
    reader = Reader(Translator(target, draft, MAX_LEN), make_batch, target.encode("the file"))
    reader.read(3)
    ids = draft.encode(" a")
    assert reader.written([*ids, draft.eos_token_id, *ids]) == target.encode(" a")
    assert reader.written([draft.eos_token_id, *ids]) == []


def test_long_texts_are_read_in_pieces_and_too_long_ones_not_drafted_for(tokenizers, make_batch):
    target, draft = tokenizers
    ids = target.encode("x y z the parser " * 2000)[:9000]
    long = Translator(target, draft, 30_000)
    reader = Reader(long, make_batch, ids)
    assert [reader.read(9000) is None for _ in range(3)] == [True, True, False]
    assert Reader(Translator(target, draft, 100), make_batch, ids).read(900) is None


def test_a_model_with_another_tokenizer_drafts_for_a_target(make_engine, folder, tokenizers):
    """The target is the same model, read through the other tokenizer: it says the same text."""
    target = tokenizers[1]
    proposer = prepared(make_engine, folder, target)
    own = prepared(make_engine, folder, tokenizers[0])
    from specplug import Batch

    def batch(ids):
        one, size = np.zeros(1, np.int32), np.full(1, len(ids), np.int32)
        limit = np.full(1, K, np.int32)
        return Batch(["r"], one, np.array([ids], np.int32), one, size, size, size, limit)

    text = "the parser reads a file"
    for each, tokenizer in ((proposer, target), (own, tokenizers[0])):
        ids = tokenizer.encode(text)
        each.begin(Request("r", 0, ids, 64, K))
    said = tokenizers[0].decode(own.propose(batch(tokenizers[0].encode(text))).to_lists()[0])
    ids = target.encode(text)
    draft = proposer.propose(batch(ids)).to_lists()[0]
    assert draft
    assert said.startswith(target.decode(draft)) or target.decode(draft).startswith(said)
    proposer.propose(batch(ids + draft[:1]))
    proposer.end("r")
    assert proposer.usage().num_requests == 0
