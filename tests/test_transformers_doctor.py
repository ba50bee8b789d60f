"""``specplug doctor --engine transformers``."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from specplug import cli
from specplug.backends.transformers import compat
from specplug.compat import Hook
from specplug.errors import EngineSupportError

pytest.importorskip("transformers", reason="make setup-dev installs transformers")


def doctor(*arguments):
    command = ["doctor", "--engine", "transformers", "--json", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command)
    checks = json.loads(result.stdout)["checks"]
    return result.exit_code, {check["name"]: check for check in checks}


def test_a_model_that_can_be_served(trtllm_model):
    status, checks = doctor(trtllm_model)
    assert status == 0
    assert checks["release"]["status"] == "ok"
    assert "(llama) is a causal language model" in checks["model"]["found"]


def test_models_that_cannot(tmp_path):
    status, checks = doctor(tmp_path)
    assert (status, checks["model"]["status"]) == (1, "problem")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    status, checks = doctor(tmp_path)
    assert status == 1
    assert "(t5) is no decoder-only model" in checks["model"]["found"]


def test_a_transformers_that_differs(monkeypatch):
    cache = "transformers.cache_utils"
    hooks = (Hook(cache, "Cache.no_such", ("self",)), Hook(cache, "Cache.crop", ("self", "length")))
    monkeypatch.setattr(compat, "HOOKS", hooks)
    status, checks = doctor()
    assert status == 1
    found = checks["release"]["found"]
    assert "Cache.no_such: expected (self, …), found nothing of that name" in found
    assert "Cache.crop: expected (self, length, …), found (self, tokens_to_remove)" in found
    with pytest.raises(EngineSupportError, match=re.escape("Cache.crop: expected (self, length")):
        compat.check_release()
