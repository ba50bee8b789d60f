"""The settings that only vLLM has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specplug.config import Settings


class VllmSettings(Settings):
    """The ``specplug`` section of vLLM's ``--additional-config``."""

    runner: Literal["auto", "v1", "v2"] = Field(
        "auto", description="vLLM's model runner: V2 where vLLM supports it, or one by force."
    )
    check_rank_agreement: bool = Field(
        False,
        description="Debugging: compare the drafts of all tensor-parallel ranks at every step.",
    )
