"""Installed but not selected: vLLM's objects are its own, in processes of their own.

One method has to be watched, or nothing could be known before vLLM has chosen its model runner:
``VllmConfig.__post_init__``, which passes on what does not name specplug. Nothing else differs.
"""

import json
import os
import subprocess
import sys

CENSUS = """
import importlib, sys, types

for name in ("vllm.engine.arg_utils", "vllm.v1.worker.gpu_model_runner", "vllm.v1.engine.core",
             "vllm.v1.sample.rejection_sampler", "vllm.v1.core.sched.async_scheduler",
             "vllm.v1.spec_decode.custom_class_proposer", "vllm.v1.worker.gpu.spec_decode",
             "vllm.v1.worker.gpu.model_runner"):
    importlib.import_module(name)

def census():
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or not isinstance(module, types.ModuleType):
            continue
        for key, value in vars(module).items():
            if not key.startswith("__") and callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("vllm"):
                found.update(((value.__qualname__, part), of) for part, of in vars(value).items()
                             if callable(of) or isinstance(of, (property, classmethod)))
    return found

before = census()
from vllm.plugins import load_general_plugins
load_general_plugins()
after = census()
assert "specplug.backends.vllm.plugin" in sys.modules, "the plugin was not loaded"
changed = {key for key in before if after.get(key) is not before[key]}
"""


def run(code: str, **variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=400,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


def test_one_method_is_watched_and_nothing_else_differs():
    code = CENSUS + "print(len(before) > 1000, sorted(changed))"
    assert run(code) == "True [('VllmConfig', '__post_init__')]"


def test_configs_of_other_engines_stay_what_they_are():
    code = CENSUS + (
        "from vllm.config import VllmConfig\n"
        "config = VllmConfig()\n"
        "now = census()\n"
        "print(type(config) is VllmConfig, all(now[key] is after[key] for key in after),"
        " [name for name in sys.modules if name.startswith('specplug.backends.vllm.v')])"
    )
    assert run(code) == "True True []"


def test_start_up_and_output_are_the_same_with_and_without_the_plugin(tiny_model):
    code = f"""
from vllm import LLM, SamplingParams
llm = LLM({str(tiny_model)!r}, dtype="float32", max_model_len=128, enforce_eager=True,
          kv_cache_memory_bytes=2**26)
outputs = llm.generate(["Once upon a time", "x"], SamplingParams(temperature=0, max_tokens=20))
config = llm.llm_engine.vllm_config
import json, sys
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], config.compute_hash(),
                  "specplug" in sys.modules]))
"""
    installed = json.loads(run(code))
    kept_out = json.loads(run(code, VLLM_PLUGINS="none"))
    assert installed[:2] == kept_out[:2]
    assert (installed[2], kept_out[2]) == (True, False)
