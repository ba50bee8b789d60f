"""Conformance suites for people who write proposers, length policies or backends.

Needs the extra ``test`` (pytest and hypothesis).
"""

from specplug.testing.backends import BackendConformance
from specplug.testing.calls import BrokenRuleError
from specplug.testing.policies import LengthPolicyConformance
from specplug.testing.proposers import ENGINE, ProposerConformance, draft

__all__ = [
    "ENGINE",
    "BackendConformance",
    "BrokenRuleError",
    "LengthPolicyConformance",
    "ProposerConformance",
    "draft",
]
