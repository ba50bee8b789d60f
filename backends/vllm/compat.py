"""Which vLLM releases are supported, and whether the installed one is as expected.

Everything of vLLM that specplug wraps, or that a wrapper relies on, is named here by generation
and checked before it is touched. The checks read names and signatures, from live objects or, so
that nothing of the engine is imported, from source files.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specplug.errors import EngineSupportError

OLDEST = (0, 22)
NEWEST = (0, 33)
"""Releases whose source was checked; see docs/vllm.md for those that were run."""
OLDEST_V2 = (0, 28)
"""The first release whose V2 runner takes a speculator that has no model."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A name in vLLM.

    Attributes:
        module: where it is.
        name: a function, a class or ``Class.method``.
        parameters: of a function: its first parameters, in order.
        fields: of a class: the annotated fields that it must have.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def expected(self) -> str:
        """Return what the hook should look like, for people."""
        if self.fields:
            return f"fields {', '.join(self.fields)}"
        return f"({', '.join(self.parameters)}, …)"


_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
_V2_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_STEP = ("self", "scheduler_output")

V1_HOOKS = (
    Hook(_V1_RUNNER, "GPUModelRunner._update_states", _STEP),
    Hook(_V1_RUNNER, "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata")),
)
CONFIG_HOOKS = (
    Hook("vllm.config.vllm", "VllmConfig.__post_init__", ("self",)),
    Hook("vllm.config.vllm", "VllmConfig.use_v2_model_runner", ("self",)),
    Hook("vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features", ("self",)),
)
V2_HOOKS = (
    Hook(_V2_SPECULATORS, "init_speculator", ("vllm_config", "device")),
    Hook(
        f"{_V2_SPECULATORS}.speculator",
        "BaseSpeculator.propose",
        (
            "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states",
            "aux_hidden_states", "num_sampled",
        ),
    ),
    Hook(
        f"{_V2_SPECULATORS}.rejection_sampler",
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch"),
    ),
    Hook(_V2_RUNNER, "GPUModelRunner.add_requests", _STEP),
    Hook(
        _V2_RUNNER,
        "GPUModelRunner.postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled"),
    ),
    Hook(_V2_RUNNER, "GPUModelRunner.take_draft_token_ids", ("self",)),
    Hook(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        fields=("req_ids", "num_reqs", "idx_mapping_np", "cu_num_logits_np"),
    ),
    Hook(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        fields=("req_id", "prompt_token_ids", "prefill_token_ids", "sampling_params"),
    ),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", fields=("num_spec_tokens_to_schedule",)),
)  # fmt: skip

Found = str | None
"""What was found instead of a hook; None if it is as expected."""


def check_version(version: str, *, allow_untested: bool) -> None:
    """Refuse releases outside the supported range.

    Raises:
        EngineSupportError: naming the version found, the range, and what to do.
    """
    if allow_untested or supported(version):
        return
    raise EngineSupportError(
        f"vLLM {version} is installed; this specplug supports {_dotted(OLDEST)} to "
        f"{_dotted(NEWEST)}.",
        hint="Upgrade specplug or install a supported vLLM. To try this one all the same, pass "
        '--additional-config \'{"specplug": {"allow_untested_engine": true}}\': the '
        "signatures are checked, and greedy output should be compared once without specplug.",
    )


def supported(version: str, oldest: tuple[int, int] = OLDEST) -> bool:
    """Return whether a release is in the supported range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return bool(found and oldest <= (int(found[1]), int(found[2])) <= NEWEST)


def check(hooks: Iterable[Hook]) -> None:
    """Refuse an engine whose live objects are not the ones that specplug knows.

    Raises:
        EngineSupportError: naming the first hook that differs, what was expected and found.
    """
    for hook, found in mismatches(hooks, live):
        raise EngineSupportError(
            f"{hook}: expected {hook.expected}, found {found}.",
            hint="This vLLM is not one that specplug knows: upgrade specplug, or install a vLLM "
            f"from {_dotted(OLDEST)} to {_dotted(NEWEST)} as released.",
        )


def mismatches(hooks: Iterable[Hook], look: Callable[[Hook], Found]) -> list[tuple[Hook, str]]:
    """Return the hooks that are not as expected, each with what was found.

    Args:
        hooks: what to check.
        look: :func:`live`, or :func:`in_source` with the place of the source files.
    """
    return [(hook, found) for hook in hooks if (found := look(hook)) is not None]


def live(hook: Hook) -> Found:
    """Look at the object itself; imports its module."""
    try:
        found: Any = importlib.import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return "nothing of that name"
    if hook.fields:
        annotated = [inspect.get_annotations(base) for base in found.__mro__]
        return _missing(hook, {name for names in annotated for name in names})
    if isinstance(found, property):
        found = found.fget
    return _differing(hook, list(inspect.signature(found).parameters))


def installed_source(module: str) -> Path | None:
    """Return the source file of an installed module; imports at most its parent packages."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec and spec.origin else None


def in_source(hook: Hook, source: Callable[[str], Path | None] = installed_source) -> Found:
    """Look at the source file that ``source`` returns for the hook's module."""
    try:
        path = source(hook.module)
    except ImportError:
        path = None
    if path is None or not path.is_file():
        return "no such module"
    node: ast.AST | None = _parsed(path)
    for part in hook.name.split("."):
        node = next(
            (child for child in getattr(node, "body", ()) if getattr(child, "name", "") == part),
            None,
        )
    if hook.fields and isinstance(node, ast.ClassDef):
        annotated = [child.target for child in node.body if isinstance(child, ast.AnnAssign)]
        return _missing(hook, {ast.unparse(target) for target in annotated})
    if isinstance(node, ast.FunctionDef):
        return _differing(hook, [argument.arg for argument in node.args.args])
    return "nothing of that name"


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _missing(hook: Hook, fields: set[str]) -> Found:
    missing = [name for name in hook.fields if name not in fields]
    return f"no field {', '.join(missing)}" if missing else None


def _differing(hook: Hook, parameters: list[str]) -> Found:
    if tuple(parameters[: len(hook.parameters)]) == hook.parameters:
        return None
    return f"({', '.join(parameters)})"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
