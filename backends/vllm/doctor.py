"""What can be known about vLLM with specplug before an engine starts.

Nothing is guessed: the arguments go through vLLM's own parser and become its own config, and what
is wrong with a proposer is what it would be refused for at start-up.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from importlib import metadata
from typing import Any

from pydantic import ValidationError

from specplug.backends.vllm import adapter, compat
from specplug.backends.vllm.compat import RELEASES
from specplug.backends.vllm.settings import VllmSettings
from specplug.compat import Hook, in_source, mismatches
from specplug.doctor import Check, Status, refused
from specplug.errors import OptionError, SpecplugError
from specplug.plugins import PluginManager
from specplug.probe import measured
from specplug.proposer import Capability

_PLUGIN = "specplug"
"""The name of the entry point in ``vllm.general_plugins``."""
_FLAG = (
    'Pass --speculative-config \'{"model": "specplug.vllm.suffix", "num_speculative_tokens": 8}\'.'
)


def examine(arguments: Sequence[str]) -> Iterator[Check]:
    """Check the installed vLLM and, if there are any, the arguments of ``vllm serve``."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # what matters of its log is said here
    settings, config, refusal = VllmSettings(), None, None
    if arguments:
        try:
            config = make_config(arguments)
            settings = adapter.settings_of(config)
        except Exception as error:
            refusal = _refused_by_vllm(error)
    yield _release(settings)
    yield _general_plugin(settings)
    yield from _hooks()
    if refusal:
        yield refusal
    elif config is not None:
        yield from _engine(config, settings)


def make_config(arguments: Sequence[str]) -> Any:
    """Return the ``VllmConfig`` of an engine that ``vllm serve`` would start.

    Raises:
        OptionError: vLLM's parser refuses the arguments.
        Exception: whatever vLLM raises for a config that it refuses.
    """
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, serve, said = FlexibleArgumentParser(prog="vllm"), ServeSubcommand(), io.StringIO()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        with redirect_stderr(said):
            parsed = parser.parse_args(["serve", *arguments])
    except SystemExit:
        _, _, reason = said.getvalue().strip().rpartition("\n")
        raise OptionError(reason or "vLLM's parser ended without a word.") from None
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    serve.validate(parsed)
    engine_arguments = AsyncEngineArgs.from_cli_args(parsed)
    return engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _refused_by_vllm(error: Exception) -> Check:
    advice = "`vllm serve` would end with this: change the arguments it names."
    if isinstance(error, ValidationError):
        reasons = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        return Check("arguments", Status.PROBLEM, "; ".join(reasons), advice)
    return refused("arguments", error, advice)


# -- the environment ------------------------------------------------------------------------


def _release(settings: VllmSettings) -> Check:
    import vllm

    try:
        RELEASES.check(vllm.__version__, allow_untested=False)
    except SpecplugError as error:
        if not settings.allow_untested_engine:
            return refused("release", error)
        return Check(
            "release", Status.WARNING, f"{error.message} allow_untested_engine is set.",
            "Compare greedy output once with and without specplug.",
        )  # fmt: skip
    return Check("release", Status.OK, f"vLLM {vllm.__version__} is in the supported range.")


def _general_plugin(settings: VllmSettings) -> Check:
    from vllm import envs

    entries = metadata.entry_points(group="vllm.general_plugins", name=_PLUGIN)
    without = "Without it specplug runs on the V1 model runner only."
    if not entries:
        return Check(
            "general plugin", Status.WARNING, f"Not registered. {without}",
            "Install specplug again, in the environment that vLLM runs in.",
        )  # fmt: skip
    if envs.VLLM_PLUGINS is not None and _PLUGIN not in envs.VLLM_PLUGINS:
        allowed = ",".join(envs.VLLM_PLUGINS)
        return Check(
            "general plugin",
            Status.PROBLEM if settings.runner == "v2" else Status.WARNING,
            f"VLLM_PLUGINS is '{allowed}', so vLLM leaves it out. {without}",
            f"Add '{_PLUGIN}' to VLLM_PLUGINS, without spaces, or unset it.",
        )
    return Check("general plugin", Status.OK, "Registered, and VLLM_PLUGINS does not exclude it.")


def _hooks() -> Iterator[Check]:
    import vllm

    yield _compared("hooks of V1", compat.V1_HOOKS, Status.PROBLEM, "specplug refuses to start")
    only_v1 = "specplug runs on the V1 model runner only"
    yield _compared("hooks of the config", compat.CONFIG_HOOKS, Status.WARNING, only_v1)
    if RELEASES.supports(vllm.__version__, compat.OLDEST_V2):
        yield _compared("hooks of V2", compat.V2_HOOKS, Status.WARNING, only_v1)


def _compared(name: str, hooks: Sequence[Hook], otherwise: Status, effect: str) -> Check:
    differing = mismatches(hooks, in_source)
    if not differing:
        return Check(name, Status.OK, f"All {len(hooks)} are as expected.")
    found = "; ".join(f"{hook}: expected {hook.expected}, found {what}" for hook, what in differing)
    return Check(
        name, otherwise, f"{found}. So {effect}.",
        "Upgrade specplug, or install a supported vLLM as released.",
    )  # fmt: skip


