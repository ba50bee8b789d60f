"""vLLM's server with the flags of the README: workers in processes of their own."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
from serving import started

PROMPT = "the parser reads a file and the writer writes the file that the parser reads"


def post(port, path, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def completions(port):
    """Answer a few requests, some at a time: plain, with per-request options, with bad ones."""
    extras = [
        {},
        {"specplug_num_speculative_tokens": 0},
        {"specplug_num_speculative_tokens": 1},
        {"specplug_num_speculative_tokens": "many"},
    ]

    def ask(i):
        body = {
            "model": "tiny", "prompt": f"{PROMPT} {i // len(extras)}", "max_tokens": 60,
            "temperature": 0, "ignore_eos": True, "vllm_xargs": extras[i % len(extras)],
        }  # fmt: skip
        return post(port, "/v1/completions", **body)["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(8)))


def test_served_text_is_the_same_and_what_was_served_is_kept(tiny_model, tmp_path):
    flags = ("--served-model-name", "tiny", "--max-model-len", "256")
    log = tmp_path / "plain.log"
    with started(tiny_model, log, *flags, logging_level="DEBUG") as server:
        plain = completions(server.port)
    assert "specplug can be selected" in log.read_text(), "the general plugin was not called"

    log = tmp_path / "speculative.log"
    config = {"model": "specplug.vllm.suffix", "num_speculative_tokens": 4}
    cache = tmp_path / "cache.npz"
    settings = {
        "length_policy": "fixed",
        "options": {"cache_file": str(cache)},
        "record_folder": str(tmp_path),
        "log_interval_seconds": 0.5,
    }
    with started(
        tiny_model, log, *flags,
        # Without it vLLM kills its workers, and what they would do at shutdown is not done.
        "--shutdown-timeout", "30",
        "--speculative-config", json.dumps(config),
        "--additional-config", json.dumps({"specplug": settings}),
    ) as server:  # fmt: skip
        assert completions(server.port) == plain

    lines = log.read_text().splitlines()
    counters = [line for line in lines if "specplug proposer 'suffix': " in line]
    assert len(counters) >= 2, "logged at an interval and at shutdown"
    assert "8 requests" in counters[-1] and " 0 faults" in counters[-1]
    assert " 0 accepted" not in counters[-1]
    assert sum("without its options" in line for line in lines) == 2

    (recorded,) = tmp_path.glob("record-*.jsonl")
    outputs = [json.loads(line)["output_token_ids"] for line in recorded.open()]
    assert [len(output) for output in outputs] == [60] * 8
    with np.load(cache) as saved:
        assert saved["tokens"].tolist() == list(chain(*outputs))
