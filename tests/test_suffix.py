"""``suffix`` against a slow and obvious search, and its cache."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from suffix_reference import expected

from specplug import PluginManager, Request
from specplug.errors import OptionError
from specplug.proposer import Acceptance
from specplug.proposers._suffix_cache import BYTES_PER_TOKEN, SuffixCache, owner_of, sequences
from specplug.proposers._suffix_index import INDEXED_PER_CALL
from specplug.proposers.suffix import SuffixRequestOptions

MANAGER = PluginManager()
K = 8


def test_the_reference_itself():
    assert expected([1, 2, 3, 4, 1, 2])[0] == [3, 4, 1, 2, 3, 4, 1, 2]
    assert expected([1, 2, 3, 4, 1, 2], limit=2)[0] == [3, 4]
    assert expected([1, 2, 8, 5, 1, 2, 9, 1, 2], limit=1)[0] == [9]
    assert expected([1, 2, 8, 1, 2, 8, 1, 2, 9, 1, 2], limit=1)[0] == [8]
    assert expected([7, 1, 2, 8, 3, 1, 2, 9, 7, 1, 2], limit=1)[0] == [8]  # longer
    assert expected([5, 1, 2], [[1, 2, 3]])[0] == [3]
    assert expected([5, 1, 2], [[1, 2, 3], [1, 2, 4]])[0] == [4]
    assert expected([2, 9, 2], [[1, 2, 3]], limit=1)[0] == [9]  # its own counts more
    assert expected([1, 1], tokens_per_match=2.0)[0] == [1, 1]
    assert expected([1, 1], min_confidence=0.6)[0] == []
    assert expected([1]) == expected([]) == ([], [])


# -- what is drafted --------------------------------------------------------------------------


class Suffix:
    """A suffix proposer that is asked directly."""

    def __init__(self, make_engine, make_batch, **options):
        self.make_batch = make_batch
        self.proposer, _ = MANAGER.create("suffix", options, frozenset())
        self.proposer.prepare(make_engine(max_model_len=200_000))

    def begin(self, slot, prompt=(), namespace=""):
        options = SuffixRequestOptions(cache_namespace=namespace)
        self.proposer.begin(Request(f"r{slot}", slot, prompt, 200_000, K, options))

    def ask(self, texts, limit=K):
        """Return drafts and scores for texts by slot."""
        batch = self.make_batch(list(texts.values()), [limit] * len(texts), slots=list(texts))
        drafts = self.proposer.propose(batch)
        rows = zip(drafts.scores.tolist(), drafts.lengths.tolist(), strict=True)
        return drafts.to_lists(), [row[:length] for row, length in rows]

    def say(self, slot, tokens):
        """Tell it what the request was answered."""
        none = np.zeros(1, np.int32)
        self.proposer.observe(Acceptance([f"r{slot}"], none, [[]], none, [list(tokens)]))

    def earlier(self, *outputs, namespace=""):
        """Serve requests, one after another, with these outputs."""
        for output in outputs:
            self.begin(50, namespace=namespace)
            self.say(50, output)
            self.proposer.end("r50")


@pytest.fixture(scope="session")
def suffix(make_engine, make_batch):
    def make(**options):
        return Suffix(make_engine, make_batch, **options)

    return make


def alone(suffix, text, **options):
    one = suffix(**options)
    one.begin(0)
    return one.ask({0: text})[0][0]


texts = st.integers(2, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=80))


@given(
    own=texts.filter(bool),
    others=st.lists(texts.filter(lambda text: len(text) > 1), max_size=4),
    limit=st.integers(1, K),
    min_confidence=st.sampled_from([0.0, 0.033, 0.21]),
    tokens_per_match=st.sampled_from([1.0, 2.5, 8.0]),
    steps=st.lists(st.integers(1, 9), max_size=5),
)
def test_it_drafts_what_the_reference_says(suffix, own, others, limit, steps, **options):
    tested = suffix(**options)
    tested.earlier(*others)
    tested.begin(3)
    size = 1
    for step in [*steps, len(own)]:
        text = own[:size]
        drafts, scores = tested.ask({3: text}, limit)
        draft, estimates = expected(text, others, limit=limit, **options)
        assert drafts == [draft]
        assert scores == [pytest.approx(estimates, rel=1e-5)]
        size = min(len(own), size + step)


@given(batch=st.dictionaries(st.integers(0, 5), texts.filter(bool), min_size=1))
def test_requests_of_a_batch_do_not_meet(suffix, batch):
    tested = suffix()
    for slot in batch:
        tested.begin(slot)
    assert tested.ask(batch)[0] == [expected(text)[0] for text in batch.values()]


@pytest.mark.parametrize("size", [2, 3, 100, 10_000])
def test_one_token_repeated(suffix, size):
    assert alone(suffix, [7] * size) == [7] * K


def test_matches_are_followed_beyond_the_longest_indexed_length(suffix):
    long = list(range(10, 10 + 40))
    text = [1, *long, 2, *long[-12:], 3, *long]  # the further one matches 40 tokens, not 12
    assert alone(suffix, [*text[:-40], 4, *long])[0] == 2
    assert alone(suffix, text)[0] == 2


def test_nothing_is_drafted_from_nothing(suffix):
    assert alone(suffix, [5]) == alone(suffix, [1, 2, 3]) == []


# -- long prompts -----------------------------------------------------------------------------


def test_a_long_prompt_is_indexed_by_and_by_and_others_go_on(suffix):
    tested = suffix()
    for slot in (0, 1):
        tested.begin(slot)
    prompt = np.random.default_rng(0).integers(0, 90, 5 * INDEXED_PER_CALL).tolist()
    prompt[-3:] = prompt[-1003:-1000]  # occurs near the end
    short = [1, 2, 3, 4, 1, 2]
    first, _ = tested.ask({0: prompt, 1: short})
    assert first[1] == expected(short)[0]
    assert first[0] != prompt[-1000 : -1000 + K]
    for _ in range(5):
        last, _ = tested.ask({0: prompt, 1: short})
    assert last[0] == prompt[-1000 : -1000 + K]


def test_memory_per_token_and_its_return(suffix):
    tested = suffix()
    tokens = 100_000
    for slot in range(2):
        tested.begin(slot)
    text = np.random.default_rng(0).integers(0, 90, tokens).tolist()
    tested.ask({0: text, 1: text})
    assert tested.proposer.usage().num_requests == 2
    assert 0 < tested.proposer.usage().num_bytes <= 100 * 2 * tokens
    for slot in range(2):
        tested.proposer.end(f"r{slot}")
    assert tested.proposer.usage() == (0, 0)


def test_a_slot_is_clean_when_it_is_used_again(suffix):
    tested = suffix(cache_bytes=0)
    tested.begin(0)
    tested.ask({0: [1, 2, 3, 4, 5, 1, 2]})
    tested.proposer.end("r0")
    tested.begin(0)
    assert tested.ask({0: [9, 1, 2]})[0] == [[]]


def test_an_index_that_is_shared_lives_until_its_last_user_ends(make_engine, make_batch, suffix):
    engine = make_engine()
    one, two = (MANAGER.create("suffix", {}, frozenset())[0] for _ in range(2))
    for part in (one, two):
        part.prepare(engine)
        part.begin(Request("r0", 0, [], 64, K))
    batch = make_batch([[1, 2, 3, 1, 2]])
    assert one.propose(batch).to_lists() == two.propose(batch).to_lists() == [[3, 1, 2, 3]]
    assert one._index is two._index
    held = sum(index.nbytes for index in one._index._indexes.values())
    assert one.usage().num_bytes + two.usage().num_bytes == held > 0
    one.end("r0")
    assert two.propose(batch).to_lists() == [[3, 1, 2, 3]]
    two.end("r0")
    assert two._index.usage() == (0, 0)


# -- the cache --------------------------------------------------------------------------------


def test_outputs_serve_later_requests_and_prompts_only_if_asked(suffix):
    for cache_prompts in (False, True):
        tested = suffix(cache_prompts=cache_prompts)
        tested.begin(0, prompt=[1, 2, 3, 4])
        tested.say(0, [5, 6])
        tested.say(0, [7, 8])
        tested.proposer.end("r0")
        tested.begin(1)
        assert tested.ask({1: [9, 5, 6]})[0] == [[7, 8]]
        assert tested.ask({1: [9, 1, 2]})[0] == ([[3, 4]] if cache_prompts else [[]])


@given(
    own=texts.filter(bool),
    outputs=st.lists(st.tuples(st.sampled_from("ab"), texts.filter(lambda t: len(t) > 1))),
)
def test_namespaces_do_not_meet(suffix, own, outputs):
    tested = suffix()
    for namespace, output in outputs:
        tested.earlier(output, namespace=namespace)
    tested.begin(0, namespace="b")
    theirs = [output for namespace, output in outputs if namespace == "b"]
    assert tested.ask({0: own})[0] == [expected(own, theirs)[0]]


def test_without_cache_nothing_is_kept(suffix):
    tested = suffix(cache_bytes=0)
    tested.earlier([1, 2, 3, 4, 5])
    assert tested.proposer.usage() == (0, 0)
    tested.begin(0)
    assert tested.ask({0: [1, 2]})[0] == [[]]


@given(
    capacity=st.integers(0, 40),
    outputs=st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=20),
)
def test_the_cache_stays_within_its_limit_and_keeps_the_newest(capacity, outputs):
    cache = SuffixCache(2 * capacity * BYTES_PER_TOKEN)
    kept = []
    for output in outputs:
        cache.add(np.array(output, np.int32), 1)
        assert cache.num_bytes <= 2 * capacity * BYTES_PER_TOKEN
        if len(output) > 1 and capacity > 2:
            kept.append(output[-(capacity - 1) :])
    found = [tokens.tolist() for _, tokens in sequences(cache.snapshot())]
    assert found == kept[len(kept) - len(found) :]
    assert bool(found) == bool(kept)


def test_both_generations_are_read(make_engine, make_batch):
    tested = Suffix(make_engine, make_batch, cache_bytes=2 * 20 * BYTES_PER_TOKEN)
    tested.earlier(list(range(10)), list(range(20, 32)), list(range(40, 44)))
    tested.begin(0)
    assert tested.ask({0: [3, 4]})[0] == [[5, 6, 7, 8, 9]]  # in the older one
    assert tested.ask({0: [3, 21]})[0] == [[*range(22, 30)]]
    tested.earlier(list(range(50, 65)))
    assert tested.ask({0: [3, 4]})[0] == [[]]  # gone


def test_a_long_output_is_indexed_by_and_by(suffix):
    tested = suffix()
    output = np.random.default_rng(1).integers(0, 2**20, 20_000)
    tested.earlier(output.tolist())
    tested.begin(0)
    assert tested.ask({0: output[15_000:15_004].tolist()})[0] == [[]]
    for _ in range(5):
        drafts, _ = tested.ask({0: output[15_000:15_004].tolist()})
    assert drafts == [output[15_004 : 15_004 + K].tolist()]


def test_owners_differ():
    assert len({owner_of(name) for name in ("", "a", "b", "ä" * 1000)}) == 4
    assert all(0 < owner_of(name) < 2**63 for name in ("", "a"))


# -- the cache on disk ------------------------------------------------------------------------


@pytest.fixture
def restarted(make_engine, make_batch, tmp_path):
    """Start proposers that have the same file."""

    def make(cache_save_seconds=60, **engine):
        options = {
            "cache_file": str(tmp_path / "cache.npz"),
            "cache_save_seconds": cache_save_seconds,
        }
        one = Suffix.__new__(Suffix)
        one.make_batch = make_batch
        one.proposer, _ = MANAGER.create("suffix", options, frozenset())
        one.proposer.prepare(make_engine(**engine))
        return one

    make.file = tmp_path / "cache.npz"
    return make


def test_a_restart_starts_warm(restarted, caplog):
    first = restarted()
    assert not caplog.records  # no file yet: nothing to say
    first.earlier([1, 2, 3, 4], [5, 6, 7], namespace="a")
    first.earlier([1, 2, 9], namespace="b")
    first.proposer.close()
    second = restarted()
    for slot, namespace, draft in ((0, "a", [3, 4]), (1, "b", [9]), (2, "", [])):
        second.begin(slot, namespace=namespace)
        assert second.ask({slot: [0, 1, 2]})[0] == [draft]
    second.proposer.close()
    assert [path.name for path in restarted.file.parent.iterdir()] == ["cache.npz"]


def truncated(file):
    file.write_bytes(file.read_bytes()[:-40])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[content.index(b"tokens.npy") + 150] ^= 1
    file.write_bytes(content)


def rewritten(**changes):
    def rewrite(file):
        arrays = dict(np.load(file)) | changes
        np.savez(file, **{name: value for name, value in arrays.items() if value is not None})

    return rewrite


def pickled(file):
    np.savez(file, format=np.array([{}], dtype=object))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, ""),
        (flipped, "CRC"),
        (pickled, "pickle"),
        (lambda file: file.write_bytes(b""), ""),
        (lambda file: file.write_text("a letter"), ""),
        (lambda file: np.save(file.open("wb"), np.arange(3)), "another kind"),
        (rewritten(format=np.array("x")), "another kind"),
        (rewritten(version=np.array(2)), "version is 2, expected 1"),
        (rewritten(vocab_size=np.array(7)), "vocabulary of 7 tokens, and the model has 100"),
        (rewritten(tokens=np.array([1, 2, 3, 100], np.int32)), "contradict"),
        (rewritten(tokens=np.array([1, 2, 3, -1], np.int32)), "contradict"),
        (rewritten(tokens=np.array([1.0, 2, 3, 4])), "contradict"),
        (rewritten(lengths=np.array([3])), "contradict"),
        (rewritten(lengths=np.array([9, -5]), owners=np.array([1, 1])), "contradict"),
        (rewritten(owners=np.array([0])), "contradict"),
        (rewritten(owners=None), "owners"),
    ],
)
def test_a_file_that_is_damaged_or_not_ours_is_refused_and_kept(restarted, caplog, damage, reason):
    first = restarted()
    first.earlier([1, 2, 3, 4])
    first.proposer.close()
    damage(restarted.file)
    content = restarted.file.read_bytes()
    second = restarted()
    (told,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "no usable cache file" in told
    assert reason in told
    second.begin(0)
    assert second.ask({0: [0, 1, 2]})[0] == [[]]
    second.earlier([1, 2, 3, 4])
    assert second.ask({0: [0, 1, 2]})[0] == [[3, 4]]
    second.proposer.close()
    assert restarted.file.read_bytes() == content


def test_a_save_that_fails_leaves_the_old_file(restarted, monkeypatch, caplog):
    first = restarted()
    first.earlier([1, 2, 3])
    first.proposer.close()
    content = restarted.file.read_bytes()
    second = restarted()
    second.earlier([4, 5, 6])

    def disk_full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", disk_full)
    second.proposer.close()
    assert "cannot be written (no space left)" in caplog.text
    assert restarted.file.read_bytes() == content
    assert list(restarted.file.parent.iterdir()) == [restarted.file]


def test_the_cache_is_saved_while_requests_come_and_go(restarted):
    """An engine that is killed shuts nothing down."""
    first = restarted(cache_save_seconds=1e-9)
    first.earlier([1, 2, 3, 4])
    first.proposer._file._thread.join()
    second = restarted()
    second.begin(0)
    assert second.ask({0: [0, 1, 2]})[0] == [[3, 4]]
    patient = restarted(cache_save_seconds=3600)
    patient.earlier([5, 6, 7])
    assert patient.proposer._file._thread is None


def test_only_one_rank_saves(restarted):
    other = restarted(rank=1, world_size=2)
    other.earlier([1, 2, 3])
    other.proposer.close()
    assert not restarted.file.exists()


def test_a_smaller_cache_takes_the_newest_of_a_file(restarted, make_engine, make_batch):
    first = restarted()
    first.earlier([1, 2, 3], list(range(30, 45)), [5, 6, 7])
    first.proposer.close()
    small = MANAGER.create(
        "suffix",
        {"cache_file": str(restarted.file), "cache_bytes": 2 * 17 * BYTES_PER_TOKEN},
        frozenset(),
    )[0]
    small.prepare(make_engine())
    assert [tokens[0] for _, tokens in sequences(small._cache.snapshot())] == [30, 5]


def test_a_folder_that_is_not_there_is_refused_at_start_up(make_engine, tmp_path):
    options = {"cache_file": str(tmp_path / "nowhere" / "cache.npz")}
    proposer, _ = MANAGER.create("suffix", options, frozenset())
    with pytest.raises(OptionError, match="nowhere is not a folder that can be written"):
        proposer.prepare(make_engine())


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_confidence": 1.5},
        {"min_confidence": -0.1},
        {"tokens_per_match": 0},
        {"tokens_per_match": float("inf")},
        {"cache_bytes": -1},
        {"cache_prompts": "perhaps"},
        {"max_depth": 3},
    ],
)
def test_a_wrong_option_is_named(wrong):
    (name,) = wrong
    with pytest.raises(OptionError, match=f"'{name}'"):
        MANAGER.create("suffix", wrong, frozenset())
