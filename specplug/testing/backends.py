"""The conformance suite of backends, for people who add an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specplug.metrics import Counters
from specplug.runtime import running
from specplug.testing.misbehaving import ENTRIES
from specplug.testing.witness import Account, witness

_FAILING = ("kit_invalid", "kit_raising")
PROPOSERS = ("ngram", "suffix", "cascade", "kit_nonsense", *_FAILING)
_SETTINGS = {"length_policy": "fixed"}
"""Else it would be measured whether drafts pay, and there might be none."""

every_proposer = pytest.mark.parametrize("proposer", PROPOSERS)


@dataclass
class _Served:
    own: list[list[int]]
    answers: list[list[int]]
    account: Account
    counters: list[Counters]


class BackendConformance:
    """What every backend has to keep; subclass it, name it ``Test...``, and write two methods.

    The engine must run in this process, and decode greedily. Each proposer serves once, all
    prompts twice, and all rules look at that: make heavy things in fixtures.

    Attributes:
        prompts: what is generated from, in whatever form the two methods take it.
        max_tokens: the most tokens of each answer.
        num_speculative_tokens: K.
    """

    prompts: ClassVar[Sequence[Any]] = ()
    max_tokens: ClassVar[int] = 24
    num_speculative_tokens: ClassVar[int] = 4

    def plain(self, prompts: Sequence[Any], max_tokens: int) -> list[list[int]]:
        """Return the engine's own answers, without specplug: the new tokens of each prompt."""
        raise NotImplementedError

    def with_proposer(
        self,
        name: str,
        settings: Mapping[str, Any],
        num_speculative_tokens: int,
        prompts: Sequence[Any],
        max_tokens: int,
    ) -> list[list[int]]:
        """Return the answers with a proposer.

        Args:
            name: its registered name.
            settings: the settings of specplug, see :class:`specplug.config.Settings`.
            num_speculative_tokens: K.
            prompts: what is generated from.
            max_tokens: the most tokens of each answer.
        """
        raise NotImplementedError

    def check_same(self, prompt: Any, own: list[int], answer: list[int]) -> None:
        """Fail unless an answer is the engine's own.

        Override it for an engine whose rounding depends on how many tokens it verifies, and
        allow another text only where the engine itself is undecided.
        """
        assert answer == own

    # -- the rules --------------------------------------------------------------------------

    @every_proposer
    def test_text(self, proposer: str) -> None:
        """The answers are the engine's own, token for token, whatever is drafted."""
        self._check_text(self._served(proposer))

    @every_proposer
    def test_requests(self, proposer: str) -> None:
        """Every request begins once and ends once."""
        account = self._served(proposer).account
        assert list(account.alive) == []
        assert len(account.ended) == 2 * len(self.prompts)

    @every_proposer
    def test_tokens(self, proposer: str) -> None:
        """All tokens are reported, in order; only of the last step they may be missing."""
        served = self._served(proposer)
        self._check_text(served)
        assert served.account.problems == []
        for seen in served.account.ended:
            assert any(self._ends(seen.output, answer) for answer in served.answers), seen

    @every_proposer
    def test_drafts(self, proposer: str) -> None:
        """Something is drafted, unless all that the proposer does is wrong."""
        assert (self._served(proposer).account.num_drafted > 0) == (proposer not in _FAILING)

    @every_proposer
    def test_counters(self, proposer: str) -> None:
        """What is counted adds up, and faults are counted."""
        for counters in self._served(proposer).counters:
            assert counters.num_requests == 2 * len(self.prompts)
            assert counters.num_accepted_tokens <= counters.num_draft_tokens
            assert sum(counters.num_accepted_tokens_per_pos) == counters.num_accepted_tokens
            assert (counters.num_faults > 0) == (proposer in _FAILING)

    # -- helpers ----------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _plugins_of_the_kit(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Install the kit's own plugins, for this process and those that it starts."""
        install(tmp_path_factory.mktemp("site"), monkeypatch)

    def _served(self, proposer: str) -> _Served:
        """Let a proposer serve, the first time that a rule asks for it."""
        kept: dict[str, Any] = vars(type(self)).get("_kept", {})
        type(self)._kept = kept  # type: ignore[attr-defined]  # of this class, not of its base
        if "own" not in kept:
            kept["own"] = self.plain(self.prompts, self.max_tokens)
        if proposer not in kept:
            kept[proposer] = self._serve(proposer, kept["own"])
        served: _Served = kept[proposer]
        return served

    def _serve(self, proposer: str, own: list[list[int]]) -> _Served:
        assert self.prompts, f"{type(self).__name__} has no prompts"
        witness.account = account = Account()
        before = set(running())
        answers = self.with_proposer(
            proposer,
            _SETTINGS,
            self.num_speculative_tokens,
            [*self.prompts, *self.prompts],
            self.max_tokens,
        )
        assert account.engines, (
            f"No proposer has begun to serve in this process: does the engine run in it, and does "
            f"it take '{proposer}'?"
        )
        counters = [deepcopy(runtime.counters) for runtime in set(running()) - before]
        return _Served(own, answers, account, counters)

    def _check_text(self, served: _Served) -> None:
        asked = [*self.prompts, *self.prompts]
        for prompt, own, answer in zip(asked, served.own * 2, served.answers, strict=True):
            self.check_same(prompt, own, answer)

    def _ends(self, reported: list[int], answer: list[int]) -> bool:
        """Return whether tokens are an answer, but perhaps for what its last step brought."""
        missing = len(answer) - len(reported)
        return answer[: len(reported)] == reported and missing <= self.num_speculative_tokens + 1


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty folder a place where a distribution of the kit's own plugins is installed."""
    info = site / "specplug_conformance_kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: specplug-conformance-kit\nVersion: 1.0\n"
    )
    lines = ["[specplug]", "kit_witness = specplug.testing.witness:witness"]
    lines += [f"{name} = {target}" for name, target in ENTRIES.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
