"""``python -m specplug.demo.convert WEIGHTS.gguf FOLDER``: quantised weights to a float32 model.

In a process of its own: it takes more than a gigabyte of memory, which then is free again.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(weights: Path, target: Path) -> None:
    """Write a Llama model and its tokenizer in Hugging Face layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
