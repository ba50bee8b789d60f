"""``draft_model`` against plain forwards of the same model, without an engine."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs specplug[draft-model]")
pytest.importorskip("transformers", reason="needs specplug[draft-model]")

import torch
import transformers
from tinymodel import VOCAB_SIZE, make_tiny_model

from specplug import Capability, PluginManager, Request, Runtime
from specplug.config import Settings
from specplug.errors import CapabilityError, OptionError
from specplug.proposers._draft_blocks import BLOCK_SIZE, BlockTable
from specplug.proposers._draft_sampling import Sampling, drawn
from specplug.proposers._drafter import Drafter, bounded
from specplug.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specplug.runtime import Arrival, Step

K = 4
MAX_LEN = 96


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def engine(make_engine):
    return make_engine(
        vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN, num_speculative_tokens=K, max_num_seqs=4
    )


@pytest.fixture(scope="session")
def make_proposer(folder, engine):
    def make(engine=engine, **options):
        options = {"model": str(folder), "cache_bytes": 2**22} | options
        proposer = DraftModelProposer(DraftModelOptions(**options))
        proposer.prepare(engine)
        return proposer

    return make


@pytest.fixture(scope="session")
def model(make_proposer):
    """The model by itself: what it says without a cache."""
    return make_proposer().drafter


def plain(model, tokens, count):
    """Return the next ``count`` greedy tokens and their probabilities, from whole forwards."""
    tokens, drafted, probabilities = [int(token) for token in tokens], [], []
    with torch.inference_mode():
        for _ in range(count):
            last = model.plain_logits(tokens)[-1].softmax(dim=-1)
            drafted.append(int(last.argmax()))
            probabilities.append(float(last.max()))
            tokens.append(drafted[-1])
    return drafted, probabilities


def assert_as_plain(model, batch, drafts, i):
    length = int(drafts.lengths[i])
    expected, probabilities = plain(model, batch.tokens(i), length)
    assert drafts.to_lists()[i] == expected
    np.testing.assert_allclose(drafts.scores[i, :length], probabilities, rtol=1e-3, atol=1e-5)


# -- the cache --------------------------------------------------------------------------------


class Schedule:
    """Requests that come, go, pause, and are accepted or rejected as told."""

    def __init__(self, proposer, make_batch):
        self.proposer, self.make_batch = proposer, make_batch
        self.texts, self.drafts = {}, {}

    def begin(self, slot, prompt):
        self.end(slot)
        self.texts[slot] = list(prompt)
        self.proposer.begin(Request(str(slot), slot, list(prompt), MAX_LEN, K))

    def end(self, slot):
        if self.texts.pop(slot, None):
            self.drafts.pop(slot, None)
            self.proposer.end(str(slot))

    def rewind(self, slot, prompt):
        """An engine that takes tokens back ends the request and begins it anew."""
        self.begin(slot, self.texts[slot][: max(1, len(prompt))])

    def advance(self, slot, accepted, token):
        text, draft = self.texts[slot], self.drafts.pop(slot, [])
        text += [*draft[:accepted], token]
        del text[MAX_LEN - 2 :]

    def propose(self, slots):
        texts = [self.texts[slot] for slot in slots]
        limits = [min(K, MAX_LEN - len(text)) for text in texts]
        batch = self.make_batch(texts, limits, slots=slots)
        drafts = self.proposer.propose(batch)
        self.drafts.update(zip(slots, drafts.to_lists(), strict=True))
        return batch, drafts


token = st.integers(0, VOCAB_SIZE - 1)
slot = st.integers(0, 3)
event = st.one_of(
    st.tuples(st.just("begin"), slot, st.lists(token, min_size=1, max_size=40)),
    st.tuples(st.just("end"), slot),
    st.tuples(st.just("rewind"), slot, st.lists(token, max_size=10)),
    st.tuples(st.just("step"), st.lists(st.tuples(slot, st.integers(0, K), token), min_size=1)),
)


@settings(max_examples=200)
@given(events=st.lists(event, min_size=3, max_size=12))
def test_after_any_schedule_the_cache_says_what_a_fresh_forward_says(
    make_proposer, make_batch, model, events
):
    proposer = make_proposer.shared
    schedule = Schedule(proposer, make_batch)
    schedule.begin(0, [1, 2, 3])
    for name, *arguments in [*events, ("step", [(0, K, 5)])]:
        if name == "step":
            rows = {one: rest for one, *rest in arguments[0] if one in schedule.texts}
            for one, (accepted, last) in rows.items():
                schedule.advance(one, accepted, last)
            if rows:
                batch, drafts = schedule.propose(list(rows))
                for i in range(len(batch)):
                    assert drafts.lengths[i] == batch.max_draft_tokens[i]
                    assert_as_plain(model, batch, drafts, i)
        elif name == "begin" or arguments[0] in schedule.texts:
            getattr(schedule, name)(*arguments)
    for one in list(schedule.texts):
        schedule.end(one)
    assert proposer.usage() == (0, make_proposer.empty)


@pytest.fixture(scope="session", autouse=True)
def shared(make_proposer):
    """One proposer for all examples of a property: as in an engine, its pools are never cleared."""
    make_proposer.shared = make_proposer()
    make_proposer.empty = make_proposer.shared.usage().num_bytes


class Watched:
    """Counts the forwards of a drafter, and the tokens in them."""

    def __init__(self, proposer, monkeypatch):
        self.shapes = []
        forward = proposer.drafter._forward

        def watch(tokens, *rest):
            self.shapes.append(tuple(tokens.shape))
            return forward(tokens, *rest)

        monkeypatch.setattr(proposer.drafter, "_forward", watch)

    def taken(self):
        shapes, self.shapes = self.shapes, []
        return shapes


def test_a_forward_per_position_serves_the_whole_batch_and_nothing_is_fed_twice(
    make_proposer, make_batch, monkeypatch
):
    proposer = make_proposer()
    watched = Watched(proposer, monkeypatch)
    schedule = Schedule(proposer, make_batch)
    for one, size in enumerate((5, 3, 4)):
        schedule.begin(one, range(1, size + 1))
    schedule.propose([0, 1, 2])
    assert watched.taken() == [(3, 5), (3, 1), (3, 1), (3, 1)]
    for one, accepted in enumerate((0, 2, 1)):  # of each, one token more is new
        schedule.advance(one, accepted, 300)
    schedule.propose([0, 1, 2])
    assert watched.taken() == [(3, 1)] * K
    schedule.advance(0, K, 300)  # the last drafted token was never fed
    schedule.advance(1, 1, 300)
    schedule.propose([0, 1])
    assert watched.taken() == [(2, 2), (2, 1), (2, 1), (2, 1)]


def test_rows_whose_draft_is_at_its_limit_leave_the_batch(make_proposer, make_batch, monkeypatch):
    proposer = make_proposer()
    watched = Watched(proposer, monkeypatch)
    for one in range(3):
        proposer.begin(Request(str(one), one, [1], MAX_LEN, K))
    drafts = proposer.propose(make_batch([[1, 2], [3], [4]], [1, 4, 2]))
    assert drafts.lengths.tolist() == [1, 4, 2]
    # A row is fed its last token before it is seen to be done.
    assert [rows for rows, _ in watched.taken()] == [3, 3, 2, 1]


def test_a_long_prompt_is_read_in_chunks_while_the_others_are_drafted_for(
    make_proposer, make_batch, model, monkeypatch
):
    proposer = make_proposer(max_prefill_tokens=16)
    watched = Watched(proposer, monkeypatch)
    schedule = Schedule(proposer, make_batch)
    schedule.begin(0, range(1, 51))
    schedule.begin(1, [7])
    lengths = []
    for _ in range(5):
        batch, drafts = schedule.propose([0, 1])
        lengths.append(drafts.lengths.tolist())
        assert max(width for _, width in watched.taken()) <= 16
        schedule.advance(1, 1, 9)
    assert lengths == [[0, K]] * 3 + [[K, K]] * 2  # 16 + 16 + 16, then the last 2
    assert_as_plain(model, batch, drafts, 0)


@given(
    backlog=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    near=st.integers(1, 8),
    most=st.integers(1, 40),
)
def test_catching_up_is_bounded(backlog, near, most):
    column = np.array(backlog, np.int32)
    taken = bounded(column, near, most)
    assert (taken <= column).all()
    assert (taken[column <= near] == column[column <= near]).all()
    far = column[column > near].sum()
    assert taken[column > near].sum() == min(far, most)


def test_tokens_that_others_drafted_are_caught_up_with(make_proposer, make_batch, model):
    schedule = Schedule(make_proposer(), make_batch)
    schedule.begin(0, [1, 2, 3])
    schedule.propose([0])
    for last in range(40, 60):
        schedule.advance(0, 0, last)  # steps in which it was not asked
    batch, drafts = schedule.propose([0])
    assert drafts.lengths.tolist() == [K]
    assert_as_plain(model, batch, drafts, 0)


def test_drafts_end_where_confidence_does(make_proposer, make_batch, model):
    texts = [[i, i + 1, i + 2] for i in range(20, 60)]
    probabilities = [np.cumprod(plain(model, text, K)[1]) for text in texts]
    least = float(np.median([each[1] for each in probabilities]))
    proposer = make_proposer(min_confidence=least)
    for one in range(len(texts)):
        proposer.begin(Request(str(one), one, [1], MAX_LEN, K))
    drafts = proposer.propose(make_batch(texts))
    expected = [int((each >= least).sum()) for each in probabilities]
    assert drafts.lengths.tolist() == expected
    assert len(set(expected)) > 2


def test_tokens_that_the_model_does_not_have_are_read_and_not_drafted(make_proposer, make_engine):
    engine = make_engine(vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN)
    proposer = make_proposer(engine)
    runtime_batch = Schedule(proposer, lambda *a, **k: None)
    runtime_batch.begin(0, [1])
    proposer.drafter.vocab_size = 10
    tokens = np.array([[1, 2, 10**6]], np.int32)
    from specplug import Batch

    one, size = np.zeros(1, np.int32), np.full(1, 3, np.int32)
    batch = Batch(["0"], one, tokens, one, size, size, size, np.full(1, 4, np.int32))
    drafts = proposer.propose(batch)
    assert drafts.lengths.tolist() == [4]
    assert (drafts.token_ids < 10).all()


# -- sampled drafts ---------------------------------------------------------------------------


@pytest.fixture
def sampler(folder, make_proposer, make_engine):
    """Make a proposer that samples, for so many requests; a few tokens are the engine's alone."""

    def make(count, **options):
        engine = make_engine(
            vocab_size=VOCAB_SIZE + 3, max_model_len=MAX_LEN, num_speculative_tokens=K,
            max_num_seqs=count, provides=frozenset({Capability.DRAFT_PROBABILITIES}),
            load_tokenizer=lambda: transformers.AutoTokenizer.from_pretrained(folder),
        )  # fmt: skip
        proposer = make_proposer(engine, **options)
        for one in range(count):
            proposer.begin(Request(str(one), one, [1], MAX_LEN, K))
        return proposer

    return make


