"""``draft_model``: a small language model, in the engine's worker, says what comes next.

Greedy drafting with a KV cache of its own (Leviathan et al., arXiv 2211.17192), for any backend.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pydantic import Field

from specplug.errors import OptionError
from specplug.proposer import Batch, Drafts, EngineInfo, ProposerSpec, Request
from specplug.proposers._draft_options import INSTALL_HINT, DrafterOptions
from specplug.proposers._model_proposer import ModelProposer
from specplug.proposers._vocabulary import compare

if TYPE_CHECKING:
    from specplug.proposers._draft_loader import Checkpoint
    from specplug.proposers._drafter import Drafter
    from specplug.proposers._translation import Translator

logger = logging.getLogger(__name__)


class DraftModelOptions(DrafterOptions):
    """Which model drafts, and what if it has another tokenizer."""

    model: str = Field(
        description="The draft model: a folder with a checkpoint of transformers, or a name."
    )
    strict_vocabulary: bool = Field(
        False,
        description="Whether a draft model with another tokenizer is refused; else its drafts are "
        "translated through text.",
    )


class DraftModelProposer(ModelProposer):
    """Drafts with a model of its own, in its own tokens where the target has others."""

    def __init__(self, options: DraftModelOptions) -> None:
        super().__init__()
        self._options = options
        self._translator: Translator | None = None

    def load(self, engine: EngineInfo) -> Drafter:
        """Compare the vocabularies, plan the memory, and load the model.

        Raises:
            OptionError: the model cannot be loaded, does not fit, or has another vocabulary and
                must not.
        """
        from specplug.proposers._draft_loader import Checkpoint, make_drafter, planned

        checkpoint = Checkpoint.find(self._options.model, self._options, engine)
        plan = planned(checkpoint, engine)
        vocab_size = self._vocabulary(checkpoint, engine, plan.max_tokens)
        return make_drafter(checkpoint.load(), plan, checkpoint, engine, vocab_size)

    def _vocabulary(self, checkpoint: Checkpoint, engine: EngineInfo, max_tokens: int) -> int:
        """Return where the ids end that may be drafted; set up a translator if one is needed."""
        rows = int(checkpoint.config.get_text_config().vocab_size)
        if engine.load_tokenizer is None:
            return _of_equal_size(checkpoint.name, rows, engine)
        target, draft = engine.load_tokenizer(), checkpoint.load_tokenizer()
        comparison = compare(target.get_vocab(), draft.get_vocab())
        if comparison.same:
            if comparison.difference:
                logger.info("specplug draft_model: %s; that does no harm.", comparison.difference)
            return min(comparison.num_common, rows, engine.vocab_size)
        if self._options.strict_vocabulary:
            raise OptionError(
                f"The draft model '{checkpoint.name}' has another vocabulary than the target: "
                f"{comparison.difference}.",
                hint="Take a model of the target's family, or set strict_vocabulary to false: its "
                "drafts are translated through text then.",
            )
        if self._options.temperature:
            raise OptionError(
                f"The option 'temperature' is {self._options.temperature}, and the draft model "
                f"'{checkpoint.name}' has another vocabulary than the target: "
                f"{comparison.difference}. Drafts that are translated through text have no "
                "probabilities in the target's tokens.",
                hint="Leave 'temperature' at 0, or take a model of the target's family.",
            )
        from specplug.proposers._translation import Translator

        logger.warning(
            "specplug draft_model translates drafts through text, which costs time and acceptance: "
            "%s.", comparison.difference,
        )  # fmt: skip
        self._translator = Translator(target, draft, max_tokens)
        return min(len(draft), rows)

    def begin(self, request: Request) -> None:
        """Note the request; its tokens are read with its first draft."""
        super().begin(request)
        if self._translator:
            self._translator.begin(request)

    def propose(self, batch: Batch) -> Drafts:
        """Draft what the model finds most likely."""
        if self._translator is None:
            return super().propose(batch)
        read, rows, same = self._translator.to_draft(batch)
        self.drafter.rewind(batch.slots, same)
        drafts = self.drafter.draft(read) if len(read) else Drafts.empty(0)
        return self._translator.to_target(batch, rows, drafts)

    def end(self, request_id: str) -> None:
        """Free the request's part of the cache."""
        if self._translator:
            self._translator.end(self.slots[request_id])
        super().end(request_id)


def _of_equal_size(name: str, rows: int, engine: EngineInfo) -> int:
    if rows != engine.vocab_size:
        raise OptionError(
            f"The draft model '{name}' has a vocabulary of {rows} and the target one of "
            f"{engine.vocab_size}, and the backend '{engine.backend}' gives no tokenizer to "
            "compare them by.",
            hint="Take a draft model with a vocabulary of the same size.",
        )
    return rows


SPEC = ProposerSpec(
    name="draft_model",
    factory="specplug.proposers.draft_model:DraftModelProposer",
    options=DraftModelOptions,
    summary="A small language model drafts, with a KV cache of its own.",
    install_hint=INSTALL_HINT,
)
