"""transformers' side of ``specplug demo``: what is compared, and one model in its own process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from specplug.demo.answering import answer, compared, counted, options_apart

_MATCHES = {"max_matching_ngram_size": 3}


def methods(proposers: Sequence[str], k: int) -> dict[str, dict[str, Any] | None]:
    """Return what is compared: a label and the arguments of ``generate`` each, none first."""
    own = {"transformers prompt lookup": {"prompt_lookup_num_tokens": k, **_MATCHES}}
    return compared(own, proposers, k)


def serve() -> None:
    """Load one model and answer the requests on standard input."""
    answer(Engine, Engine.generate)


class Engine:
    """A model and its tokenizer, and how it is to generate."""

    def __init__(self, model: str, speculation: Mapping[str, Any] | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        # In 16 bits near ties are decided by rounding, and the texts could not be compared.
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if torch.cuda.is_available():
            self._model.to("cuda")
        self._arguments = dict(speculation or {})
        if "proposer" in self._arguments:
            from specplug.transformers import generate

            self._arguments["custom_generate"] = generate

    def generate(self, text: str, max_tokens: int, round_name: str) -> dict[str, Any]:
        """Answer a text; return the new tokens, the time, and what was counted meanwhile."""
        message = {"role": "user", "content": text}
        inputs = self._tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        arguments = dict(self._arguments)
        if "proposer" in arguments:
            arguments["request_options"] = options_apart(round_name)
        before, started = counted(), time.perf_counter()
        tokens = self._model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, **arguments
        )
        seconds = time.perf_counter() - started
        costs = {name: value - before[name] for name, value in counted().items()}
        new = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        return {"token_ids": new, "seconds": seconds, **costs}
