"""Makes a proposer ready as an engine would, and measures what it holds for a request."""

from __future__ import annotations

import numpy as np
from rich.filesize import decimal

from specplug.doctor import Check, Status, refused
from specplug.plugins import PluginManager
from specplug.proposer import Batch, DeviceProposer, EngineInfo, Proposer, ProposerSpec, Request

_LONGEST = 1 << 17
"""The longest text that is tried: with more a slow proposer would take too long."""


def measured(
    proposer: Proposer, spec: ProposerSpec, engine: EngineInfo, plugins: PluginManager
) -> Check:
    """Return what the proposer holds for one request of the model's length and for a full batch.

    It is neither told that the request ends nor closed: some save what they saw to a file, and
    this is a made-up text.

    Args:
        proposer: just made.
        spec: its spec.
        engine: the engine it would serve.
        plugins: where proposers that it is made of are looked up.
    """
    if isinstance(proposer, DeviceProposer):
        return Check("memory", Status.OK, "Not measured: it is on the model's device.")
    try:
        proposer.prepare(plugins.with_parts(engine))
    except Exception as error:
        return refused("proposer", error, spec.install_hint)
    try:
        return _described(_bytes_held(proposer, engine), engine)
    except Exception as error:
        return Check(
            "memory", Status.WARNING, f"Could not be measured: {type(error).__name__}: {error}",
            "Serving isolates such faults; specplug drafts nothing for the requests they hit.",
        )  # fmt: skip


def _bytes_held(proposer: Proposer, engine: EngineInfo) -> tuple[int, int] | None:
    """Return the bytes held for all requests together and for one; None if not counted."""
    before = proposer.usage()
    length = min(engine.max_model_len - 1, _LONGEST)
    # Without repetitions an index is at its largest.
    tokens = np.random.default_rng(0).integers(engine.vocab_size, size=(1, length), dtype=np.int32)
    tokens.flags.writeable = False
    k = engine.num_speculative_tokens
    proposer.begin(Request("probe", 0, tokens[0].tolist(), engine.max_model_len, k))
    one, size = np.zeros(1, np.int32), np.full(1, length, np.int32)
    proposer.propose(
        Batch(
            request_ids=["probe"], slots=one, token_ids=tokens, rows=one, num_tokens=size,
            num_new_tokens=size, num_prompt_tokens=size, max_draft_tokens=np.full(1, k, np.int32),
        )
    )  # fmt: skip
    after = proposer.usage()
    if before is None or after is None:
        return None
    of_request = (after.num_bytes - before.num_bytes) * engine.max_model_len / (length + 1)
    return before.num_bytes, round(of_request)


def _described(held: tuple[int, int] | None, engine: EngineInfo) -> Check:
    if held is None:
        return Check("memory", Status.OK, "The proposer does not count its memory.")
    together, of_request = held
    found = (
        f"{decimal(of_request)} for a request of {engine.max_model_len} tokens, "
        f"{decimal(of_request * engine.max_num_seqs)} for {engine.max_num_seqs} of them"
    )
    if together:
        found += f", and {decimal(together)} for all together"
    if engine.world_size > 1:
        found += f"; on each of {engine.world_size} ranks"
    return Check("memory", Status.OK, f"{found}. Caches that fill up later come on top.")
