"""llama.cpp's side of ``specplug bench``: what is compared, and one model in its own process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specplug.bench.answering import Arrivals, Setup, answer, counted
from specplug.demo.model import packaged_weights
from specplug.errors import OptionError

LARGEST_BATCH = 1


def own_methods(k: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of llama-cpp-python's own prompt lookup."""
    return {"llama.cpp prompt lookup": {"num_pred_tokens": k}}


def own(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LlamaPromptLookupDecoding``."""
    return arguments


def ours(proposer: str, k: int, section: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``specplug.llamacpp.draft``."""
    settings = dict(section)
    options = settings.pop("options", {})
    found = {"proposer": proposer, "num_speculative_tokens": k, **options}
    return {**found, "settings": settings} if settings else found


def flags(speculation: dict[str, Any]) -> str:
    """Return the argument as it stands in a call of ``Llama``."""
    arguments = dict(speculation)
    proposer = arguments.pop("proposer", None)
    shown = [f"{name}={value!r}" for name, value in arguments.items()]
    if proposer is None:
        return f"draft_model=LlamaPromptLookupDecoding({', '.join(shown)})"
    return f"draft_model=specplug.llamacpp.draft({', '.join([repr(proposer), *shown])})"


def serve() -> None:
    """Load one model and answer the batches on standard input."""
    answer(Engine)


class Engine:
    """A GGUF file: one in the model's folder, or the one that the demo's model is made from.

    It has its own tokenizer, and serves one request at a time.
    """

    def __init__(self, setup: Setup) -> None:
        from llama_cpp import Llama

        arguments = {
            "n_ctx": 2048,
            # Or drafts alone would make all logits be kept.
            "logits_all": True,
            "verbose": False,
            **setup.engine_arguments,
        }
        self._speculation = setup.speculation
        self._drafters = {"": _draft_model(setup.speculation)}
        weights = str(_weights(Path(setup.model)))
        self._llama = Llama(weights, draft_model=self._drafters[""], **arguments)
        self._plain_eval, self._num_evals = self._llama.eval, 0
        self._llama.eval = self._eval
        self._messages = [_messages(content) for content in setup.contents]
        self._max_tokens = setup.max_tokens

    def generate(self, batch: Sequence[int], namespaces: Sequence[str]) -> list[Arrivals]:
        """Answer the prompts one after the other.

        The interface has no request options: each namespace has a drafter of its own. All are
        kept, so that what they counted is.
        """
        outputs = []
        for prompt, namespace in zip(batch, namespaces, strict=True):
            if namespace not in self._drafters:
                self._drafters[namespace] = _draft_model(self._speculation)
            self._llama.draft_model = self._drafters[namespace]
            outputs.append(self._answered(prompt))
        return outputs

    def _answered(self, prompt: int) -> Arrivals:
        found, text, num_evals, started = Arrivals(), "", -1, time.perf_counter()
        for chunk in self._llama.create_chat_completion(
            self._messages[prompt],
            max_tokens=self._max_tokens[prompt],
            temperature=0.0,
            stream=True,
        ):
            content = chunk["choices"][0]["delta"].get("content")
            if not content:
                continue
            text += content
            if num_evals != self._num_evals:  # else it came with the tokens before it
                num_evals = self._num_evals
                found.arrivals.append((time.perf_counter() - started, 0))
            seconds, count = found.arrivals[-1]
            found.arrivals[-1] = seconds, count + 1
        found.token_ids = self._llama.tokenize(text.encode(), add_bos=False)
        return found

    def _eval(self, tokens: Sequence[int]) -> None:
        self._num_evals += 1
        self._plain_eval(tokens)

    def counts(self) -> dict[str, float]:
        """Return what specplug counted; of its own prompt lookup llama.cpp tells nothing."""
        return counted()


def _weights(model: Path) -> Path:
    if model.is_file():
        return model
    return next(model.glob("*.gguf"), None) or packaged_weights()


def _messages(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if content and isinstance(content[0], int):
        raise OptionError(
            "llama.cpp is asked in text here, not in token ids.",
            hint="Give --data with 'prompt' or 'messages'.",
        )
    return list(content)


def _draft_model(speculation: Mapping[str, Any] | None) -> Any:
    if speculation is None:
        return None
    if "proposer" in speculation:
        from specplug.llamacpp import draft

        arguments = dict(speculation)
        return draft(arguments.pop("proposer"), **arguments)
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    return LlamaPromptLookupDecoding(**speculation)
