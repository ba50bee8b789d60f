"""A made-up small model and real vLLM engines, in this process, for the tests marked ``engine``."""

import functools
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from harness import MAX_MODEL_LEN, RUNNER, Engine
from tinymodel import make_tiny_model

from specplug import running
from specplug.demo.environment import engine_environment

HERE = Path(__file__).parent
V2_VARIABLES = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    # The interpreter uses one core only; threads that wait for it would take another.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# Before vLLM is imported: it reads its environment once.
_variables = {**engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"}
if RUNNER != "v1":
    _variables.update(V2_VARIABLES)
for _name, _value in _variables.items():
    os.environ.setdefault(_name, _value)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def test_proposers(tmp_path_factory):
    """Install testproposers.py as a distribution, for this process and those it starts.

    And with it, where the V2 runner is tested, a backend for Triton's interpreter: without a
    GPU vLLM does not see Triton otherwise.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "testproposers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: testproposers\nVersion: 1.0\n")
    entries = ("switch", "raising", "random_tokens", "device_lookup")
    lines = ["[specplug]", *(f"{name} = testproposers:{name}" for name in entries)]
    if RUNNER != "v1":
        lines += ["[triton.backends]", "cpu = triton_interpreter"]
        release = version("vllm-cpu")
        if tuple(map(int, release.split(".")[:2])) < (0, 32):
            # These look for that backend only if a distribution of this name is a CPU build.
            named = site / f"vllm-{release}.dist-info"
            named.mkdir()
            (named / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n"
            )
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(HERE)]))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from specplug.demo.model import prepare_model

    return prepare_model(lambda _message: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


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


@pytest.fixture(scope="session")
def interpreter():
    """Let Triton's interpreter take masks of any integers, as a GPU does."""
    if RUNNER == "v1":
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    def as_bool(method, position):
        def wrapper(self, *arguments):
            mask = arguments[position]
            mask.data = mask.data.astype(np.bool_)
            return method(self, *arguments)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
            method = getattr(InterpreterBuilder, name)
            patch.setattr(InterpreterBuilder, name, as_bool(method, position))
        yield


@pytest.fixture(scope="session")
def async_scheduling():
    """Let a CPU schedule ahead, where that is tested: vLLM switches it off as of no use there."""
    if RUNNER != "v2-async":
        yield
        return
    from vllm.platforms import current_platform

    check = type(current_platform).check_and_update_config.__func__

    def checked(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "check_and_update_config", classmethod(checked))
        yield


@pytest.fixture(scope="module")
def start(several_engines_in_one_process, interpreter, async_scheduling):
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
            "async_scheduling": None if RUNNER == "v2-async" else False,
        }
        if proposer:
            arguments["speculative_config"] = {
                "model": f"specplug.vllm.{proposer}",
                "num_speculative_tokens": k,
                **arguments.get("speculative_config", {}),
            }
            # Proposers are tested with whole drafts; test_vllm_length.py has what cuts them.
            settings = {"length_policy": "fixed", **(settings or {})}
            arguments["additional_config"] = {"specplug": settings}
        before = set(running())
        llm = LLM(str(model), **{**defaults, **arguments})
        new = set(running()) - before
        engine = Engine(llm, new.pop() if new else None)
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()
