"""``specplug bench`` on the real vLLM."""

import io
import json

import pytest
from harness import RUNNER
from rich.console import Console

from specplug.bench.command import BenchSettings, run_bench

if RUNNER != "v1":
    pytest.skip("bench starts processes of its own: once is enough", allow_module_level=True)

PROMPTS = [
    {"id": "words", "prompt": "one two three four one two three four one two", "max_tokens": 24},
    {"id": "list", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 24},
]


def test_vllm_is_measured_and_says_the_same(smollm2, tmp_path):
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    settings = BenchSettings(
        engine="vllm",
        model=str(smollm2),
        proposers=["suffix:length_policy=fixed"],
        num_speculative_tokens=[4],
        batch_sizes=[2],
        data=[str(data)],
        rounds=2,
        limit=2,
        max_tokens=24,
        engine_methods=['ngram={"method": "ngram", "num_speculative_tokens": 4}'],
        engine_arguments={"dtype": "float32"},
        tokenizer=None,
        at_once=None,
        output=tmp_path / "out",
    )
    console = Console(width=200, file=io.StringIO())
    assert run_bench(settings, console), console.file.getvalue()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plain, theirs, ours = report["cells"]
    assert [cell["method"] for cell in (plain, theirs, ours)] == [
        "no speculation", "ngram", "specplug suffix:length_policy=fixed",
    ]  # fmt: skip
    for cell in (plain, theirs, ours):
        assert cell["num_identical"] == cell["num_outputs"] == 4
        assert cell["tokens_per_second"] > 0
        assert cell["first_token_seconds"] > 0
        assert cell["peak_bytes"] > 2**28
    assert plain["tokens_per_step"] == 1
    assert plain["acceptance_rate"] is None
    assert ours["tokens_per_step"] > 1.1  # the first prompt repeats itself
    assert 0 < ours["acceptance_rate"] <= 1
    assert 0 < ours["drafting_share"] < 0.5
    assert ours["ratio"]["value"] > 0
