"""Which vLLM releases are supported, and whether the installed one is as expected.

Everything of vLLM that specplug touches is named here and checked before it is touched.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from specplug.errors import EngineSupportError

OLDEST = (0, 22)
NEWEST = (0, 33)
"""Releases whose source was read; see docs/vllm.md for those that were run."""

_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_EXPECTED = {
    "_update_states": ["self", "scheduler_output"],
    "_sample": ["self", "logits", "spec_decode_metadata"],
}


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse releases outside the supported range.

    Raises:
        EngineSupportError: naming the version found, the range, and what to do.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return
    if allow_untested:
        return
    raise EngineSupportError(
        f"vLLM {version} is installed; this specplug supports {_dotted(OLDEST)} to "
        f"{_dotted(NEWEST)}.",
        hint="Upgrade specplug or install a supported vLLM. To try this one all the same, pass "
        '--additional-config \'{"specplug": {"allow_untested_engine": true}}\': the '
        "signatures are checked, and greedy output should be compared once without specplug.",
    )


def check_runner(runner: type[Any]) -> None:
    """Refuse a model runner whose methods are not the ones that specplug knows.

    Raises:
        EngineSupportError: naming the method, what was expected and what was found.
    """
    for name, expected in _EXPECTED.items():
        method = getattr(runner, name, None)
        if method is None:
            found = "no such method"
        else:
            parameters = list(inspect.signature(method).parameters)
            if parameters[: len(expected)] == expected:
                continue
            found = f"{name}({', '.join(parameters)})"
        raise EngineSupportError(
            f"{_RUNNER}: expected {name}({', '.join(expected)}, …), found {found}.",
            hint="This vLLM is not one that specplug knows: upgrade specplug, or install a vLLM "
            f"from {_dotted(OLDEST)} to {_dotted(NEWEST)} as released.",
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
