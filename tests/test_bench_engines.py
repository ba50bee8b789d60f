"""The engines' side of ``specplug bench``, with a tiny model of transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-dev")
transformers = pytest.importorskip("transformers", reason="make setup-dev installs transformers")
tokenizers = pytest.importorskip("tokenizers", reason="make setup-dev installs tokenizers")

from specplug.backends.transformers import bench  # noqa: E402
from specplug.bench.answering import Setup  # noqa: E402

WORDS = 40
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model with a tokenizer of one word per token, which soon repeats itself."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    words = {f"w{i}": i for i in range(WORDS)}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words_only).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers(model, speculation):
    contents = ["w1 w2 w3 w1 w2", [{"role": "user", "content": "w7 w8"}]]
    engine = bench.Engine(Setup(model, speculation, {}, contents, [MAX_TOKENS] * 2))
    found = engine.generate([0, 1], ["a", "b"])
    return engine, found


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant", "proposer"])
def test_transformers_answers_alike_and_tells_each_step(tiny, kind):
    speculation = {
        "prompt lookup": bench.own_methods(4)["transformers prompt lookup"],
        "assistant": bench.own({"assistant_model": tiny}),
        "proposer": bench.ours("suffix", 4, {"length_policy": "fixed"}),
    }[kind]
    _, plain = answers(tiny, None)
    engine, found = answers(tiny, speculation)
    for one, other in zip(plain, found, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == MAX_TOKENS
        assert [count for _, count in one.arrivals] == [1] * MAX_TOKENS
        assert sum(count for _, count in other.arrivals) == MAX_TOKENS
        assert len(other.arrivals) < MAX_TOKENS  # some steps brought several
        times = [seconds for seconds, _ in other.arrivals]
        assert times == sorted(times)
        assert times[0] > 0
    if kind == "proposer":
        counts = engine.counts()
        assert 0 < counts["num_accepted_tokens"] <= counts["num_draft_tokens"]
