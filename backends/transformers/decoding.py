"""One sequence: prefill, then draft, verify and commit until it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, zip_longest
from typing import Any

import numpy as np

from specplug.backends.transformers.compat import check_cache
from specplug.backends.transformers.sampling import verified
from specplug.backends.transformers.stopping import Stopping
from specplug.config import REQUEST_PREFIX
from specplug.proposer import Capability
from specplug.runtime import Arrival, Runtime, Step

Recorded = tuple[Any, ...] | None
"""One tensor ``[1, vocab_size]`` for each new token; None if the call does not ask for them."""

_ids = count()
_ROW = np.zeros(1, np.int32)


class Decoding:
    """Decodes one row of a call of ``generate``.

    Tokens are committed one at a time, in order: the target's token is chosen, compared with the
    draft, and chosen again at the next position only while they are equal. So logits processors,
    stopping criteria and the random generator are asked what plain decoding would ask them.

    Args:
        model: the target model.
        runtime: drives the proposer.
        prompt: int64 ``[1, prompt_length]``, perhaps left-padded.
        processor: the prepared logits processors.
        stopping: when the sequence ends.
        config: the prepared ``GenerationConfig``.
        streamer: gets each token; may be None.
        options: the request's options.
        model_kwargs: for the model's ``forward``; with the cache.
    """

    def __init__(
        self,
        model: Any,
        runtime: Runtime,
        prompt: Any,
        *,
        processor: Any,
        stopping: Stopping,
        config: Any,
        streamer: Any,
        options: Mapping[str, Any],
        model_kwargs: dict[str, Any],
    ) -> None:
        self._model, self._runtime, self._config = model, runtime, config
        self._processor, self._stopping, self._streamer = processor, stopping, streamer
        self._kwargs = model_kwargs
        self._options = {f"{REQUEST_PREFIX}{name}": value for name, value in options.items()}
        self._id = str(next(_ids))
        self._draft: list[int] = []
        self._drawn_from: Any = None  # [drafted, vocab_size], if the draft was sampled
        self._target: list[int] = []
        self._target_logits: Any = None
        self._shows_tokens = runtime.uses(Capability.TARGET_TOKENS)
        self._shows_logits = runtime.uses(Capability.LOGITS)
        self.length: int = prompt.shape[1]
        self._tokens = prompt.new_zeros((1, max(stopping.max_length, self.length + 1)))
        self._tokens[:, : self.length] = prompt
        mask = model_kwargs.get("attention_mask")
        # Padding is the model's business, not the proposer's.
        self._num_padding = 0 if mask is None else int((mask[0, : self.length] == 0).sum())
        self._host = np.zeros((1, self._tokens.shape[1] - self._num_padding), np.int32)
        self._host[0, : self._num_known] = prompt[0, self._num_padding :].cpu()
        recorded = config.return_dict_in_generate
        self.scores: Recorded = () if recorded and config.output_scores else None
        self.logits: Recorded = () if recorded and config.output_logits else None

    @property
    def tokens(self) -> Any:
        """The sequence so far: int64 ``[1, length]``, padding included."""
        return self._tokens[:, : self.length]

    @property
    def cache(self) -> Any:
        """The KV cache of the sequence without its last token."""
        return self._kwargs["past_key_values"]

    @property
    def _num_known(self) -> int:
        return self.length - self._num_padding

    def run(self) -> None:
        """Decode until the sequence ends."""
        self._runtime.begin(
            Arrival(
                id=self._id,
                prompt_token_ids=self._host[0, : self._num_known].tolist(),
                max_num_tokens=self._stopping.max_length - self._num_padding,
                stop_token_ids=self._stopping.eos_token_ids,
                arguments=self._options,
            )
        )
        try:
            ended = self._prefill()
            while not ended:
                ended = self._verify()
        finally:
            self._runtime.end(self._id)

    def _prefill(self) -> bool:
        outputs = self._model._prefill(
            self.tokens, self._config, self._kwargs,
            is_first_iteration=not self._config.is_assistant,
        )  # fmt: skip
        check_cache(getattr(outputs, "past_key_values", None))
        # Not earlier: caches with a window would keep what they need not of the whole prompt.
        outputs.past_key_values.activate_past_recording()
        return self._take(outputs)

    def _verify(self) -> bool:
        """Run the model over the last token and the draft behind it."""
        width = len(self._draft)
        kwargs = dict(self._kwargs)
        if width:
            drafted = self._tokens.new_tensor(self._draft)
            self._tokens[0, self.length : self.length + width] = drafted
            kwargs = self._model._update_model_kwargs_for_generation(
                {}, kwargs, num_new_tokens=width
            )
        inputs = self._model.prepare_inputs_for_generation(
            self._tokens[:, : self.length + width], next_sequence_length=width + 1, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width + 1
        return self._take(self._model(**inputs, return_dict=True))

    def _take(self, outputs: Any) -> bool:
        """Commit what the model says, take back what it rejects, and get the next draft."""
        logits = outputs.logits[:, -len(self._draft) - 1 :].to(self._tokens.device)
        self._target = logits[0].argmax(dim=-1).tolist() if self._shows_tokens else []
        self._target_logits = logits[0].float().cpu().numpy() if self._shows_logits else None
        before = self.length
        ended = self._commit(logits)
        added = self.length - before
        outputs.past_key_values.crop(added - 1 - len(self._draft))
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, num_new_tokens=added
        )
        self._prepare_draft(ended)
        return ended

    def _commit(self, logits: Any) -> bool:
        """Append tokens up to the first that was not drafted; return whether the sequence ends."""
        for drafted, token in zip_longest(self._draft, self._choices(logits)):
            self._tokens[0, self.length] = token
            self._host[0, self._num_known] = token
            self.length += 1
            if self._streamer is not None:
                self._streamer.put(self._tokens[0, self.length - 1 : self.length].cpu())
            if self._stopping(self.tokens, token, self.scores):
                return True
            if token != drafted:
                break
        return False

    def _choices(self, logits: Any) -> Iterator[int]:
        """Yield the target's token at each position, the one before being committed by then."""
        config = self._config
        plain = not self._processor and self.scores is None and self.logits is None
        if plain and not config.do_sample:
            yield from self._target or logits[0].argmax(dim=-1).tolist()
            return
        for position in range(logits.shape[1]):
            yield self._choice(logits[:, position], position)

    def _choice(self, logits: Any, position: int) -> int:
        import torch

        logits = logits.to(dtype=torch.float32, copy=True)
        scores = self._processor(self.tokens, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if not self._config.do_sample:
            return int(scores.argmax(dim=-1))
        probabilities = scores.softmax(dim=-1)
        if self._drawn_from is not None and position < len(self._draft):
            return verified(probabilities[0], self._drawn_from[position], self._draft[position])
        # Also at a position with a draft: without probabilities, that is kept if it is this one.
        return int(torch.multinomial(probabilities, num_samples=1))

    def _prepare_draft(self, ended: bool) -> None:
        drafts = self._runtime.step(
            Step(
                request_ids=[self._id],
                token_ids=self._host,
                rows=_ROW,
                num_tokens=[self._num_known],
                sampled=[True],
                verified={self._id: self._draft} if self._draft else {},
                target_token_ids=(
                    {self._id: self._target} if self._draft and self._shows_tokens else None
                ),
                logits={self._id: self._target_logits} if self._shows_logits else None,
                num_speculative_tokens=0 if ended else None,
            )
        )
        self._draft, self._drawn_from = drafts.to_lists()[0], None
        if drafts.probabilities is not None:
            import torch

            self._drawn_from = torch.from_numpy(drafts.probabilities[0]).to(
                self._tokens.device, torch.float32
            )
