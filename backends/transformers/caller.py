"""Finds what ``generate`` was given and does not hand to a callable ``custom_generate``.

transformers (up to 5.19 at least) overwrites what it has collected of ``streamer``, ``synced_gpus``
and ``tokenizer`` as soon as ``custom_generate`` is a callable. A stream that stays silent would be
worse than a look at the caller's variables.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any


def argument_of_generate(name: str) -> Any:
    """Return an argument of the ``GenerationMixin.generate`` that called our caller; else None."""
    from transformers import GenerationMixin

    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame.f_locals.get(name) if frame and frame.f_code is generate else None
