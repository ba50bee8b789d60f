"""What holds in every engine: the kit's suite over the backends that CI can run.

llama.cpp, which is built from source, runs it in ``test_llamacpp.py``; TensorRT-LLM, which needs a
GPU, has its own suite on a double.
"""

from __future__ import annotations

import pytest
from harness import ALL_PROMPTS, sampling

from specplug.testing import BackendConformance


class TestVllm(BackendConformance):
    prompts = ALL_PROMPTS

    @pytest.fixture(autouse=True)
    def engines(self, start, tiny_model):
        self._start = lambda *arguments: start(tiny_model, *arguments)

    def plain(self, prompts, max_tokens):
        return self._answers(self._start(), prompts, max_tokens)

    def with_proposer(self, name, settings, num_speculative_tokens, prompts, max_tokens):
        engine = self._start(name, num_speculative_tokens, settings)
        return self._answers(engine, prompts, max_tokens)

    def _answers(self, engine, prompts, max_tokens):
        outputs = engine.generate(prompts, sampling({"max_tokens": max_tokens}))
        return [output.tokens for output in outputs]


class TestTransformers(BackendConformance):
    prompts = ALL_PROMPTS

    @pytest.fixture(autouse=True)
    def model(self, tiny_model):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(tiny_model)
        self._tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def plain(self, prompts, max_tokens):
        return [self._answer(prompt, max_tokens) for prompt in prompts]

    def with_proposer(self, name, settings, num_speculative_tokens, prompts, max_tokens):
        import specplug.transformers

        arguments = {
            "custom_generate": specplug.transformers.generate,
            "proposer": name,
            "num_speculative_tokens": num_speculative_tokens,
            "settings": settings,
        }
        return [self._answer(prompt, max_tokens, **arguments) for prompt in prompts]

    def _answer(self, prompt, max_tokens, **arguments):
        inputs = self._tokenizer(prompt, return_tensors="pt")
        arguments |= {"do_sample": False, "max_new_tokens": max_tokens}
        found = self._model.generate(**inputs, **arguments)[0].tolist()
        return found[inputs["input_ids"].shape[1] :]
