"""How a proposer is named to TensorRT-LLM, and what is refused before an engine starts.

The engine takes drafter objects, does not check them, and tells them nothing of the model. So the
constructor of its ``LLM`` is watched, in processes that use specplug with it: there the arguments
are known, and a string from a YAML file can become a drafter.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specplug.backends.trtllm.adapter import PROVIDES, Adapter, Deployment
from specplug.backends.trtllm.compat import HOOKS, RELEASES
from specplug.config import Settings, checked_k, validate
from specplug.errors import EngineSupportError, OptionError
from specplug.proposer import ProposerSpec

logger = logging.getLogger(__name__)

PREFIX = "specplug:"
"""What a ``drafter`` in a YAML file begins with that names a proposer."""
KEY = "specplug"
"""The key of the proposer's name where the ``drafter`` is a mapping, with ``options`` beside."""
_ENGINES_BATCH_SIZE = 2048
_LONG = 1 << 20
_HYBRID = ("mamba", "ssm", "linear_attention", "hybrid_override_pattern")


def speculative_config(
    proposer: str | Any,
    *,
    num_speculative_tokens: int,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return the engine's own ``UserProvidedDecodingConfig`` for a proposer.

    Args:
        proposer: a registered name, or a spec or decorated function, which workers must be able
            to import.
        num_speculative_tokens: K, the most draft tokens per request and step.
        settings: specplug's settings: ``max_consecutive_faults``, ``log_interval_seconds``, ...
        options: the proposer's own.

    Raises:
        SpecplugError: K, the name, a setting, an option or the installed engine is wrong.
    """
    adapter = make_adapter(proposer, num_speculative_tokens, settings or {}, options)
    watch_llm()
    from tensorrt_llm.llmapi import UserProvidedDecodingConfig

    return UserProvidedDecodingConfig(max_draft_len=num_speculative_tokens, **parts(adapter))


def make_adapter(
    proposer: str | Any, k: Any, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Adapter:
    """Check the engine and what a user asks of it; return that as an adapter.

    Raises:
        SpecplugError: as :func:`speculative_config`.
    """
    import tensorrt_llm

    adapter = checked_adapter(proposer, k, settings, options)
    RELEASES.check(tensorrt_llm.__version__, allow_untested=adapter.settings.allow_untested_engine)
    return adapter


def checked_adapter(
    proposer: str | Any, k: Any, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> Adapter:
    """Return what a user asks for as an adapter, which is started in the workers.

    Raises:
        SpecplugError: K, the name, a setting or an option is wrong.
    """
    checked = validate(Settings, {**settings, "options": dict(options)}, "settings of specplug")
    k = checked_k(k, None, "In a YAML file it is max_draft_len. Good values are 4 to 8.")
    name, plugin = (proposer, None) if isinstance(proposer, str) else (_name(proposer), proposer)
    adapter = Adapter(name, k, checked, plugin)
    adapter.plugins().create(name, checked.options, PROVIDES)
    return adapter


def parts(adapter: Adapter) -> dict[str, Any]:
    """Return the two objects that the engine's config takes, as its fields."""
    from specplug.backends.trtllm.drafter import SpecplugDrafter, SpecplugResourceManager

    return {
        "drafter": SpecplugDrafter(adapter),
        "resource_manager": SpecplugResourceManager(adapter),
    }


def _name(proposer: Any) -> str:
    spec = getattr(proposer, "specplug_spec", proposer)
    if not isinstance(spec, ProposerSpec):
        raise OptionError(
            f"{proposer!r} is no proposer.",
            hint="Give a registered name, a ProposerSpec or a function decorated with "
            "specplug.proposer.",
        )
    return spec.name


# -- the LLM's constructor ------------------------------------------------------------------


def watch_llm() -> None:
    """Look at the arguments of every ``LLM`` that is made from now on. Idempotent.

    Those without a proposer of specplug's pass through untouched.

    Raises:
        EngineSupportError: the engine differs from those that specplug knows.
    """
    RELEASES.check_hooks(HOOKS)
    from tensorrt_llm.llmapi.llm import BaseLLM

    if not hasattr(BaseLLM.__init__, "_specplug"):
        BaseLLM.__init__ = _watched(BaseLLM.__init__)


def _watched(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: Any, *positional: Any, **named: Any) -> None:
        config = named.get("speculative_config")
        if (choice := chosen(config)) is not None:
            bound = signature.bind(self, *positional, **named).arguments
            arguments = {**bound, **bound.get("kwargs", {})}
            named["speculative_config"] = attached(config, choice, arguments)
        init(self, *positional, **named)

    wrapper._specplug = True  # type: ignore[attr-defined]
    return wrapper


@dataclass(frozen=True, slots=True)
class Choice:
    """A proposer as a YAML file names it."""

    proposer: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]


