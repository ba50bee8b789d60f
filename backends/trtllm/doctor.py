"""What can be known about TensorRT-LLM with specplug before an engine starts.

Its parser cannot be asked without its GPU libraries, so the few arguments of ``trtllm-serve`` that
matter here are read by name; what they come to goes through the same checks as an ``LLM``'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from specplug.backends.trtllm import selection
from specplug.backends.trtllm.adapter import PROVIDES
from specplug.backends.trtllm.compat import HOOKS, RELEASES
from specplug.compat import in_source, mismatches
from specplug.doctor import Check, Status, refused
from specplug.errors import OptionError, SpecplugError
from specplug.probe import measured

_DISTRIBUTION = "tensorrt-llm"
_YAML = (
    "In the file of --config: speculative_config: {decoding_type: User_Provided, max_draft_len: 6, "
    'drafter: "specplug:suffix"}.'
)


def examine(arguments: Sequence[str]) -> Iterator[Check]:
    """Check the installed TensorRT-LLM and, if there are any, the arguments of trtllm-serve."""
    yield _release()
    yield _hooks()
    if arguments:
        try:
            given, module_dirs = llm_arguments(arguments)
        except Exception as error:
            yield refused("arguments", error, "`trtllm-serve` would end with this.")
            return
        yield from _engine(given, module_dirs)


def llm_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the ``LLM`` that ``trtllm-serve`` would make, and its module folders.

    Raises:
        OptionError: there is no model, or the YAML file holds no mapping.
    """
    import yaml

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("words", nargs="*")
    for *flags, name, kind in (
        ("--config", "--extra_llm_api_options", "file", Path),
        ("--tp_size", "tensor_parallel_size", int),
        ("--pp_size", "pipeline_parallel_size", int),
        ("--max_beam_width", "max_beam_width", int),
        ("--max_batch_size", "max_batch_size", int),
        ("--max_seq_len", "max_seq_len", int),
        ("--backend", "backend", str),
        ("--tokenizer", "tokenizer", str),
    ):
        parser.add_argument(*flags, dest=name, type=kind)
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--custom_module_dirs", action="append", default=[])
    parsed = vars(parser.parse_known_args(arguments)[0])
    words = [word for word in parsed.pop("words") if word != "serve"]
    if not words:
        raise OptionError(
            "No model is given.", hint="Give the arguments as trtllm-serve gets them."
        )
    file, module_dirs = parsed.pop("file"), parsed.pop("custom_module_dirs")
    from_file = yaml.safe_load(file.read_text()) if file else {}
    if not isinstance(from_file, Mapping):
        raise OptionError(f"{file} holds no mapping.", hint=_YAML)
    named = {name: value for name, value in parsed.items() if value is not None}
    return {"model": words[0], **named, **from_file}, module_dirs


def _release() -> Check:
    version = metadata.version(_DISTRIBUTION)
    try:
        RELEASES.check(version, allow_untested=False)
    except SpecplugError as error:
        return refused("release", error)
    return Check("release", Status.OK, f"{version} is in the supported range.")


def _hooks() -> Check:
    differing = mismatches(HOOKS, in_source)
    if not differing:
        return Check("hooks", Status.OK, f"All {len(HOOKS)} are as expected.")
    found = "; ".join(f"{hook}: expected {hook.expected}, found {what}" for hook, what in differing)
    return Check(
        "hooks", Status.PROBLEM, f"{found}. So specplug refuses to start.",
        "Upgrade specplug, or install a supported TensorRT-LLM as released.",
    )  # fmt: skip


def _engine(arguments: Mapping[str, Any], module_dirs: Sequence[str]) -> Iterator[Check]:
    config = arguments.get("speculative_config")
    try:
        choice = selection.chosen(config)
    except SpecplugError as error:
        yield refused("selection", error)
        return
    if not isinstance(choice, selection.Choice):
        yield Check("selection", Status.PROBLEM, "No proposer of specplug's is named.", _YAML)
        return
    if not module_dirs:
        yield Check(
            "selection", Status.PROBLEM,
            "There is no --custom_module_dirs, so nothing makes a drafter of the name.",
            "Give a folder whose __init__.py calls specplug.trtllm.accept_names().",
        )  # fmt: skip
    try:
        selection.refuse_unsupported(config, arguments)
    except SpecplugError as error:
        yield refused("arguments", error)
    yield from _proposer(choice, config, arguments)


def _proposer(
    choice: selection.Choice, config: Any, arguments: Mapping[str, Any]
) -> Iterator[Check]:
    try:
        adapter = selection.checked_adapter(
            choice.proposer, config.get("max_draft_len"), choice.settings, choice.options
        )
        model = selection.model_config(arguments)
    except SpecplugError as error:
        yield refused("proposer", error)
        return
    plugins = adapter.plugins()
    yield Check("proposer", Status.OK, f"{adapter.name}, of {plugins.get(adapter.name).origin}.")
    for warning in selection.warnings(arguments, model):
        yield Check("engine", Status.WARNING, warning, "See docs/how-to/trtllm.md.")
    adapter.deployment = selection.deployment(arguments, model)
    made = plugins.create(adapter.name, adapter.settings.options, PROVIDES)
    yield measured(*made, adapter.engine_info(), plugins)
