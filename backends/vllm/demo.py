"""vLLM's side of ``specplug demo``: what is compared, and one engine in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from specplug.config import REQUEST_PREFIX
from specplug.demo.answering import answer, counted, options_apart

_COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def methods(proposers: Sequence[str], k: int) -> dict[str, dict[str, Any] | None]:
    """Return what is compared: a label and vLLM's ``speculative_config`` each, none first."""
    own: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": k}
    return {
        "no speculation": None,
        "vLLM ngram [5,5]": own,  # its default
        "vLLM ngram [2,5]": {**own, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        **{
            f"specplug {name}": {"model": f"specplug.vllm.{name}", "num_speculative_tokens": k}
            for name in proposers
        },
    }


def serve() -> None:
    """Run one engine and answer the requests on standard input."""
    # It would outrank the size given below: the demo's engines are small, and there are many.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    answer(_start, _generate)


def _start(model: str, speculation: dict[str, Any] | None) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    return LLM(
        model,
        # In 16 bits near ties are decided by rounding, which depends on the size of the batch
        # and so on speculation; then the texts could not be compared.
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=1,
        enforce_eager=on_cpu,
        # Several engines share the machine. With the cache's size given, the utilization
        # is only what has to be free at the start.
        kv_cache_memory_bytes=2**28 if on_cpu else 2**30,
        gpu_memory_utilization=0.1,
        # Every round does the same work.
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation,
    )


def _generate(llm: Any, text: str, max_tokens: int, round_name: str) -> dict[str, Any]:
    from vllm import SamplingParams

    message = {"role": "user", "content": text}
    options = {f"{REQUEST_PREFIX}{k}": v for k, v in options_apart(round_name).items()}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=options)
    before = _counts(llm)
    started = time.perf_counter()
    [result] = llm.chat([message], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    costs = {name: value - before[name] for name, value in _counts(llm).items()}
    return {"token_ids": list(result.outputs[0].token_ids), "seconds": seconds, **costs}


def _counts(llm: Any) -> dict[str, float]:
    """Return vLLM's own counters of speculation, and what specplug spent on drafting."""
    engine = {metric.name: metric for metric in llm.get_metrics()}
    counts: dict[str, float] = {}
    for name in _COUNTED:
        metric = engine.get(f"vllm:spec_decode_{name}")
        counts[name] = metric.value if metric else 0
    return {**counted(), **counts}
