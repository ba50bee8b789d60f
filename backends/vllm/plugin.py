"""The function behind ``vllm.general_plugins``."""

from __future__ import annotations

import logging
from importlib import metadata

logger = logging.getLogger("vllm.specplug")


def register() -> None:
    """Say in each vLLM process that specplug is there; change nothing.

    vLLM calls this in its front end, engine core and workers, whether specplug was selected or
    not, and does not guard the call: it must never raise. So it imports no plugin and no engine.
    """
    try:
        entries = metadata.entry_points(group="specplug")
        logger.debug(
            "specplug can be selected with --speculative-config "
            '\'{"model": "specplug.vllm.<proposer>", "num_speculative_tokens": K}\'; installed: %s',
            ", ".join(sorted(entry.name for entry in entries)),
        )
    except Exception:
        logger.warning("specplug could not look for its plugins", exc_info=True)
