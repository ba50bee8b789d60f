"""Settings and options: one pydantic model each, and errors that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt, ValidationError
from pydantic_core import PydanticUndefined

from specplug.errors import OptionError, nearest
from specplug.proposer import Options, RequestOptions

_M = TypeVar("_M", bound=BaseModel)

_SHORT_NAMES = {NoneType: "None", Ellipsis: "..."}

REQUEST_PREFIX = "specplug_"
"""Marks specplug's keys among an engine's free-form per-request arguments."""
MAX_SPECULATIVE_TOKENS = 128
"""The largest K where an engine names no limit of its own."""


class Settings(Options):
    """What a user may set beside the proposer's name and K: the engine's ``specplug`` section."""

    options: dict[str, Any] = Field(
        default_factory=dict, description="The proposer's own options; see `specplug list`."
    )
    length_policy: str = Field(
        "adaptive", description="How many draft tokens are verified; see `specplug list`."
    )
    length_policy_options: dict[str, Any] = Field(
        default_factory=dict, description="The length policy's own options."
    )
    max_draft_tokens_per_step: PositiveInt | None = Field(
        None, description="The most draft tokens verified in one step, over all requests."
    )
    max_speculating_requests: PositiveInt | None = Field(
        None, description="The most requests with a draft in one step: those with the longest."
    )
    off_above_running: PositiveInt | None = Field(
        None, description="Draft nothing while more requests than this are in the batch."
    )
    off_above_context: PositiveInt | None = Field(
        None, description="Draft nothing for requests with more tokens than this."
    )
    max_consecutive_faults: PositiveInt = Field(
        10,
        description="Steps in a row that fail before the proposer, or the length policy, is "
        "switched off.",
    )
    log_interval_seconds: NonNegativeFloat = Field(
        60.0, description="How often the counters are logged; 0 for only at shutdown."
    )
    record_folder: Path | None = Field(
        None,
        description="Where to record requests for `specplug replay`: their prompts and outputs, "
        "as token ids. They are the users' text.",
    )
    record_max_bytes: PositiveInt = Field(
        10**9, description="The most that a process records, in bytes."
    )
    allow_untested_engine: bool = Field(
        False, description="Start with an engine version outside the tested range."
    )


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, for people: how ``specplug list`` and error messages show it."""

    name: str
    type: str
    default: str
    description: str

    def __str__(self) -> str:
        return f"{self.name}: {self.type} = {self.default}"


def describe(model: type[BaseModel]) -> list[OptionInfo]:
    """Return the options of a model in the order in which they were declared."""
    return [
        OptionInfo(name, _type_name(info.annotation), _default(info), info.description or "")
        for name, info in model.model_fields.items()
    ]


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if annotation in _SHORT_NAMES:
        return _SHORT_NAMES[annotation]
    if arguments:
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    return getattr(annotation, "__name__", str(annotation))


def _default(info: Any) -> str:
    value = info.get_default(call_default_factory=True)
    return "(required)" if value is PydanticUndefined else repr(value)


def validate(model: type[_M], values: Any, where: str) -> _M:
    """Return ``model(**values)``.

    Args:
        model: the model to fill.
        values: a mapping of names to values, as the user wrote it.
        where: what the values belong to, for the error message.

    Raises:
        OptionError: naming every wrong option, its type and its default.
    """
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{where} must be a mapping of names to values, not {type(values).__name__}.",
            hint=_hint(model),
        )
    try:
        return model(**values)
    except (ValidationError, TypeError) as error:
        raise OptionError(_explain(model, error, where), hint=_hint(model)) from None


def _explain(model: type[BaseModel], error: ValidationError | TypeError, where: str) -> str:
    if isinstance(error, TypeError):
        return f"{where}: option names must be text ({error})."
    known = {info.name: info for info in describe(model)}
    problems = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown option '{name}'.{nearest(name, known)}")
        elif name in known:
            info = known[name]
            problems.append(
                f"option '{name}' is {item['input']!r}, but {_lower_first(item['msg'])} "
                f"(type {info.type}, default {info.default})."
            )
        else:
            problems.append(f"{item['msg'].removeprefix('Value error, ')}.")
    return f"{where}: " + " ".join(problems)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _hint(model: type[BaseModel]) -> str:
    options = describe(model)
    if not options:
        return "It takes no options."
    return "The options are: " + "; ".join(map(str, options)) + "."


def request_options(
    model: type[RequestOptions], arguments: Mapping[str, Any] | None
) -> RequestOptions:
    """Pick specplug's keys out of a request's free-form arguments and validate them.

    Keys are the model's field names with the prefix ``specplug_``; others are not ours.

    Raises:
        OptionError: for an unknown name, a wrong type or a negative number of tokens.
    """
    ours = {
        str(key)[len(REQUEST_PREFIX) :]: value
        for key, value in (arguments or {}).items()
        if str(key).startswith(REQUEST_PREFIX)
    }
    if not ours:
        return model()
    return validate(model, ours, f"per-request options ('{REQUEST_PREFIX}…')")


def checked_k(
    k: Any, most: int | None = MAX_SPECULATIVE_TOKENS, hint: str = "6 to 8 is a good beginning."
) -> int:
    """Return K as a user gave it, if it can be one.

    Args:
        k: the most draft tokens per request and step.
        most: the engine's own limit; None where it has none.
        hint: what to do about a wrong one.

    Raises:
        OptionError: it is no whole number, or out of range.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1 or (most is not None and k > most):
        limit = "from 1 on" if most is None else f"from 1 to {most}"
        raise OptionError(
            f"num_speculative_tokens is {k!r}; it must be a whole number {limit}.", hint=hint
        )
    return k
