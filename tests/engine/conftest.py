"""A made-up small model and real vLLM engines, in this process, for the tests marked ``engine``."""

import functools
import os
import sys
from pathlib import Path

import pytest
from harness import MAX_MODEL_LEN, Engine

from specplug import running
from specplug.demo.environment import engine_environment

HERE = Path(__file__).parent

# Before vLLM is imported: it reads its environment once.
for _name, _value in {**engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"}.items():
    os.environ.setdefault(_name, _value)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def test_proposers(tmp_path_factory):
    """Install testproposers.py as a distribution, for this process and those it starts."""
    site = tmp_path_factory.mktemp("site")
    info = site / "testproposers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: testproposers\nVersion: 1.0\n")
    entries = ("switch", "raising", "random_tokens")
    lines = [f"{name} = testproposers:{name}" for name in entries]
    (info / "entry_points.txt").write_text("[specplug]\n" + "\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(HERE)]))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from specplug.demo.model import prepare_model

    return prepare_model(lambda _message: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, smollm2) -> Path:
    """A made-up two-layer Llama with SmolLM2's tokenizer.

    It speaks 64 tokens and sometimes ends, and looks mostly at the last token, so that its text
    repeats itself now and then, as real text does.
    """
    import torch
    from testproposers import ALPHABET
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
            bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=False,
            initializer_range=0.3,
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
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def several_engines_in_one_process():
    """vLLM replaces its Triton kernels on each start; on a CPU only the first time goes well.

    And only while numba is not loaded: vLLM looks for a kernel in every object of every module,
    and the library object of llvmlite answers to any name.
    """
    from vllm.platforms import current_platform

    register = getattr(current_platform, "register_triton_kernel_overrides", None)
    if register is not None:

        @functools.cache
        def once():
            with pytest.MonkeyPatch.context() as patch:
                patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
                register()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(current_platform), register.__name__, lambda *_: once())
            yield
    else:
        yield


@pytest.fixture(scope="module")
def start(several_engines_in_one_process):
    """Start engines that live as long as the module's tests."""
    engines = []

    def start_engine(model, proposer=None, k=4, settings=None, **arguments) -> Engine:
        from vllm import LLM

        defaults = {
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "enforce_eager": True,
            "disable_log_stats": False,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 2**27,
        }
        if proposer:
            arguments["speculative_config"] = {
                "model": f"specplug.vllm.{proposer}",
                "num_speculative_tokens": k,
                **arguments.get("speculative_config", {}),
            }
            arguments["additional_config"] = {"specplug": settings or {}}
        before = set(running())
        llm = LLM(str(model), **{**defaults, **arguments})
        new = set(running()) - before
        engine = Engine(llm, new.pop() if new else None)
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()
