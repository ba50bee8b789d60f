"""What is in the wheel, and what an import costs."""

from __future__ import annotations

import json
import os
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import specplug

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = {
    "specplug": "specplug",
    "backends": "specplug.backends",
    "proposers": "specplug.proposers",
}
HEAVY = ["torch", "vllm", "transformers", "numba", "tensorrt_llm", "llama_cpp", "scipy"]


def packages_on_disk():
    for top, package in MAPPED.items():
        for folder, _, files in os.walk(ROOT / top):  # does not follow the links
            if "__init__.py" in files:
                inner = Path(folder).relative_to(ROOT / top).parts
                yield ".".join([package, *inner])


def test_the_package_list_names_every_package():
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(packages_on_disk())


def test_no_module_lies_outside_a_package():
    for top in MAPPED:
        for folder, _, files in os.walk(ROOT / top):
            if any(file.endswith(".py") for file in files):
                assert "__init__.py" in files, folder


def test_the_top_folders_are_mapped():
    mapping = {
        name: str(Path(f)) for name, f in PYPROJECT["tool"]["setuptools"]["package-dir"].items()
    }
    assert mapping == {package: top for top, package in MAPPED.items()}


@pytest.mark.parametrize("name", ["backends", "proposers"])
def test_the_links_are_relative_and_point_at_the_folders(name):
    link = ROOT / "specplug" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name


def test_the_built_in_proposers_are_registered_as_a_third_partys_are():
    declared = PYPROJECT["project"]["entry-points"]["specplug"]
    manager = specplug.PluginManager(block=[])
    found = {}
    for package, folder, registered in (
        ("specplug.proposers", ROOT / "proposers", manager),
        ("specplug.lengths", ROOT / "specplug" / "lengths", manager.length_policies),
    ):
        names = [path.stem for path in folder.glob("[a-z]*.py")]
        specs = {one.spec.name: one.spec for one in registered}
        for name in names:
            found[name] = f"{package}.{name}:SPEC"
            assert specs[name].summary
            assert specs[name].factory.startswith(f"{package}.{name}:")
    assert found == declared


def test_the_version_is_one():
    assert specplug.__version__ == PYPROJECT["project"]["version"] == metadata.version("specplug")


def test_public_names_exist_and_are_sorted():
    assert sorted(specplug.__all__) == specplug.__all__
    assert all(hasattr(specplug, name) for name in specplug.__all__)


@pytest.mark.parametrize(
    "module",
    ["specplug", "specplug.vllm", "specplug.backends.vllm.plugin", "specplug.proposers.ngram"],
)
def test_importing_loads_nothing_heavy(run_python, module):
    loaded = json.loads(
        run_python(f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))")
    )
    assert module in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)


def test_discovery_loads_nothing_heavy(run_python):
    loaded = json.loads(
        run_python(
            "import sys, json, specplug\n"
            "specplug.PluginManager(block=[]).get('ngram')\n"
            "print(json.dumps(sorted(sys.modules)))"
        )
    )
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)


def test_the_core_imports_no_backend_and_no_proposer(run_python):
    loaded = json.loads(
        run_python("import sys, json, specplug; print(json.dumps(list(sys.modules)))")
    )
    assert not [name for name in loaded if name.startswith(("specplug.back", "specplug.proposers"))]


@pytest.mark.parametrize("top", ["backends", "proposers"])
def test_no_scripts_and_no_tests_lie_beside_the_engine_modules(top):
    """``backends/vllm`` would shadow the real vLLM for a script that is run beside it."""
    for path in (ROOT / top).rglob("*.py"):
        text = path.read_text()
        assert not path.name.startswith(("test_", "conftest")), path
        assert "if __name__" not in text, path
        assert path.name != "__main__.py", path
        assert not text.startswith("#!"), path
        assert not path.stat().st_mode & 0o111, path
