"""``layer_skip``: the target's own first layers draft, with its final norm and head.

Self-speculation in the manner of Draft & Verify (Zhang et al., arXiv 2309.08168) and LayerSkip
(Elhoushi et al., arXiv 2404.16710), without training: there is no second checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from specplug.proposer import EngineInfo, ProposerSpec
from specplug.proposers._draft_options import INSTALL_HINT, DrafterOptions
from specplug.proposers._model_proposer import ModelProposer

if TYPE_CHECKING:
    from specplug.proposers._drafter import Drafter


class LayerSkipOptions(DrafterOptions):
    """Which checkpoint, and how much of it drafts."""

    model: str = Field(
        "", description="The target's checkpoint: a folder or a name; by default its served name."
    )
    num_layers: PositiveInt | None = Field(
        None,
        description="How many of the target's layers draft; None chooses at start-up, from how "
        "often the first layers agree with all of them on a short text.",
    )


class LayerSkipProposer(ModelProposer):
    """Drafts with the first layers of the target."""

    def __init__(self, options: LayerSkipOptions) -> None:
        super().__init__()
        self._options = options

    def load(self, engine: EngineInfo) -> Drafter:
        """Choose the number of layers if it is not given, and load them.

        Raises:
            OptionError: the checkpoint cannot be loaded, does not fit, or has fewer layers.
        """
        from specplug.proposers._draft_loader import Checkpoint, make_drafter, planned
        from specplug.proposers._layers import chosen, cut, with_layers

        checkpoint = Checkpoint.find(
            self._options.model or engine.model_name, self._options, engine
        )
        num_layers, model = self._options.num_layers, None
        if num_layers is None:
            model, num_layers = chosen(checkpoint, engine)
        shallow = with_layers(checkpoint, num_layers)
        plan = planned(shallow, engine)
        model = shallow.load() if model is None else cut(model, num_layers)
        vocab_size = min(int(shallow.config.get_text_config().vocab_size), engine.vocab_size)
        return make_drafter(model, plan, shallow, engine, vocab_size)


SPEC = ProposerSpec(
    name="layer_skip",
    factory="specplug.proposers.layer_skip:LayerSkipProposer",
    options=LayerSkipOptions,
    summary="The target's own first layers draft: no second checkpoint.",
    install_hint=INSTALL_HINT,
)