def test_sampled_drafts_say_what_they_were_drawn_from(sampler, make_batch, model):
    temperature = 1.7
    texts = [[i, i + 1, i + 2] for i in range(20, 30)]
    proposer = sampler(len(texts), temperature=temperature)
    drafts, known = proposer.propose(make_batch(texts)), proposer.drafter.vocab_size
    assert known < VOCAB_SIZE  # the tokenizer has fewer than the model
    assert drafts.lengths.tolist() == [K] * len(texts)
    assert drafts.probabilities.shape == (len(texts), K, VOCAB_SIZE + 3)
    assert not drafts.probabilities[:, :, known:].any()
    likeliest = 0
    for i, (text, draft) in enumerate(zip(texts, drafts.to_lists(), strict=True)):
        with torch.inference_mode():
            logits = model.plain_logits([*text, *draft])[len(text) - 1 : -1, :known]
        expected = (logits / temperature).softmax(dim=-1).numpy()
        found = drafts.probabilities[i, :, :known]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
        own = logits.softmax(dim=-1)[range(K), draft].numpy()
        np.testing.assert_allclose(drafts.scores[i], own, rtol=1e-3, atol=1e-6)
        likeliest += int((found.argmax(axis=-1) == draft).sum())
    assert 0 < likeliest < K * len(texts)


