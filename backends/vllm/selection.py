"""Which model runner an engine with a specplug proposer uses, decided where vLLM decides it.

vLLM makes up its mind while a ``VllmConfig`` is made, in the front end, before anything of a
custom class is loaded. So one method is watched: ``VllmConfig.__post_init__``. A config that does
not name specplug passes through it untouched. One that does becomes a :class:`SelectedConfig`,
and the process learns what the V2 runner needs; so does every process that unpickles it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import spec_decode

from specplug import prometheus
from specplug.backends.vllm import compat
from specplug.backends.vllm.adapter import refuse_unsupported, selected, settings_of
from specplug.backends.vllm.compat import RELEASES
from specplug.compat import in_source, mismatches
from specplug.errors import EngineSupportError

_RUNNER = "vllm.v1.worker.gpu.model_runner"


def watch() -> None:
    """Watch configs being made, in this process. Idempotent.

    Raises:
        EngineSupportError: this vLLM makes configs in another way than specplug knows.
    """
    if not hasattr(VllmConfig.__post_init__, "__wrapped__"):
        RELEASES.check_hooks(compat.CONFIG_HOOKS)
        VllmConfig.__post_init__ = watched(VllmConfig.__post_init__)


def watched(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``VllmConfig.__post_init__``."""

    @functools.wraps(post_init)
    def wrapper(self: Any) -> None:
        if selected(self) is None:
            post_init(self)
            return
        refuse_unsupported(self)
        if type(self) is VllmConfig:  # a subclass keeps what it adds
            self.__class__ = SelectedConfig
        _refuse_forced_v2(self)
        prometheus.prepare()
        if not self.use_v2_model_runner:
            post_init(self)
            return
        with _known_method(self.speculative_config):
            post_init(self)
        _teach_this_process()

    return wrapper


class SelectedConfig(VllmConfig):  # type: ignore[misc]
    """The config of an engine that uses specplug. It says that V2 supports the proposer."""

    @property
    def use_v2_model_runner(self) -> bool:
        """Return what the user chose, or else what vLLM chooses."""
        runner = settings_of(self).runner
        if runner == "auto" and why_not_v2() is None:
            return bool(super().use_v2_model_runner)
        return runner == "v2"

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        features = super()._get_v2_model_runner_unsupported_features()
        if settings_of(self).runner == "v1" or why_not_v2():
            return list(features)
        ours = ("custom_class", "ngram")
        return [feature for feature in features if not any(name in feature for name in ours)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.use_v2_model_runner:
            _teach_this_process()


@functools.cache
def why_not_v2() -> str | None:
    """Return why specplug cannot use this vLLM's V2 runner, None if it can."""
    if not RELEASES.supports(vllm.__version__, compat.OLDEST_V2):
        oldest, newest = (".".join(map(str, one)) for one in (compat.OLDEST_V2, RELEASES.newest))
        return f"specplug supports vLLM's V2 model runner from {oldest} to {newest}"
    for hook, found in mismatches(compat.V2_HOOKS, in_source):
        return f"{hook}: expected {hook.expected}, found {found}"
    return None


def _refuse_forced_v2(vllm_config: Any) -> None:
    reason = why_not_v2()
    if reason and settings_of(vllm_config).runner == "v2":
        raise EngineSupportError(
            f"The setting 'runner' is 'v2', and vLLM {vllm.__version__} is installed: {reason}.",
            hint="Leave 'runner' out: V2 is used where it can be.",
        )


@contextmanager
def _known_method(speculative_config: Any) -> Iterator[None]:
    """Pass for a method whose drafts vLLM lets stay on the device: it keeps async scheduling.

    It keeps it for a list of methods, in the middle of ``__post_init__``; ``ngram_gpu`` is the one
    of them that has no model either.
    """
    method = speculative_config.method
    speculative_config.method = "ngram_gpu"
    try:
        yield
    finally:
        speculative_config.method = method


def _teach_this_process() -> None:
    """Let ``init_speculator`` make ours. Cheap: the front end makes none, and needs no runner."""
    if hasattr(spec_decode.init_speculator, "__wrapped__"):
        return
    spec_decode.init_speculator = initialised(spec_decode.init_speculator)
    runner: Any = sys.modules.get(_RUNNER)
    if runner is not None:  # it has bound the name already
        runner.init_speculator = spec_decode.init_speculator


def initialised(init_speculator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_speculator``: engines that name specplug get our speculator."""

    @functools.wraps(init_speculator)
    def wrapper(vllm_config: Any, device: Any, *more: Any, **named: Any) -> Any:
        proposer = selected(vllm_config)
        if proposer is None:
            return init_speculator(vllm_config, device, *more, **named)
        from specplug.backends.vllm.v2 import make_speculator

        return make_speculator(vllm_config, device, proposer)

    return wrapper
