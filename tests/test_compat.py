"""What is checked of vLLM before it is touched: names, parameters, fields, releases."""

from __future__ import annotations

import sys
import types
from functools import partial

import pytest

from specplug import compat
from specplug.backends.vllm.compat import OLDEST_V2, RELEASES
from specplug.compat import Hook
from specplug.errors import EngineSupportError

SOURCE = """
class Runner:
    step: int
    plan: "list[int]" = ()

    def __init__(self, config, *, device): ...

    @property
    def ready(self): ...

    def sample(self, logits, metadata=None, *more): ...

def make(config, device, state=None): ...
"""


@pytest.fixture(params=["source", "live"])
def look(request, tmp_path, monkeypatch):
    """Both ways of looking, at the same code."""
    if request.param == "source":
        (tmp_path / "m.py").write_text(SOURCE)
        return partial(compat.in_source, source=lambda module: tmp_path / f"{module}.py")
    module = types.ModuleType("m")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "m", module)
    return compat.live


@pytest.mark.parametrize(
    "hook",
    [
        Hook("m", "make", ("config", "device")),
        Hook("m", "make", ("config", "device", "state")),
        Hook("m", "Runner.sample", ("self", "logits")),
        Hook("m", "Runner.ready", ("self",)),
        Hook("m", "Runner", fields=("step", "plan")),
    ],
    ids=str,
)
def test_what_is_as_expected(look, hook):
    assert look(hook) is None


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (Hook("m", "make", ("device", "config")), "(config, device, state)"),
        (Hook("m", "make", ("config", "device", "state", "more")), "(config, device, state)"),
        (Hook("m", "Runner.step", ("self",)), "nothing of that name"),
        (Hook("m", "Runner.missing", ("self",)), "nothing of that name"),
        (Hook("m", "Missing.sample", ("self",)), "nothing of that name"),
        (Hook("m", "Runner", fields=("step", "rows", "plans")), "no field rows, plans"),
    ],
    ids=str,
)
def test_what_differs_is_said(look, hook, found):
    assert look(hook) == found
    assert compat.mismatches([hook], look) == [(hook, found)]


def test_a_module_that_is_not_there(look):
    assert look(Hook("nowhere_at_all", "make", ("config",))) in (
        "no such module",
        "nothing of that name",
    )


def test_looking_at_sources_imports_nothing_but_packages(tmp_path, monkeypatch):
    (tmp_path / "bomb").mkdir()
    (tmp_path / "bomb" / "__init__.py").write_text("")
    (tmp_path / "bomb" / "inner.py").write_text("def make(config): ...\nraise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert compat.in_source(Hook("bomb.inner", "make", ("config",))) is None
    assert "bomb.inner" not in sys.modules
    assert compat.in_source(Hook("no.such", "make", ("config",))) == "no such module"


def test_a_mismatch_is_refused_in_words(monkeypatch):
    module = types.ModuleType("m")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "m", module)
    RELEASES.check_hooks([Hook("m", "make", ("config",))])
    with pytest.raises(EngineSupportError) as caught:
        RELEASES.check_hooks([Hook("m", "make", ("config",)), Hook("m", "make", ("device",))])
    for words in ("m.make", "expected (device, …)", "found (config, device, state)", "upgrade"):
        assert words in str(caught.value)


@pytest.mark.parametrize("version", ["0.22.0", "0.22.1", "0.32.0", "0.33.1+cu130", "0.28.0rc1"])
def test_supported_releases(version):
    assert RELEASES.supports(version)
    RELEASES.check(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.21.9", "0.34.0", "1.22", "dev", ""])
def test_other_releases_are_refused_unless_wanted(version):
    assert not RELEASES.supports(version)
    with pytest.raises(EngineSupportError, match=r"0\.22 to 0\.33"):
        RELEASES.check(version, allow_untested=False)
    RELEASES.check(version, allow_untested=True)


def test_v2_begins_later():
    assert not RELEASES.supports("0.27.3", OLDEST_V2)
    assert RELEASES.supports("0.28.0", OLDEST_V2)