def chosen(config: Any) -> Adapter | Choice | None:
    """Return what a speculative config chooses of specplug; None if it is not for specplug."""
    drafter = _read(config, "drafter")
    if isinstance(adapter := getattr(drafter, "adapter", None), Adapter):
        return adapter
    if isinstance(drafter, str) and drafter.startswith(PREFIX):
        return Choice(drafter.removeprefix(PREFIX), {}, {})
    if isinstance(drafter, Mapping) and KEY in drafter:
        given = {"options": {}, "settings": {}, **drafter}
        if unknown := set(given) - {KEY, "options", "settings"}:
            raise OptionError(
                f"the drafter has unknown keys: {', '.join(sorted(map(str, unknown)))}.",
                hint=f"It takes '{KEY}' (the proposer's name), 'options' and 'settings'.",
            )
        return Choice(str(given[KEY]), given["options"], given["settings"])
    return None


def attached(config: Any, choice: Adapter | Choice, arguments: Mapping[str, Any]) -> Any:
    """Return the config with drafter and resource manager, which know what they will serve.

    Args:
        config: the engine's config object, or a mapping of its fields.
        choice: what it chooses.
        arguments: of the ``LLM``.

    Raises:
        SpecplugError: the engine would not serve it.
    """
    if isinstance(choice, Choice):
        k = _read(config, "max_draft_len")
        choice = make_adapter(choice.proposer, k, choice.settings, choice.options)
    refuse_unsupported(config, arguments)
    model = model_config(arguments)
    for warning in warnings(arguments, model):
        logger.warning(warning)
    choice.deployment = deployment(arguments, model)
    if isinstance(config, Mapping):
        return {**config, **parts(choice)}
    for name, value in parts(choice).items():
        setattr(config, name, value)
    return config


def refuse_unsupported(config: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what would fail later, or change the text, in other words.

    Raises:
        OptionError: naming the argument and what to do.
    """
    stages = arguments.get("pipeline_parallel_size") or 1
    beams = arguments.get("max_beam_width") or 1
    backend = arguments.get("backend") or "pytorch"
    for wrong, message, hint in (
        (stages > 1, f"pipeline_parallel_size is {stages}; specplug works with 1 only.",
         "Use tensor parallelism, or leave speculation off."),
        (beams > 1, f"max_beam_width is {beams}; speculation works without beam search only.",
         "Leave max_beam_width at 1, or speculation off."),
        (backend != "pytorch", f"the backend is '{backend}'; drafters work with 'pytorch' only.",
         "Leave 'backend' out."),
        *(
            (_read(config, name) is not None, f"{name} is set in the speculative config.",
             "Leave it out: requests whose speculation the engine switches on and off lose the "
             "memory of their drafts. Proposers step aside by themselves.")
            for name in ("max_concurrency", "draft_len_schedule")
        ),
    ):  # fmt: skip
        if wrong:
            raise OptionError(message, hint=hint)


def model_config(arguments: Mapping[str, Any]) -> Any:
    """Return the checkpoint's transformers config.

    Raises:
        EngineSupportError: it cannot be read, so nothing is known of the vocabulary.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(arguments["model"]),
            revision=arguments.get("revision"),
            trust_remote_code=bool(arguments.get("trust_remote_code")),
        )
        return config.get_text_config()
    except Exception as error:
        raise EngineSupportError(
            f"The config of {arguments['model']} cannot be read: {error}",
            hint="specplug needs its vocab_size: a token outside it would end the engine.",
        ) from error


def deployment(arguments: Mapping[str, Any], model: Any) -> Deployment:
    """Return what proposers need to know of an ``LLM``."""
    longest = arguments.get("max_seq_len") or getattr(model, "max_position_embeddings", None)
    return Deployment(
        model=str(arguments["model"]),
        tokenizer=str(arguments.get("tokenizer") or arguments["model"]),
        trust_remote_code=bool(arguments.get("trust_remote_code")),
        vocab_size=model.vocab_size,
        max_seq_len=longest or _LONG,
        max_batch_size=arguments.get("max_batch_size") or _ENGINES_BATCH_SIZE,
        tensor_parallel_size=arguments.get("tensor_parallel_size") or 1,
    )


def warnings(arguments: Mapping[str, Any], model: Any) -> Iterator[str]:
    """Yield what works and should be known all the same."""
    if not arguments.get("disable_overlap_scheduler"):
        yield (
            "TensorRT-LLM switches its overlap scheduler off for user-provided drafters: compare "
            "the speed with that without speculation, which keeps it."
        )
    if any(word in str(model.to_dict()) for word in _HYBRID):
        yield (
            "this looks like a hybrid (state-space) model: TensorRT-LLM's rewind leaves "
            "user-provided drafters out, so compare greedy text with and without speculation."
        )


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
