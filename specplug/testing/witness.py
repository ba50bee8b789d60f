"""A plugin that notes, by specplug's own hooks, what a backend tells about its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from specplug.hookspecs import hookimpl
from specplug.proposer import Acceptance, Batch, Drafts, EngineInfo, Request


@dataclass
class Seen:
    """One request, from its begin to its end.

    Attributes:
        prompt: its tokens.
        output: the tokens that it was said to have got.
        draft: what was drafted last.
        shown: whether the proposer has been shown it.
    """

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    shown: bool = False


@dataclass
class Account:
    """What a backend told.

    Attributes:
        engines: of the proposers that began to serve in this process.
        alive: the requests that have begun and not ended, by id.
        ended: those that have ended.
        problems: what contradicts what was told before.
        num_drafted: the tokens that were drafted.
    """

    engines: list[EngineInfo] = field(default_factory=list)
    alive: dict[str, Seen] = field(default_factory=dict)
    ended: list[Seen] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_drafted: int = 0


class Witness:
    """Hears what proposers are told.

    Attributes:
        account: what was heard; a new one may take its place at any time.
    """

    def __init__(self) -> None:
        self.account = Account()

    @hookimpl
    def specplug_started(self, engine: EngineInfo) -> None:
        """Note that a proposer serves."""
        self.account.engines.append(engine)

    @hookimpl
    def specplug_request_begin(self, request: Request) -> None:
        """Note that a request has begun."""
        self.account.alive[request.id] = Seen(list(request.prompt_token_ids))

    @hookimpl
    def specplug_request_end(self, request_id: str) -> None:
        """Note that a request has ended."""
        self.account.ended.append(self.account.alive.pop(request_id))

    @hookimpl
    def specplug_drafts_verified(self, acceptance: Acceptance) -> None:
        """Compare what was verified with what was drafted."""
        columns = acceptance.draft_token_ids, acceptance.new_token_ids
        for name, verified, new in zip(acceptance.request_ids, *columns, strict=True):
            seen = self.account.alive[name]
            if list(verified) != seen.draft[: len(verified)]:
                self._problem(f"verified {list(verified)} for {name!r}, drafted {seen.draft}")
            seen.output += new
            seen.draft = []

    @hookimpl
    def specplug_drafts_proposed(self, batch: Batch, drafts: Drafts) -> None:
        """Compare the text of each request with the tokens that it was said to have got."""
        for i, draft in enumerate(drafts.to_lists()):
            name = batch.request_ids[i]
            seen, text = self.account.alive[name], batch.tokens(i).tolist()
            if not seen.shown:  # an engine that took tokens back begins it again behind some
                seen.output = text[len(seen.prompt) :]
                seen.shown = True
            if text != seen.prompt + seen.output:
                self._problem(f"the text of {name!r} is not its prompt and what it got since")
            seen.draft = draft
            self.account.num_drafted += len(draft)

    def _problem(self, what: str) -> None:
        self.account.problems.append(what)


witness = Witness()
