"""The pluggy hook specifications: everything a plugin can offer or watch.

Hooks run at start-up or once per step, never per token, and only when somebody implements
them. An implementation may leave out arguments it does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from specplug.length import LengthPolicySpec
from specplug.proposer import Acceptance, Batch, Drafts, EngineInfo, ProposerSpec, Request

PROJECT = "specplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def specplug_proposers() -> Iterable[ProposerSpec]:  # type: ignore[empty-body]
    """Return the proposers that this plugin offers."""


@hookspec
def specplug_length_policies() -> Iterable[LengthPolicySpec]:  # type: ignore[empty-body]
    """Return the length policies that this plugin offers."""


@hookspec
def specplug_options(name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return options to use instead of ``options`` for the proposer ``name``, or None.

    Runs once at start-up, before the options are validated. Each plugin gets what the one
    before it returned.
    """


@hookspec
def specplug_started(proposer: str, engine: EngineInfo) -> None:
    """Called when a proposer is ready to serve in this process."""


@hookspec
def specplug_request_begin(proposer: str, request: Request) -> None:
    """Called when a request begins."""


@hookspec
def specplug_request_end(proposer: str, request_id: str) -> None:
    """Called when a request has finished or was aborted."""


@hookspec
def specplug_drafts_proposed(proposer: str, batch: Batch, drafts: Drafts) -> None:
    """Called with the validated drafts of a step, in the order of the batch."""


@hookspec
def specplug_drafts_verified(proposer: str, acceptance: Acceptance) -> None:
    """Called with what verification made of the drafts of the step before."""
