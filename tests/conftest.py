"""Helpers that several test files share: small factories, handed out as fixtures.

The factories keep no state, so they are session-scoped and can be used inside ``@given``.
"""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from rich.console import Console

from specplug import Batch, EngineInfo, PluginManager, ProposerSpec, Runtime, installed
from specplug.bench import command, engines, methods
from specplug.config import Settings
from specplug.lengths.fixed import SPEC as FIXED

ROOT = Path(__file__).parent.parent

# A busy machine is no reason to fail.
hypothesis_settings.register_profile("specplug", deadline=None)
hypothesis_settings.load_profile("specplug")


def _make_engine(**changes):
    standard = {
        "backend": "test",
        "vocab_size": 100,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "num_speculative_tokens": 4,
    }
    return EngineInfo(**standard | changes)


def _make_runtime(proposer, *plugins, engine=None, settings=None, **spec):
    """Return a runtime that drives ``proposer`` (an object), with the hooks of ``plugins``."""
    manager = PluginManager(discover=False)
    manager.add(FIXED)
    manager.add(ProposerSpec(name="tested", factory=lambda _: proposer, **spec))
    for plugin in plugins:
        manager.add(plugin)
    settings = {"length_policy": "fixed"} | (settings or {})
    return Runtime("tested", engine or _make_engine(), Settings(**settings), manager)


def _make_batch(texts, limits=None, *, slots=None, rows=None, new=None, prompts=None):
    """Return a batch of token lists; by default each is new, and all of it is prompt."""
    n = len(texts)
    rows = list(range(n)) if rows is None else rows
    sizes = [len(text) for text in texts]

    def column(values):
        return np.array(values, np.int32).reshape(n)

    token_ids = np.full((max(rows, default=0) + 1, max(sizes, default=1)), 99, np.int32)
    for row, text in zip(rows, texts, strict=True):
        token_ids[row, : len(text)] = text
    token_ids.flags.writeable = False
    return Batch(
        request_ids=[f"r{i}" for i in range(n)],
        slots=column(range(n) if slots is None else slots),
        token_ids=token_ids,
        rows=column(rows),
        num_tokens=column(sizes),
        num_new_tokens=column(sizes if new is None else new),
        num_prompt_tokens=column(sizes if prompts is None else prompts),
        max_draft_tokens=column([4] * n if limits is None else limits),
    )


@pytest.fixture(scope="session")
def make_engine():
    return _make_engine


@pytest.fixture(scope="session")
def make_runtime():
    return _make_runtime


@pytest.fixture(scope="session")
def make_batch():
    return _make_batch


@pytest.fixture(scope="session")
def run_python():
    """Run code in a fresh interpreter, from the repository's root; returns what it printed."""

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Fabricate an installed distribution: its metadata, entry points and modules."""
    made: set[str] = set()

    def make(name, version="1.0", *, entries, group="specplug", **modules):
        folder = tmp_path / name
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"[{group}]", *(f"{entry} = {target}" for entry, target in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
            made.add(module)
            sys.modules.pop(module, None)
        if str(folder) not in sys.path:
            monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()

    yield make
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def plugins_left_out(install, monkeypatch):
    """Two plugins that claim the same name, a broken one and a blocked one."""
    spec = "from specplug import ProposerSpec\nSPEC = ProposerSpec(name='twice', factory='x:y')\n"
    install("first", entries={"twice": "first_module:SPEC"}, first_module=spec)
    install("second", entries={"twice": "second_module:SPEC"}, second_module=spec)
    install("broken", entries={"entry": "broken_module:SPEC"}, broken_module="1 / 0 #[bold]")
    install("unwanted", entries={"entry": "nowhere:SPEC"})
    monkeypatch.setenv("SPECPLUG_BLOCK", "unwanted")


@pytest.fixture(scope="session")
def trtllm_model(tmp_path_factory):
    """A checkpoint's folder, as far as its config, for the double of TensorRT-LLM."""
    pytest.importorskip("transformers", reason="transformers is not installed: make setup-dev")
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "vocab_size": 24, "max_position_embeddings": 200_000}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_console():
    """Make consoles that are wide and keep what is printed in their ``file``."""
    return lambda: Console(width=200, file=io.StringIO())


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Install the engine of ``played_bench.py`` as ``played``; list what its processes got."""
    log = tmp_path / "play.log"
    log.touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PLAY_LOG", str(log))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(installed.ENGINES, "played", ("played",))
    monkeypatch.setitem(methods.IMPORTED_AS, "played", "played_bench")
    for module in (methods, command):
        monkeypatch.setattr(module, "module_of", lambda engine: f"{engine}_bench")
    monkeypatch.setattr(engines, "engine_environment", lambda: {"HF_HUB_OFFLINE": "1"})
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
