"""The function behind ``vllm.general_plugins``."""

from __future__ import annotations

import logging
import sys
from importlib import metadata

logger = logging.getLogger("vllm.specplug")


def register() -> None:
    """Watch for an engine that selects specplug; for others nothing changes.

    vLLM calls this in its front end, engine core and workers, whether specplug was selected or
    not, and does not guard the call: it must never raise. It imports no plugin and no engine.
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
    if sys.modules.get("vllm.config") is None:
        return
    try:
        from specplug.backends.vllm.selection import watch

        watch()
    except Exception:
        logger.warning(
            "specplug does not know how this vLLM is configured: it runs on the V1 model runner "
            "only. Upgrade specplug.",
            exc_info=True,
        )
