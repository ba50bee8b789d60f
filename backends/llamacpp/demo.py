"""llama.cpp's side of ``specplug demo``: what is compared, and one model in its own process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specplug.demo.answering import answer, compared, counted
from specplug.demo.model import packaged_weights


def methods(proposers: Sequence[str], k: int) -> dict[str, dict[str, Any] | None]:
    """Return what is compared: a label and the draft model of ``Llama`` each, none first."""
    return compared({"llama.cpp prompt lookup": {"num_pred_tokens": k}}, proposers, k)


def serve() -> None:
    """Load one model and answer the requests on standard input."""
    answer(Engine, Engine.generate)


class Engine:
    """A GGUF file: one in the model's folder, or the one that the demo's model is made from."""

    def __init__(self, model: str, speculation: Mapping[str, Any] | None) -> None:
        from llama_cpp import Llama

        weights = next(Path(model).glob("*.gguf"), None) or packaged_weights()
        self._llama = Llama(
            str(weights),
            n_ctx=2048,
            # Or drafts alone would make all logits be kept.
            logits_all=True,
            verbose=False,
            draft_model=_draft_model(speculation),
        )

    def generate(self, text: str, max_tokens: int, round_name: str) -> dict[str, Any]:
        """Answer a text; return the new tokens, the time, and what was counted meanwhile."""
        del round_name  # the interface has no request options
        message = {"role": "user", "content": text}
        before, started = counted(), time.perf_counter()
        made = self._llama.create_chat_completion([message], max_tokens=max_tokens, temperature=0.0)
        seconds = time.perf_counter() - started
        costs = {name: value - before[name] for name, value in counted().items()}
        content = made["choices"][0]["message"]["content"]
        tokens = self._llama.tokenize(content.encode(), add_bos=False)
        return {"token_ids": tokens, "seconds": seconds, **costs}


def _draft_model(speculation: Mapping[str, Any] | None) -> Any:
    if speculation is None:
        return None
    if "proposer" in speculation:
        from specplug.llamacpp import draft

        arguments = dict(speculation)
        return draft(arguments.pop("proposer"), **arguments)
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(**speculation)
