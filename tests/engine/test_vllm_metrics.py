"""vLLM's own /metrics: specplug's counters are there, beside vLLM's, and both agree."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, idle, started, until

from specplug.prometheus import FOLDER, METRICS

K, NUM_REQUESTS, NUM_TOKENS = 4, 8, 40
DASHBOARD = Path(__file__).parent.parent.parent / "grafana" / "specplug.json"
SETUPS = {
    "one API server": (),
    "two API servers": ("--api-server-count", "2"),
    "two replicas": ("--data-parallel-size", "2"),
}


async def ask(server: Server) -> None:
    """Ask all at once, so that every replica gets some."""
    async with server.session() as session:

        async def one(i: int) -> None:
            body = {
                "model": "tiny", "prompt": f"the parser reads a file and writes the file {i}",
                "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()

        await asyncio.gather(*map(one, range(NUM_REQUESTS)))


def settled(metrics: str) -> bool:
    """Return whether nothing runs, for vLLM and for specplug, which learns it a step later."""
    return idle(metrics) and not any(samples(metrics)["specplug_running_requests"].values())


def samples(metrics: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by name, then by engine and position; those without are left out."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not {"model_name", "engine"} <= set(sample.labels):
                continue
            assert sample.labels["model_name"] == "tiny"
            label = (sample.labels["engine"], *filter(None, [sample.labels.get("position")]))
            found.setdefault(sample.name, {})[label] = sample.value
    return found


@pytest.fixture
def temporary(monkeypatch):
    """A folder for temporary files, with a name short enough for vLLM's sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("setup", SETUPS)
def test_the_counters_agree_with_vllms_own(tiny_model, tmp_path, temporary, setup):
    config = {"model": "specplug.vllm.suffix", "num_speculative_tokens": K}
    with started(
        tiny_model, tmp_path / "log", "--served-model-name", "tiny", "--max-model-len", "256",
        "--shutdown-timeout", "30", "--speculative-config", json.dumps(config),
        "--additional-config", json.dumps({"specplug": {"length_policy": "fixed"}}), *SETUPS[setup],
    ) as server:  # fmt: skip
        asyncio.run(ask(server))
        text = asyncio.run(until(server, "/metrics", settled, 30))
        own = len(list(temporary.glob("specplug-metrics-*")))
    found = samples(text)

    engines = [("0",), ("1",)] if "replicas" in setup else [("0",)]
    assert all(sorted(found[one.name]) == engines for one in METRICS if not one.by_position)
    assert sum(found["specplug_requests_total"].values()) == NUM_REQUESTS
    assert all(number > 0 for number in found["specplug_requests_total"].values())
    for name in ("accepted_tokens", "accepted_tokens_per_pos"):
        ours = found[f"specplug_{name}_total"]
        assert ours == found[f"vllm:spec_decode_num_{name}_total"]
        assert sum(ours.values()) > 0
    for engine in engines:
        drafts, draft_tokens = (
            found[f"vllm:spec_decode_num_{name}_total"][engine]
            - found[f"specplug_{name}_total"][engine]
            for name in ("drafts", "draft_tokens")
        )
        # vLLM pads some new requests with K tokens that nobody drafted.
        assert draft_tokens == K * drafts >= 0
    for name in ("running_requests", "proposer_requests", "switched_off"):
        assert set(found[f"specplug_{name}"].values()) == {0}
    assert set(found["specplug_faults_total"].values()) == {0}

    assert set(re.findall(r"vllm:\w+", DASHBOARD.read_text())) <= set(found)
    assert own == (setup == "one API server"), "else vLLM's folder is used"
    assert not list(temporary.glob("specplug-metrics-*")), "it was left behind"


def test_nothing_is_prepared_for_an_engine_that_does_not_select_specplug(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)  # where an engine in this process has selected it
    code = """
import os
from vllm.config import VllmConfig
from vllm.plugins import load_general_plugins
load_general_plugins()
from specplug.prometheus import FOLDER
assert hasattr(VllmConfig.__post_init__, "__wrapped__"), "the plugin is not watching"
VllmConfig()
print(FOLDER in os.environ)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ
    )
    assert done.stdout.splitlines()[-1] == "False"
