"""transformers' side of ``specplug bench``: what is compared, and one model in its own process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specplug.bench.answering import Arrivals, Setup, answer, counted, options_apart, tokenised

LARGEST_BATCH = 1
_MATCHES = {"max_matching_ngram_size": 3}


def own_methods(k: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of transformers' own prompt lookup."""
    return {"transformers prompt lookup": {"prompt_lookup_num_tokens": k, **_MATCHES}}


def own(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate``; an ``assistant_model`` is a folder or a name."""
    return arguments


def ours(proposer: str, k: int, section: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate`` for a proposer, without the function itself."""
    settings = dict(section)
    options = settings.pop("options", None)
    return {
        "proposer": proposer,
        "num_speculative_tokens": k,
        **({"options": options} if options else {}),
        **({"settings": settings} if settings else {}),
    }


def flags(speculation: dict[str, Any]) -> str:
    """Return the arguments as they stand in a call of ``model.generate``."""
    found = [f"{name}={value!r}" for name, value in speculation.items()]
    if "proposer" in speculation:
        found.insert(0, "custom_generate=specplug.transformers.generate")
    return ", ".join(found)


def serve() -> None:
    """Load one model and answer the batches on standard input."""
    answer(Engine)


class Engine:
    """A model and its tokenizer, and how it is to generate: one request at a time."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        encoder = AutoTokenizer.from_pretrained(setup.tokenizer or setup.model)
        self._prompts = [tokenised(encoder, content) for content in setup.contents]
        self._max_tokens = setup.max_tokens
        on_cuda = torch.cuda.is_available() and "device_map" not in setup.engine_arguments

        def load(name: str) -> Any:
            loaded = AutoModelForCausalLM.from_pretrained(name, **setup.engine_arguments).eval()
            return loaded.to("cuda") if on_cuda else loaded

        self._model = load(setup.model)
        self._arguments = dict(setup.speculation or {})
        if "assistant_model" in self._arguments:
            self._arguments["assistant_model"] = load(self._arguments["assistant_model"])
        if "proposer" in self._arguments:
            from specplug.transformers import generate

            self._arguments["custom_generate"] = generate

    def generate(self, batch: Sequence[int], namespaces: Sequence[str]) -> list[Arrivals]:
        """Answer the prompts one after the other."""
        import torch

        outputs = []
        for prompt, namespace in zip(batch, namespaces, strict=True):
            arguments = dict(self._arguments)
            if "proposer" in arguments:
                arguments["request_options"] = options_apart(namespace)
            ids = torch.tensor([self._prompts[prompt]], device=self._model.device)
            with _Steps(self._model) as streamer:
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self._max_tokens[prompt],
                    do_sample=False,
                    streamer=streamer,
                    **arguments,
                )
            outputs.append(streamer.arrivals())
        return outputs

    def counts(self) -> dict[str, float]:
        """Return what specplug counted; of its own methods transformers tells nothing."""
        return counted()


class _Steps:
    """A streamer that puts together what came between two forward passes of the model."""

    def __init__(self, model: Any) -> None:
        self._started = time.perf_counter()
        self._steps: list[tuple[float, list[int]]] = []
        self._prompt_is_next = True
        self._hook = model.register_forward_hook(self._forward)

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _forward(self, *_: object) -> None:
        self._steps.append((0.0, []))

    def put(self, value: Any) -> None:
        """Take in the prompt, then each step's tokens, all at once or one by one."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        _, tokens = self._steps[-1]
        self._steps[-1] = time.perf_counter() - self._started, tokens + value.flatten().tolist()

    def end(self) -> None:
        """Called at the end of the text."""

    def arrivals(self) -> Arrivals:
        """Return what came and when."""
        found = Arrivals()
        for seconds, tokens in self._steps:
            found.add(seconds, tokens)
        return found