def test_where_a_sampled_draft_ends_does_not_follow_from_its_last_token(sampler, make_batch, model):
    texts = [[i, i + 1, i + 2] for i in range(20, 60)]
    least = 0.1
    proposer = sampler(len(texts), temperature=2.0, min_confidence=least)
    drafts, known = proposer.propose(make_batch(texts)), proposer.drafter.vocab_size
    for text, draft in zip(texts, drafts.to_lists(), strict=True):
        with torch.inference_mode():
            logits = model.plain_logits([*text, *draft])[len(text) - 1 :, :known]
        confidence = logits.softmax(dim=-1).max(dim=-1).values.cumprod(dim=0).numpy()
        assert len(draft) == min(K, int((confidence >= least).sum()))
    assert len(set(drafts.lengths.tolist())) > 2


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]])
    uniform = (np.arange(10_000) + 0.5) / 10_000
    tokens, drawn_from = drawn(logits.expand(len(uniform), -1), 0.5, uniform)
    expected = (2 * logits[0]).softmax(dim=-1)
    assert torch.equal(drawn_from[0], expected)
    counts = torch.bincount(tokens, minlength=5).numpy()
    np.testing.assert_allclose(counts, expected.numpy() * len(uniform), atol=1)
    ends, _ = drawn(logits.expand(2, -1), 0.5, np.array([0.0, 1 - 2**-53]))
    assert ends.tolist() == [0, 3]


