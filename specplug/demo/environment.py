"""The environment variables that an engine of the demo or of the tests runs with.

``python -m specplug.demo.environment COMMAND...`` runs a command with them.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

_ALWAYS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine in the caller's own process, so that specplug's counters can be read.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def engine_environment() -> dict[str, str]:
    """Return the variables to set before an engine's process starts.

    With vLLM's CPU build that includes Intel's OpenMP, where the current environment has it,
    and the size of the KV cache in GiB.
    """
    if not _is_cpu_build():
        return dict(_ALWAYS)
    variables = {**_ALWAYS, "VLLM_CPU_KVCACHE_SPACE": "1"}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        others = os.environ.get("LD_PRELOAD", "").split(":")
        preload = [str(openmp), *(other for other in others if other not in ("", str(openmp)))]
        variables["LD_PRELOAD"] = ":".join(preload)
    return variables


def _is_cpu_build() -> bool:
    for name, marker in (("vllm-cpu", ""), ("vllm", "cpu")):
        try:
            return marker in metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return False


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **engine_environment()})
