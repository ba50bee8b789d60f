"""The acceptance script for GPUs, on the double: it says PASS only for equal texts."""

from __future__ import annotations

import importlib

import pytest
import typer
from trtllm_double import GENERATIONS, Executor, install
from typer.testing import CliRunner


@pytest.fixture(params=GENERATIONS)
def accept(request, monkeypatch, trtllm_model):
    """Run the script; returns its status and its only line."""
    module = install(request.param, monkeypatch)
    monkeypatch.setattr(module.LLM, "single_process", True)
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    app = typer.Typer()
    app.command()(importlib.import_module("scripts.trtllm_acceptance").main)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(trtllm_model), *arguments])
        [line] = result.stdout.splitlines()
        return result.exit_code, line

    return run


def test_equal_texts_pass(accept):
    status, line = accept("--proposer", "ngram", "--num-speculative-tokens", "4")
    assert status == 0
    assert line.startswith("PASS: TensorRT-LLM 1.")
    assert "ngram, K 4: 7 of 7 texts equal (7 without speculation twice)" in line
    assert " 0 faults" in line
    assert ", 0 accepted" not in line


def test_another_text_fails(accept, monkeypatch):
    verify = Executor._verify

    def wrong(self, request):
        verify(self, request)
        request.tokens[-1] = 0

    monkeypatch.setattr(Executor, "_verify", wrong)
    status, line = accept("--rounds", "1")
    assert status == 1
    assert line.startswith("FAIL")
