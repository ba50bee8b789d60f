"""Speculative-decoding proposers as plugins, for the engine you already run.

Public names live here; every module whose name begins with an underscore is private.
"""

from specplug.errors import SpecplugError
from specplug.hookspecs import hookimpl, hookspec
from specplug.length import (
    LengthPolicy,
    LengthPolicySpec,
    Lengths,
    Load,
    Outcome,
    StepCosts,
)
from specplug.metrics import Counters
from specplug.plugins import PluginManager
from specplug.proposer import (
    Acceptance,
    Batch,
    Capability,
    DeviceBatch,
    DeviceProposer,
    Drafts,
    EngineInfo,
    Options,
    Proposer,
    ProposerSpec,
    Request,
    RequestOptions,
    Usage,
    proposer,
)
from specplug.runtime import Runtime, running

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "Batch",
    "Capability",
    "Counters",
    "DeviceBatch",
    "DeviceProposer",
    "Drafts",
    "EngineInfo",
    "LengthPolicy",
    "LengthPolicySpec",
    "Lengths",
    "Load",
    "Options",
    "Outcome",
    "PluginManager",
    "Proposer",
    "ProposerSpec",
    "Request",
    "RequestOptions",
    "Runtime",
    "SpecplugError",
    "StepCosts",
    "Usage",
    "__version__",
    "hookimpl",
    "hookspec",
    "proposer",
    "running",
]