def test_numbers_differ_by_seed_request_and_position_and_repeat():
    def numbers(seed):
        sampling = Sampling(1.0, seed, 10)
        for slot in (3, 0, 3):  # the last is another request in the slot of one that ended
            sampling.begin(slot)
        slots = np.repeat(np.array([3, 0], np.int32), 50)
        return sampling.uniform(slots, np.tile(np.arange(50, dtype=np.int32), 2))

    first = numbers(0)
    assert len(set(first.tolist() + numbers(1).tolist())) == 200
    assert first.tolist() == numbers(0).tolist()
    assert ((first >= 0) & (first < 1)).all()
    assert 0.4 < first.mean() < 0.6


def test_drafts_are_not_sampled_where_probabilities_are_not_used(make_proposer):
    with pytest.raises(CapabilityError, match=r"'temperature' is 0\.7"):
        make_proposer(temperature=0.7)


# -- memory -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)))),
        max_size=12,
    )
)
def test_no_block_belongs_to_two(events):
    table = BlockTable(num_blocks=13, max_tokens=64)
    sizes = {}
    for one in range(6):
        table.begin(one)
    for ends, pairs in events:
        wanted = dict(pairs)
        if ends:
            for one in wanted:
                table.end(one)
                sizes.pop(one, None)
        elif wanted:
            slots = np.array(list(wanted), np.int32)
            given_ = table.reserve(slots, np.array(list(wanted.values()), np.int32))
            for one, size, has in zip(slots.tolist(), wanted.values(), given_, strict=True):
                if has:
                    sizes[one] = max(size, sizes.get(one, 0))
        places = [table.places(np.array([one]), size)[0] for one, size in sizes.items()]
        together = np.concatenate([[BLOCK_SIZE], *places])[1:]
        assert len(set(together.tolist())) == len(together)
        assert (together >= BLOCK_SIZE).all()
        assert table.num_held == sum(-(-size // BLOCK_SIZE) for size in sizes.values())


def test_who_finds_no_room_is_not_drafted_for_until_there_is(make_proposer, make_batch, model):
    block = make_proposer.shared.drafter._cache.block_bytes
    proposer = make_proposer(cache_bytes=9 * block)  # eight, and the one for padding
    schedule = Schedule(proposer, make_batch)
    schedule.begin(0, range(1, 81))
    schedule.begin(1, range(1, 51))
    _, drafts = schedule.propose([0, 1])
    assert drafts.lengths.tolist() == [0, K]
    schedule.end(1)
    batch, drafts = schedule.propose([0])
    assert drafts.lengths.tolist() == [K]
    assert_as_plain(model, batch, drafts, 0)


def test_memory_is_counted_and_freed(make_proposer, make_batch):
    proposer = make_proposer()
    empty = proposer.usage()
    weights = sum(w.nbytes for w in proposer.drafter._model.state_dict().values())
    assert empty.num_bytes >= weights
    schedule = Schedule(proposer, make_batch)
    schedule.begin(0, range(1, 41))
    schedule.propose([0])
    block = proposer.drafter._cache.block_bytes
    assert proposer.usage() == (1, empty.num_bytes + 3 * block)
    schedule.end(0)
    assert proposer.usage() == empty
    proposer.close()
    assert proposer.usage() == (0, 0)


def test_a_cache_that_cannot_hold_one_request_is_refused(make_proposer):
    with pytest.raises(OptionError) as caught:
        make_proposer(cache_bytes=1000)
    for word in ("needs 57,344 bytes", "96 tokens", "cache_bytes is 1,000 bytes", "57344 or more"):
        assert word in str(caught.value)


def test_more_than_the_device_has_is_refused_before_it_is_loaded(make_proposer, monkeypatch):
    from specplug.proposers import _draft_loader

    monkeypatch.setattr(_draft_loader, "free_bytes", lambda _: 2**20)
    monkeypatch.setattr(_draft_loader.Checkpoint, "load", lambda _: pytest.fail("was loaded"))
    with pytest.raises(OptionError) as caught:
        make_proposer(cache_bytes=2**30)
    for word in ("1.00 GiB on cpu", "for weights", "1.0 MiB are free", "smaller cache_bytes"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model": "/nowhere/at/all"},
            ["'/nowhere/at/all' cannot be loaded", "the folder of a checkpoint"],
        ),
        ({"model": "nobody/nothing"}, ["'nobody/nothing' cannot be loaded", "local_files_only"]),
    ],
)
def test_a_model_that_is_not_there_is_refused(make_proposer, options, words):
    with pytest.raises(OptionError) as caught:
        make_proposer(**options)
    for word in words:
        assert word in str(caught.value)


