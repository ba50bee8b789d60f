"""vLLM's side of ``specplug bench``: what is compared, and one engine in a process of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specplug.bench.answering import Arrivals, Setup, answer, counted, options_apart, tokenised
from specplug.config import REQUEST_PREFIX

LARGEST_BATCH = None
_COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_BLOCK = 32
"""No block of the KV cache is longer, but on a CPU, where 128 is usual."""


def own_methods(k: int) -> dict[str, dict[str, Any]]:
    """Return vLLM's n-gram as it comes, and as it drafts more."""
    plain: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": k}
    return {
        "vLLM ngram [5,5]": own(plain),  # its default
        "vLLM ngram [2,5]": own({**plain, "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
    }


def own(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments for a ``speculative_config``."""
    return {"speculative_config": arguments}


def ours(proposer: str, k: int, section: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments for a proposer."""
    config = {"model": f"specplug.vllm.{proposer}", "num_speculative_tokens": k}
    additional = {"additional_config": {"specplug": section}} if section else {}
    return {"speculative_config": config, **additional}


def flags(speculation: dict[str, Any]) -> str:
    """Return the arguments of ``vllm serve``."""
    return " ".join(
        f"--{name.replace('_', '-')} '{json.dumps(value)}'" for name, value in speculation.items()
    )


def serve() -> None:
    """Run one engine and answer the batches on standard input."""
    # It would outrank the size given below: there may be many engines on a machine.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    answer(Engine)


class Engine:
    """An engine with room for the longest prompts that it will be asked."""

    def __init__(self, setup: Setup) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        model, engine_arguments = setup.model, setup.engine_arguments
        speculation = setup.speculation or {}
        trust = engine_arguments.get("trust_remote_code", False)
        encoder = AutoTokenizer.from_pretrained(setup.tokenizer or model, trust_remote_code=trust)
        self._prompts = [tokenised(encoder, content) for content in setup.contents]
        self._max_tokens = setup.max_tokens
        longest = max(map(_total, self._prompts, self._max_tokens))
        arguments = {
            "max_model_len": longest,
            "max_num_seqs": setup.batch_size,
            "tokenizer": setup.tokenizer,
            # Every round does the same work.
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **_beside_others(model, setup.batch_size * longest, engine_arguments),
            **engine_arguments,
            **speculation,
        }
        sections = (engine_arguments, speculation)
        arguments["additional_config"] = _merged([s.get("additional_config") for s in sections])
        self._llm = LLM(model, **arguments)
        self._num_requests = 0

    def generate(self, batch: Sequence[int], namespaces: Sequence[str]) -> list[Arrivals]:
        """Answer the prompts at once; the time of each step's tokens is noted."""
        from vllm.outputs import RequestOutput

        engine, arrivals = self._llm.llm_engine, {}
        started = time.perf_counter()
        for prompt, namespace in zip(batch, namespaces, strict=True):
            self._num_requests += 1
            request_id = str(self._num_requests)
            arrivals[request_id] = Arrivals()
            sampling = self._sampling(prompt, namespace)
            engine.add_request(request_id, {"prompt_token_ids": self._prompts[prompt]}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                assert isinstance(output, RequestOutput)
                arrivals[output.request_id].add(now, output.outputs[0].token_ids)
        return list(arrivals.values())

    def _sampling(self, prompt: int, namespace: str) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {f"{REQUEST_PREFIX}{k}": v for k, v in options_apart(namespace).items()}
        return SamplingParams(
            temperature=0,
            max_tokens=self._max_tokens[prompt],
            output_kind=RequestOutputKind.DELTA,
            extra_args=options,
        )

    def counts(self) -> dict[str, float]:
        """Return vLLM's own counters of speculation, and what specplug spent on drafting."""
        engine = {metric.name: metric for metric in self._llm.get_metrics()}
        found = {name: engine.get(f"vllm:spec_decode_{name}") for name in _COUNTED}
        theirs = {name: metric.value if metric else 0 for name, metric in found.items()}
        return {**counted(), **theirs}


def _total(prompt: Sequence[int], max_tokens: int) -> int:
    """Return the tokens of a request that is as long as can be, in whole blocks."""
    return -(-(len(prompt) + max_tokens + 1) // _BLOCK) * _BLOCK


def _beside_others(
    model: str, num_tokens: int, engine_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments with which several engines share a machine.

    With the KV cache's size given, the utilization is only what has to be free at the start.
    """
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {"enforce_eager": True} if on_cpu else {}
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & engine_arguments.keys():
        arguments["kv_cache_memory_bytes"] = _kv_bytes(model, num_tokens, engine_arguments)
        arguments["gpu_memory_utilization"] = 0.1
    return arguments


def _kv_bytes(model: str, num_tokens: int, engine_arguments: Mapping[str, Any]) -> int:
    """Return the size of a KV cache of full attention in every layer, and a quarter more."""
    from transformers import AutoConfig

    trust = engine_arguments.get("trust_remote_code", False)
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust).get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    per_token = 2 * 4 * config.num_hidden_layers * kv_heads * width
    return int(max(2**28, per_token * num_tokens * 5 // 4))


def _merged(sections: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Put ``additional_config`` of the user and of the method together, one level deep."""
    merged: dict[str, Any] = {}
    for section in sections:
        for name, value in (section or {}).items():
            known = merged.get(name)
            if isinstance(known, dict) and isinstance(value, dict):
                merged[name] = {**known, **value}
            else:
                merged[name] = value
    return merged