# -- an engine ------------------------------------------------------------------------------


def _engine(config: Any, settings: VllmSettings) -> Iterator[Check]:
    name = adapter.selected(config)
    if name is None:
        yield _not_selected(config)
        return
    try:
        adapter.refuse_unsupported(config)  # the config hook does, where it is at work
    except SpecplugError as error:
        yield refused("arguments", error)
    yield from _proposer(config, settings, name)
    yield _model_runner(config, settings)
    yield _async_scheduling(config)
    yield from _settings(config, settings)
    yield _sampling(config)


def _not_selected(config: Any) -> Check:
    if config.speculative_config is None:
        return Check("selection", Status.PROBLEM, "No speculation is asked for.", _FLAG)
    method, model = config.speculative_config.method, config.speculative_config.model
    return Check(
        "selection", Status.PROBLEM,
        f"--speculative-config selects the method '{method}' with the model '{model}', which is "
        "not specplug's.",
        _FLAG,
    )  # fmt: skip


def _proposer(config: Any, settings: VllmSettings, name: str) -> Iterator[Check]:
    plugins, provides = PluginManager(), adapter.PROVIDES
    if config.use_v2_model_runner:
        provides |= {Capability.DEVICE_TENSORS}
    made = engine = None
    try:
        made = plugins.create(name, settings.options, provides)
        yield Check("proposer", Status.OK, f"{name}, of {plugins.get(name).origin}.")
    except SpecplugError as error:
        yield refused("proposer", error)
    try:
        engine = adapter.engine_info(config, provides, rank=0)
        yield Check("draft length", Status.OK, f"At most {engine.num_speculative_tokens} tokens.")
    except SpecplugError as error:
        yield refused("draft length", error)
    if made and engine:
        yield measured(*made, engine, plugins)


def _model_runner(config: Any, settings: VllmSettings) -> Check:
    runner = "V2" if config.use_v2_model_runner else "V1"
    return Check("model runner", Status.OK, f"{runner}: {next(_reasons(config, settings))}.")


def _reasons(config: Any, settings: VllmSettings) -> Iterator[str]:
    """Yield why the config uses the runner that it uses; the first is what decided."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    from specplug.backends.vllm.selection import SelectedConfig, why_not_v2

    if not isinstance(config, SelectedConfig):
        yield "specplug's general plugin is not at work, and V2 is not for custom_class by itself"
    if settings.runner != "auto":
        yield f"the setting 'runner' is '{settings.runner}'"
    if reason := why_not_v2():
        yield reason
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        yield f"VLLM_USE_V2_MODEL_RUNNER is {int(envs.VLLM_USE_V2_MODEL_RUNNER)}"
    if not config.use_v2_model_runner:
        if not HAS_TRITON:
            yield "V2 needs Triton, which vLLM does not find for this device"
        if unsupported := config._get_v2_model_runner_unsupported_features():
            yield f"V2 does not support {', '.join(unsupported)}"
    yield "vLLM's choice for this model"


def _async_scheduling(config: Any) -> Check:
    if config.scheduler_config.async_scheduling:
        return Check("async scheduling", Status.OK, "On.")
    if config.device_config.device_type == "cpu":
        return Check("async scheduling", Status.OK, "Off: vLLM does not use it on a CPU.")
    if config.use_v2_model_runner:
        return Check("async scheduling", Status.OK, "Off, by the arguments or by vLLM's choice.")
    return Check(
        "async scheduling", Status.WARNING,
        "Off: on V1 vLLM switches it off for every custom_class.",
        "Compare the speed with that without speculation, which keeps it; V2 keeps it too.",
    )  # fmt: skip


def _settings(config: Any, settings: VllmSettings) -> Iterator[Check]:
    """Yield the settings that do nothing with this engine."""
    from vllm import envs

    forced, wanted = settings.runner, envs.VLLM_USE_V2_MODEL_RUNNER
    if forced != "auto" and wanted is not None and wanted is not (forced == "v2"):
        yield Check(
            "settings", Status.WARNING,
            f"VLLM_USE_V2_MODEL_RUNNER is {int(wanted)}, and the setting 'runner' is '{forced}'.",
            "The setting wins; unset one of them.",
        )  # fmt: skip
    if settings.check_rank_agreement and config.parallel_config.tensor_parallel_size == 1:
        yield Check(
            "settings", Status.WARNING, "check_rank_agreement does nothing with one rank.",
            "Leave it out.",
        )  # fmt: skip


def _sampling(config: Any) -> Check:
    refuses = "vLLM refuses requests with min_p or logit_bias while speculation is on"
    if not config.model_config.get_diff_sampling_param().get("min_p"):
        return Check("sampling", Status.OK, f"{refuses}.")
    return Check(
        "sampling", Status.WARNING,
        f"{refuses}, and the default of min_p is not 0: requests that do not set it are refused.",
        "Pass --override-generation-config '{\"min_p\": 0}', or --generation-config vllm.",
    )  # fmt: skip
