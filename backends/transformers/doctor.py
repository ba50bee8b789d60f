"""What can be known about transformers with specplug before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specplug.backends.transformers.compat import differing
from specplug.doctor import Check, Status

_USE = (
    "Pass custom_generate=specplug.transformers.generate and proposer='suffix' to model.generate."
)


def examine(arguments: Sequence[str]) -> Iterator[Check]:
    """Check the installed transformers and, if one is named, a model's folder or name."""
    if found := differing():
        yield Check(
            "release", Status.PROBLEM, f"{found}.",
            "Install a release that docs/reference/releases.md names.",
        )  # fmt: skip
    else:
        yield Check("release", Status.OK, "All that is needed of it is there.")
    for name in arguments:
        yield _model(name)


def _model(name: str) -> Check:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:
        return Check("model", Status.PROBLEM, f"{name}: {error}", "Name a checkpoint's folder.")
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return Check(
            "model", Status.PROBLEM, f"{name} ({config.model_type}) is no decoder-only model.",
            "Only causal language models are served.",
        )  # fmt: skip
    return Check(
        "model", Status.OK,
        f"{name} ({config.model_type}) is a causal language model. Whether tokens can be taken out "
        "of its cache is seen at the first call, which refuses if not.",
        _USE,
    )  # fmt: skip
