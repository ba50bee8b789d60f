"""The function that vLLM calls in every process: whatever is wrong, it must not raise."""

from __future__ import annotations

import logging
import sys
from importlib import metadata

import pytest

from specplug.backends.vllm import plugin


def entry_point():
    (entry,) = metadata.entry_points(group="vllm.general_plugins", name="specplug")
    return entry


def test_the_entry_point_is_the_function():
    assert entry_point().load() is plugin.register


def test_it_may_be_called_twice_and_names_what_is_installed(caplog):
    caplog.set_level(logging.DEBUG, "vllm.specplug")
    assert plugin.register() is None
    assert plugin.register() is None
    assert len(caplog.records) == 2
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
    assert "ngram" in caplog.text
    assert "specplug.vllm.<proposer>" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no metadata"), KeyError("x"), OSError()])
def test_it_does_not_raise_when_the_metadata_cannot_be_read(monkeypatch, caplog, error):
    def fail(**_):
        raise error

    monkeypatch.setattr(metadata, "entry_points", fail)
    plugin.register()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_it_imports_no_plugin(install, caplog):
    caplog.set_level(logging.DEBUG, "vllm.specplug")
    install(
        "bomb", entries={"bomb": "bomb_m:SPEC"}, bomb_m="raise SystemExit('a plugin was imported')"
    )
    plugin.register()
    assert "bomb" in caplog.text
    assert "bomb_m" not in sys.modules


def test_it_touches_no_engine_and_works_without_one(run_python):
    printed = run_python(
        """
import sys
blocked = ["vllm", "torch", "numba", "transformers"]
sys.modules.update(dict.fromkeys(blocked))  # importing one of them now raises
from importlib import metadata
(entry,) = metadata.entry_points(group="vllm.general_plugins", name="specplug")
register = entry.load()
before = set(sys.modules)
register()
register()
print(sorted(name for name in set(sys.modules) - before if name.startswith("specplug")))
print([sys.modules[name] for name in blocked])
"""
    )
    assert printed == "[]\n[None, None, None, None]"


@pytest.mark.parametrize("missing", ["pluggy", "pydantic", "numpy"])
def test_without_a_dependency_loading_is_an_import_error(run_python, missing):
    """vLLM guards the loading of its plugins, not the call: it must fail there."""
    printed = run_python(
        f"""
import sys
sys.modules["{missing}"] = None
from importlib import metadata
(entry,) = metadata.entry_points(group="vllm.general_plugins", name="specplug")
try:
    entry.load()
except ImportError as error:
    print("{missing}" in str(error))
"""
    )
    assert printed == "True"


def test_it_changes_nothing():
    """Installed but not selected: no class of the engine is wrapped, no handler added."""
    root = logging.getLogger()
    ours = logging.getLogger("specplug")
    before = (list(root.handlers), list(ours.handlers), ours.level, ours.propagate)
    plugin.register()
    assert (list(root.handlers), list(ours.handlers), ours.level, ours.propagate) == before
