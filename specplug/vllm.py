"""What vLLM's flag names: ``{"model": "specplug.vllm.<proposer>", "num_speculative_tokens": K}``.

Every attribute of this module is the drafter class of the proposer of that name, whoever
registered it.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> type[Any]:
    # Python and pytest probe modules for names of their own. Any other miss must not be an
    # AttributeError: vLLM swallows it, and the user would not see which names there are.
    if name.startswith(("_", "pytest_")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specplug.backends.vllm.v1 import drafter_class

    return drafter_class(name)
