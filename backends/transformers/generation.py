"""What ``model.generate(custom_generate=...)`` calls in place of its own decoding loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from specplug.backends.transformers.adapter import runtime_of
from specplug.backends.transformers.caller import argument_of_generate
from specplug.backends.transformers.compat import check_call, check_release
from specplug.backends.transformers.decoding import Decoding, Recorded
from specplug.backends.transformers.stopping import Stopping
from specplug.errors import OptionError

_BY_ROW = ("attention_mask", "position_ids", "token_type_ids")
_SHARED = ("logits_to_keep", "past_key_values", "use_cache")


def generate(
    model: Any,
    input_ids: Any,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    proposer: str,
    num_speculative_tokens: int = 8,
    options: Mapping[str, Any] | None = None,
    request_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Decode with drafts; called by ``GenerationMixin.generate``, which prepares everything else.

    Args:
        model: the target model.
        input_ids: int64 ``[batch_size, prompt_length]``, left-padded.
        logits_processor: prepared; called for each new token with the sequence before it.
        stopping_criteria: prepared; asked after each new token.
        generation_config: prepared.
        proposer: the registered name of the proposer.
        num_speculative_tokens: K, the most draft tokens per step.
        options: the proposer's own options.
        request_options: what requests may set: one mapping for all rows, or one for each.
        settings: the other settings, see ``specplug.config.Settings``.
        streamer: gets each token as it is decided, as from plain ``generate``.
        synced_gpus: refused when true.
        model_kwargs: for the model's ``forward``.

    Returns:
        What plain ``generate`` returns: int64 ``[batch_size, length]``, or an output object.

    Raises:
        SpecplugError: a name, an option, the model or the mode is not supported.
    """
    streamer = streamer or argument_of_generate("streamer")
    synced_gpus = synced_gpus or bool(argument_of_generate("synced_gpus"))
    check_release()
    check_call(
        model, generation_config, use_cache=model_kwargs["use_cache"], synced_gpus=synced_gpus
    )
    runtime = runtime_of(
        model, proposer, num_speculative_tokens, {**(settings or {}), "options": options or {}}
    )
    stopping = Stopping(stopping_criteria)
    requests = _by_row(request_options, len(input_ids))
    if len(input_ids) > 1:
        _check_batch(generation_config, logits_processor, stopping, streamer, model_kwargs)
    decodings = [
        Decoding(
            model, runtime, row, processor=logits_processor, stopping=stopping,
            config=generation_config, streamer=streamer, options=wanted, model_kwargs=kwargs,
        )
        for row, wanted, kwargs in zip(
            input_ids.split(1), requests, _rows_of(model_kwargs, len(input_ids)), strict=True
        )
    ]  # fmt: skip
    for decoding in decodings:
        decoding.run()
    if streamer is not None:
        streamer.end()
    return _output(decodings, generation_config)


def _by_row(options: Any, batch_size: int) -> list[Mapping[str, Any]]:
    if options is None or isinstance(options, Mapping):
        return [options or {}] * batch_size
    if len(options) != batch_size:
        raise OptionError(
            f"request_options holds {len(options)} mappings, for a batch of {batch_size}.",
            hint="Give one mapping for all rows, or one for each.",
        )
    return list(options)


def _check_batch(
    config: Any, processors: Any, stopping: Stopping, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Refuse what plain ``generate`` does to a whole batch and rows by themselves cannot do."""
    from transformers import PrefixConstrainedLogitsProcessor

    by_row = any(isinstance(one, PrefixConstrainedLogitsProcessor) for one in processors)
    past = kwargs["past_key_values"].get_seq_length()
    unknown = [n for n, v in kwargs.items() if v is not None and n not in (*_BY_ROW, *_SHARED)]
    problems = {
        "a streamer": streamer is not None,
        "past_key_values": past > 0,
        "prefix_allowed_tokens_fn": by_row,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "stopping criteria of your own without an EOS token": stopping.others
        and not stopping.eos_token_ids,
        **{f"the model input '{name}'": True for name in unknown},
    }
    if found := [name for name, there in problems.items() if there]:
        raise OptionError(
            f"The rows of a batch are decoded one after the other, which does not go with "
            f"{', '.join(found)}.",
            hint="Call generate for one sequence at a time.",
        )


def _rows_of(kwargs: dict[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """Split the model's inputs; each row gets a cache of its own, still empty."""
    if batch_size == 1:
        return [kwargs]
    rows = []
    for i in range(batch_size):
        row = {**kwargs, "past_key_values": copy.deepcopy(kwargs["past_key_values"])}
        for name in _BY_ROW:
            if row.get(name) is not None and len(row[name]) == batch_size:
                row[name] = row[name][i : i + 1]
        rows.append(row)
    return rows


def _output(decodings: list[Decoding], config: Any) -> Any:
    from transformers.generation import GenerateDecoderOnlyOutput

    width = max(decoding.length for decoding in decodings)
    sequences = decodings[0].tokens.new_full((len(decodings), width), 0)
    if len(decodings) > 1 and config._pad_token_tensor is not None:
        sequences[:] = config._pad_token_tensor
    for row, decoding in zip(sequences, decodings, strict=True):
        row[: decoding.length] = decoding.tokens[0]
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_steps([decoding.scores for decoding in decodings]),
        logits=_steps([decoding.logits for decoding in decodings]),
        past_key_values=decodings[0].cache if len(decodings) == 1 else None,
    )


def _steps(rows: list[Recorded]) -> Recorded:
    """Put the rows' values of each step together; a row that has ended has zeros."""
    import torch

    if rows[0] is None or len(rows) == 1:
        return rows[0]
    some = [row or () for row in rows]
    nothing = torch.zeros_like(rows[0][0])
    return tuple(
        torch.cat([row[i] if i < len(row) else nothing for row in some])
        for i in range(max(map(len, some)))
    )