def test_a_model_of_another_kind_is_refused(make_proposer, tmp_path):
    from transformers import MambaConfig

    MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    with pytest.raises(OptionError, match=r"MambaForCausalLM\) cannot draft"):
        make_proposer(model=str(tmp_path))


def test_a_model_that_says_something_else_with_a_cache_is_refused(make_proposer, monkeypatch):
    forward = Drafter._forward

    def wrong(self, tokens, positions, *rest):
        return forward(self, tokens, positions * 0, *rest)

    monkeypatch.setattr(Drafter, "_forward", wrong)
    with pytest.raises(OptionError, match="log-probabilities differ by"):
        make_proposer()


def test_a_window_of_attention_bounds_what_is_drafted_for(make_batch, engine, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=20,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    proposer = DraftModelProposer(DraftModelOptions(model=str(tmp_path), cache_bytes=2**20))
    proposer.prepare(engine)
    for one in range(2):
        proposer.begin(Request(str(one), one, [1], MAX_LEN, K))
    drafts = proposer.propose(make_batch([range(18), range(20)]))
    assert drafts.lengths.tolist() == [2, 0]


# -- in the runtime ---------------------------------------------------------------------------


def generate(runtime, model, prompt, count, request_id="r"):
    """Let the runtime's proposer draft for the model itself; return the output."""
    text = [*prompt, *plain(model, prompt, 1)[0]]
    runtime.begin(Arrival(request_id, list(prompt), MAX_LEN))
    draft = []
    while len(text) < len(prompt) + count:
        step = Step(
            [request_id], np.array([text], np.int32), np.zeros(1, np.int32), [len(text)], [True],
            {request_id: draft} if draft else {},
        )  # fmt: skip
        draft = runtime.step(step).to_lists()[0]
        target = plain(model, text, len(draft) + 1)[0]
        text += target[: next((i for i, d in enumerate(draft) if d != target[i]), len(draft)) + 1]
    runtime.end(request_id)
    return text[len(prompt) :]


def test_its_own_target_accepts_everything(folder, engine, model):
    options = {"model": str(folder), "cache_bytes": 2**22}
    runtime = Runtime(
        "draft_model", engine, Settings(options=options, length_policy="fixed"), PluginManager()
    )
    output = generate(runtime, model, [1, 2, 3, 4], 50)
    assert output == plain(model, [1, 2, 3, 4], len(output))[0]
    assert runtime.counters.acceptance_rate == 1.0
    assert runtime.counters.num_faults == 0
    runtime.close()


def test_a_request_that_breaks_leaves_the_others_alone(folder, engine, model, caplog):
    options = {"model": str(folder), "cache_bytes": 2**22}
    runtime = Runtime(
        "draft_model", engine, Settings(options=options, length_policy="fixed"), PluginManager()
    )
    forward, broken = runtime.proposer.drafter._forward, [True]
    runtime.proposer.drafter._forward = lambda *a: 1 / 0 if broken.pop() else forward(*a)
    broken += [False] * 200 + [True] + [False] * 5
    with caplog.at_level(logging.ERROR):
        output = generate(runtime, model, [5, 6, 7], 40)
    assert output == plain(model, [5, 6, 7], len(output))[0]
    assert runtime.counters.num_faults == 1
    assert runtime.counters.acceptance_rate == 1.0
    assert "propose raised ZeroDivisionError" in caplog.text


def test_in_a_cascade_it_drafts_only_where_lookup_found_nothing(folder, engine, model, monkeypatch):
    cascade = {
        "parts": ["ngram", "draft_model"],
        "part_options": {"draft_model": {"model": str(folder), "cache_bytes": 2**22}},
    }
    runtime = Runtime(
        "cascade", engine, Settings(options=cascade, length_policy="fixed"), PluginManager()
    )
    lookup, drafter = (part.proposer for part in runtime.proposer._parts)
    found, asked = [], []
    for part, seen in ((lookup, found), (drafter, asked)):

        def watch(batch, propose=part.propose, seen=seen):
            seen.append((list(batch.request_ids), result := propose(batch)))
            return result

        monkeypatch.setattr(part, "propose", watch)
    output = generate(runtime, model, [30, 31, 32, 30, 31], 60)
    assert output == plain(model, [30, 31, 32, 30, 31], len(output))[0]
    without = sum(not drafts.lengths.any() for _, drafts in found)
    assert len(asked) == without
    assert 0 < without < len(found)
    assert all(drafts.lengths[0] for _, drafts in asked)
    assert runtime.counters.num_faults == 0
