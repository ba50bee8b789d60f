"""Sampled drafts with probabilities in transformers' ``generate``: the model's distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2_contingency

import specplug
from specplug import Drafts, Proposer, length_control
from specplug.errors import CapabilityError
from specplug.plugins import PluginManager
from specplug.proposer import Capability, ProposerSpec

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-dev")
transformers = pytest.importorskip("transformers", reason="make setup-dev installs transformers")

from tinymodel import VOCAB_SIZE, make_tiny_model  # noqa: E402

import specplug.transformers as backend  # noqa: E402
from specplug.backends.transformers import decoding  # noqa: E402
from specplug.proposers._draft_sampling import Sampling  # noqa: E402
from specplug.proposers.draft_model import DraftModelProposer  # noqa: E402

PROMPT = [25, 40, 31, 25, 40, 31, 25]
NUM_TOKENS = 3
NUM_SAMPLES = 1000
ALLOWED = 1e-3
"""The p-value from which on two samples may be of one distribution."""
WARPED = {"do_sample": True, "top_k": 3, "temperature": 1.6}


class Marginal(Proposer):
    """Samples each new token from what it usually is, whatever came before it."""

    probabilities = np.zeros((NUM_TOKENS, VOCAB_SIZE))
    stated = None  # what it says it draws from, if that is not what it draws from

    def __init__(self):
        self._random = np.random.default_rng(5)

    def propose(self, batch):
        [done], [most] = batch.num_tokens - batch.num_prompt_tokens, batch.max_draft_tokens
        drawn_from = self.probabilities[done : done + most]
        tokens = [self._random.choice(VOCAB_SIZE, p=one) for one in drawn_from]
        stated = drawn_from if self.stated is None else self.stated[done : done + most]
        scores = drawn_from[np.arange(most), tokens]
        return Drafts(np.array([tokens]), np.array([most]), scores[None], stated[None])


class Watching(Proposer):
    """Drafts a wrong and a right token, and keeps the logits that it is shown."""

    uses = frozenset({Capability.LOGITS})

    def __init__(self):
        self.seen = []

    def propose(self, batch):
        return [[PROMPT[0], PROMPT[1]][: batch.max_draft_tokens[0]]]

    def observe(self, acceptance):
        [logits], [new] = acceptance.logits, acceptance.new_token_ids
        self.seen.append((logits, list(acceptance.draft_token_ids[0]), new))


@pytest.fixture(autouse=True)
def own_proposers(monkeypatch):
    discover = PluginManager._discover

    def with_ours(self):
        discover(self)
        for kind in (Marginal, Watching):
            self.add(ProposerSpec(kind.__name__.lower(), lambda _options, kind=kind: kind()))

    monkeypatch.setattr(PluginManager, "_discover", with_ours)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=1)


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def relative(model, folder, tmp_path_factory):
    """A model that is much like the target, and not the same."""
    path = tmp_path_factory.mktemp("models") / "relative"
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    other.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


def sampled(model, seed, count=NUM_SAMPLES, **options):
    """Return how often each text of three tokens was sampled."""
    torch.manual_seed(seed)
    found = model.generate(
        # With one more: behind a draft there is always room for a token.
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS + 1, num_return_sequences=count,
        **WARPED, **options,
    )  # fmt: skip
    return Counter(map(tuple, found[:, len(PROMPT) :][:, :NUM_TOKENS].tolist()))


def drafted(
    model, seed, proposer="marginal", options=None, count=NUM_SAMPLES, policy="fixed", **settings
):
    return sampled(
        model, seed, count, custom_generate=backend.generate, proposer=proposer,
        num_speculative_tokens=2, options=options, settings={"length_policy": policy, **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(model):
    return sampled(model, 1, 20 * NUM_SAMPLES)


@pytest.fixture
def marginal(expected, monkeypatch):
    """What ``Marginal`` draws from: the most usual token half the time, else any that there is."""
    found = np.zeros((NUM_TOKENS, VOCAB_SIZE))
    for position in range(NUM_TOKENS):
        times = Counter(text[position] for text in expected.elements())
        found[position, list(times)] = 1 / (len(times) - 1) / 2
        found[position, max(times, key=times.__getitem__)] = 1 / 2
    monkeypatch.setattr(Marginal, "probabilities", found)
    return found


@pytest.fixture
def fresh(model):
    """Give each test a runtime of its own."""
    yield
    for runtime in specplug.running():
        runtime.close()


def p_value(expected, found):
    """Return the p-value of the test that two samples are of one distribution (chi-square)."""
    least = 5 * expected.total() / found.total()
    common = [text for text, times in expected.items() if times >= least]
    assert len(common) > 5
    table = np.array([[counts[text] for text in common] for counts in (expected, found)])
    others = [[expected.total()], [found.total()]] - table.sum(axis=1, keepdims=True)
    return chi2_contingency(np.hstack([table, others]) if others.any() else table).pvalue


def counters():
    [runtime] = specplug.running()
    assert runtime.counters.num_faults == 0
    return runtime.counters


@pytest.mark.usefixtures("fresh", "marginal")
def test_drafts_of_any_distribution_leave_the_models(model, expected):
    assert p_value(expected, drafted(model, seed=11)) > ALLOWED
    assert 0.1 < counters().acceptance_rate < 0.9


def always(target, draft, token):
    return token


def from_all_of_the_target(target, draft, token):
    if torch.rand(()) * draft[token] < target[token]:
        return token
    return int(torch.multinomial(target, num_samples=1))


@pytest.mark.usefixtures("fresh", "marginal")
@pytest.mark.parametrize("wrong", [always, from_all_of_the_target])
def test_the_test_notices_a_wrong_verifier(model, expected, monkeypatch, wrong):
    monkeypatch.setattr(decoding, "verified", wrong)
    assert p_value(expected, drafted(model, seed=12)) < ALLOWED


@pytest.mark.usefixtures("fresh")
def test_the_test_notices_a_proposer_that_lies(model, expected, marginal, monkeypatch):
    monkeypatch.setattr(Marginal, "stated", np.full_like(marginal, 1 / VOCAB_SIZE))
    assert p_value(expected, drafted(model, seed=13)) < ALLOWED


LIKELY_ONLY = {"policy": "match_scaled", "length_policy_options": {"min_probability": 0.2}}


@pytest.mark.usefixtures("fresh", "marginal")
@pytest.mark.parametrize(
    "settings",
    [{"policy": "adaptive"}, LIKELY_ONLY, {"max_draft_tokens_per_step": 1}],
    ids=["adaptive", "match_scaled", "limited"],
)
def test_drafts_that_are_cut(model, expected, settings):
    assert p_value(expected, drafted(model, seed=14, **settings)) > ALLOWED
    assert counters().num_accepted_tokens > 0


@pytest.mark.usefixtures("fresh", "marginal")
def test_the_test_notices_drafts_that_are_cut_for_what_they_hold(model, expected, monkeypatch):
    monkeypatch.setattr(length_control, "_unseen", lambda batch, drafts: drafts)
    assert p_value(expected, drafted(model, seed=14, **LIKELY_ONLY)) < ALLOWED


@pytest.fixture
def options(relative):
    return {"model": str(relative), "temperature": 1.2, "cache_bytes": 2**22}


@pytest.mark.usefixtures("fresh")
def test_a_draft_model_that_samples_and_probabilities_make_more_of_it_accepted(
    model, expected, options, monkeypatch
):
    def run(seed):
        assert p_value(expected, drafted(model, seed, "draft_model", options)) > ALLOWED
        return counters().acceptance_rate

    with_probabilities = run(21)
    specplug.running()[0].close()
    propose = DraftModelProposer.propose
    monkeypatch.setattr(
        DraftModelProposer,
        "propose",
        lambda self, batch: replace(propose(self, batch), probabilities=None),
    )
    assert 0.1 < run(22) < with_probabilities - 0.05 < 0.9


@pytest.mark.usefixtures("fresh")
def test_requests_with_the_same_random_numbers_would_be_noticed(
    model, expected, options, monkeypatch
):
    begin = Sampling.begin

    def alike(self, slot):
        begin(self, slot)
        self._numbers[slot] = 0

    monkeypatch.setattr(Sampling, "begin", alike)
    assert p_value(expected, drafted(model, 23, "draft_model", options, 300)) < ALLOWED


@pytest.mark.usefixtures("fresh")
def test_runs_repeat_and_take_no_numbers_from_elsewhere(model, options):
    def run(**changes):
        np.random.seed(0)
        found = drafted(model, 31, "draft_model", options | changes, 40)
        times = tuple(counters().num_accepted_tokens_per_pos)
        elsewhere = np.random.random()
        specplug.running()[0].close()
        return found, times, elsewhere

    assert run() == run()
    np.random.seed(0)
    untouched = np.random.random()
    found, _, elsewhere = run()
    assert elsewhere == untouched
    assert found != run(seed=7)[0]


@pytest.mark.usefixtures("fresh")
def test_greedy_text_with_sampled_drafts(model, options):
    plain = {"max_new_tokens": 30, "do_sample": False}
    ours = {
        "custom_generate": backend.generate, "proposer": "draft_model", "options": options,
        "num_speculative_tokens": 4,
    }  # fmt: skip
    prompt = torch.tensor([PROMPT])
    assert torch.equal(model.generate(prompt, **plain, **ours), model.generate(prompt, **plain))
    assert counters().num_accepted_tokens > 0


@pytest.mark.usefixtures("fresh")
def test_a_cascade_takes_no_probabilities(model, options):
    parts = {"parts": ["ngram", "draft_model"], "part_options": {"draft_model": options}}
    with pytest.raises(CapabilityError, match=r"'temperature' is 1\.2"):
        drafted(model, 1, "cascade", parts, 1)


@pytest.mark.usefixtures("fresh")
def test_logits_reach_a_proposer_that_uses_them(model):
    found = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, repetition_penalty=1.3,
        custom_generate=backend.generate, proposer="watching", num_speculative_tokens=2,
    )[0].tolist()  # fmt: skip
    [runtime] = specplug.running()
    length = len(PROMPT)
    assert len(runtime.proposer.seen) > 5
    for logits, draft, new in runtime.proposer.seen:
        assert logits.dtype == np.float32
        text = torch.tensor([found[:length] + draft])
        with torch.no_grad():
            whole = model(text).logits[0, -len(draft) - 1 :]
        np.testing.assert_allclose(logits, whole.numpy(), atol=1e-4, rtol=1e-4)
        length += len(new)
    assert length == len(found)


@pytest.mark.usefixtures("fresh", "marginal")
def test_logits_are_not_made_for_others(model):
    seen = []

    class Watched(decoding.Step):
        def __init__(self, **columns):
            seen.append(columns["logits"])
            super().__init__(**columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "Step", Watched)
        drafted(model, 1, count=1)
    assert seen
    assert set(seen) == {None}
