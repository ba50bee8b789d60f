"""A made-up two-layer Llama with a made-up tokenizer, small in everything.

It speaks 64 tokens and sometimes ends, and looks mostly at the last token, so that its text repeats
itself now and then, as real text does. The vocabulary is small because Triton's interpreter, with
which the V2 runner is tested, takes a second for a step over a usual one.
"""

import json
from pathlib import Path

from testproposers import ALPHABET

VOCAB_SIZE = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
WORDS = """the parser reads a file and the writer writes the file that the parser reads once upon
a time def add(a, b): return a + b and then but now The end. x 1 2 3 4 5 you are a helpful assistant
{"name": "age": 12} user system hello there what is this"""


def make_tiny_model(path: Path, hidden_size: int = 64, heads: int = 2, kv_heads: int = 1) -> Path:
    """Write the model and its tokenizer to the folder ``path`` and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv_heads,
            max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=2,
            tie_word_embeddings=False, initializer_range=0.3,
        )
    )  # fmt: skip
    head = model.lm_head.weight.data
    spoken = [2, *ALPHABET]
    loud = head[spoken].clone()
    head *= 0.05
    head[spoken] = loud
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.5
    model.save_pretrained(path)
    _make_tokenizer().save_pretrained(path)
    return path


def make_adapter(path: Path, model: Path) -> Path:
    """Make a LoRA adapter of rank 8, which changes the model's text, in the folder ``path``."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {}
    for layer in range(2):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, 64)
            weights[f"{key}.lora_B.weight"] = torch.randn(width, 8) * 0.2
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(model),
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT,
    )
