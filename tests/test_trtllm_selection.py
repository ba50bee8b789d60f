"""How proposers are named to TensorRT-LLM: what is refused at once, what travels to workers."""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import re
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from trtllm_double import GENERATIONS, VOCAB_SIZE, UserProvidedDecodingConfig, install

import specplug
import specplug.trtllm
from specplug.costs import StepClock
from specplug.errors import (
    CapabilityError,
    EngineSupportError,
    OptionError,
    PluginError,
    UnknownProposerError,
)
from specplug.proposer import Capability, Proposer, ProposerSpec


class Nothing(Proposer):
    """Never drafts."""

    def propose(self, batch):
        return [[]] * len(batch)


@pytest.fixture(params=GENERATIONS)
def generation(request):
    return request.param


@pytest.fixture
def engine(generation, monkeypatch):
    return install(generation, monkeypatch)


@pytest.fixture(autouse=True)
def what_steps_cost(monkeypatch):
    """Keep the default length policy from learning that drafts do not pay: in Python they don't."""
    monkeypatch.setattr(StepClock, "count_step", lambda *_: None)


@pytest.fixture
def newest(monkeypatch):
    return install("F", monkeypatch)


def configured(proposer="suffix", k=4, **more):
    return specplug.trtllm.speculative_config(proposer, num_speculative_tokens=k, **more)


# -- what travels ---------------------------------------------------------------------------


def test_the_engines_own_config_comes_back(engine):
    config = configured("ngram", 5, max_n=3)
    assert type(config) is UserProvidedDecodingConfig
    assert config.max_draft_len == 5
    assert config.drafter.adapter.settings.options == {"max_n": 3}


def test_pickles_are_small_and_keep_the_pair_together(engine, trtllm_model):
    llm = engine.LLM(str(trtllm_model), speculative_config=configured(), tensor_parallel_size=2)
    assert len(llm.pickled) < 10_000
    executor = llm.executor(0)
    executor.add(list(range(20)) * 200, 30)
    executor.run()
    again = pickle.dumps(llm.ranks[0])
    assert len(again) < 10_000  # with an index of 4000 tokens in the process
    for rank in llm.ranks:
        assert rank.drafter.adapter is rank.resource_manager.adapter
        assert rank.drafter.adapter.deployment.vocab_size == VOCAB_SIZE


def test_a_function_of_an_importable_module_travels(newest, trtllm_model, tmp_path, monkeypatch):
    (tmp_path / "own_proposers.py").write_text(
        textwrap.dedent(
            """
            import specplug

            @specplug.proposer(name="last_again")
            def last_again(tokens, max_tokens):
                return [int(tokens[-1])] * max_tokens
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("own_proposers").last_again
    llm = newest.LLM(str(trtllm_model), speculative_config=configured(function))
    executor = llm.executor()
    request = executor.add([5, 6], 20)
    executor.run()
    assert request.output == executor.target.text([5, 6], 20)
    assert executor.num_drafted > 0


def defined_in_the_script():
    """Return proposers that workers, other processes, would look for in vain."""

    @specplug.proposer(name="inner")
    def inner(tokens, max_tokens):
        return []

    class OfTheScript(Nothing):
        def __init__(self, _options):
            pass

    OfTheScript.__module__, OfTheScript.__qualname__ = "__main__", "OfTheScript"
    return {
        "a function in a function": inner,
        "a lambda": ProposerSpec("nothing", lambda _options: Nothing()),
        "a class of the script": ProposerSpec("nothing", OfTheScript),
    }


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("a function in a function", "inner is a lambda or defined in a function"),
        ("a lambda", "is a lambda or defined in a function"),
        ("a class of the script", "OfTheScript is defined in the script that is run"),
    ],
)
def test_what_cannot_travel_is_refused_when_pickled(newest, trtllm_model, which, reason):
    config = configured(defined_in_the_script()[which])
    with pytest.raises(PluginError, match="cannot travel") as caught:
        newest.LLM(str(trtllm_model), speculative_config=config)
    assert reason in str(caught.value)
    assert "entry point" in caught.value.hint


def test_in_one_process_anything_goes(newest, trtllm_model, monkeypatch):
    monkeypatch.setattr(newest.LLM, "single_process", True)
    config = configured(defined_in_the_script()["a lambda"])
    executor = newest.LLM(str(trtllm_model), speculative_config=config).executor()
    request = executor.add([5, 6], 20)
    executor.run()
    assert request.output == executor.target.text([5, 6], 20)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, None, "4", 2.0, True])
def test_a_wrong_k(engine, k):
    with pytest.raises(OptionError, match="num_speculative_tokens is") as caught:
        configured(k=k)
    assert "max_draft_len" in caught.value.hint


def test_a_wrong_name_option_setting_or_thing(newest):
    with pytest.raises(UnknownProposerError, match="Did you mean 'suffix'"):
        configured("sufix")
    with pytest.raises(OptionError, match="unknown option 'max_nn'"):
        configured("ngram", max_nn=3)
    with pytest.raises(OptionError, match="settings of specplug: unknown option 'runner'"):
        configured(settings={"runner": "v1"})
    with pytest.raises(OptionError, match="is no proposer"):
        configured(Nothing)
    needy = ProposerSpec("needy", Nothing, needs=frozenset({Capability.LOGITS}))
    with pytest.raises(CapabilityError, match="needs logits"):
        configured(needy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"backend": "tensorrt"}, "backend is 'tensorrt'"),
    ],
)
def test_engines_that_cannot_serve_drafts(engine, trtllm_model, arguments, words):
    with pytest.raises(OptionError, match=words):
        engine.LLM(str(trtllm_model), speculative_config=configured(), **arguments)
    engine.LLM(str(trtllm_model), **arguments)  # not ours to refuse


@pytest.mark.parametrize("name", ["max_concurrency", "draft_len_schedule"])
def test_switching_by_the_engine_is_refused(engine, trtllm_model, name):
    config = configured()
    setattr(config, name, {"max_concurrency": 4, "draft_len_schedule": {1: 4}}[name])
    with pytest.raises(OptionError, match=f"{name} is set"):
        engine.LLM(str(trtllm_model), speculative_config=config)


@pytest.mark.parametrize("version", ["0.21.0", "1.4.0", "dev"])
def test_other_releases(newest, monkeypatch, version):
    monkeypatch.setattr(newest, "__version__", version)
    with pytest.raises(EngineSupportError, match=r"1\.0 to 1\.3"):
        configured()
    configured(settings={"allow_untested_engine": True})


def test_an_engine_that_differs_from_its_release(newest, monkeypatch):
    drafter = sys.modules["tensorrt_llm._torch.speculative.drafter"].Drafter
    monkeypatch.setattr(drafter, "prepare_draft_tokens", lambda self, batch: None)
    with pytest.raises(EngineSupportError, match=r"found \(self, batch\)"):
        configured()


def test_a_model_without_a_config(newest, tmp_path):
    with pytest.raises(EngineSupportError, match="cannot be read"):
        newest.LLM(str(tmp_path), speculative_config=configured())


def test_the_overlap_scheduler_and_hybrid_models_are_warned_of(
    newest, trtllm_model, tmp_path, caplog
):
    newest.LLM(str(trtllm_model), speculative_config=configured())
    assert "overlap scheduler" in caplog.text
    caplog.clear()
    hybrid = {"model_type": "mamba2", "vocab_size": 24, "state_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    newest.LLM(str(tmp_path), speculative_config=configured(), disable_overlap_scheduler=True)
    assert "hybrid" in caplog.text
    assert "overlap" not in caplog.text


def test_other_engines_are_left_alone(newest, trtllm_model, caplog):
    configured()
    theirs = UserProvidedDecodingConfig(max_draft_len=0, drafter=None)
    caplog.set_level(logging.DEBUG)
    llm = newest.LLM("no such model", "no such tokenizer", speculative_config=None, other=1)
    assert llm.kwargs == {"speculative_config": None, "other": 1}
    assert newest.LLM("m", speculative_config="ngram").kwargs == {"speculative_config": "ngram"}
    assert specplug.backends.trtllm.selection.chosen(theirs) is None
    assert not caplog.records


# -- YAML -----------------------------------------------------------------------------------

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "trtllm.md"
FILE, MAPPING = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("with_options", [False, True])
def test_the_documented_yaml_file(engine, trtllm_model, with_options, as_object):
    specplug.trtllm.accept_names()
    config = yaml.safe_load(FILE)["speculative_config"]
    if with_options:
        config |= yaml.safe_load(MAPPING)
    if as_object:  # as some releases parse it before the LLM is made
        del config["decoding_type"]
        config = UserProvidedDecodingConfig(**config)
    executor = engine.LLM(str(trtllm_model), speculative_config=config).executor()
    request = executor.add([7, 3, 1], 60)
    executor.run()
    assert request.output == executor.target.text([7, 3, 1], 60)
    assert executor.num_accepted > 0
    adapter = executor.drafter.adapter
    assert adapter.name == "suffix"
    assert adapter.settings.options == ({"min_confidence": 0.1} if with_options else {})


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("specplug:sufix", "Did you mean 'suffix'"),
        ({"specplug": "suffix", "option": {}}, "unknown keys: option"),
        ({"specplug": "ngram", "options": {"n": 1}}, "unknown option 'n'"),
    ],
)
def test_mistakes_in_a_yaml_file(newest, trtllm_model, drafter, words):
    specplug.trtllm.accept_names()
    config = {"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": drafter}
    with pytest.raises(specplug.SpecplugError, match=words):
        newest.LLM(str(trtllm_model), speculative_config=config)


def test_a_yaml_file_without_a_length(newest, trtllm_model):
    specplug.trtllm.accept_names()
    with pytest.raises(OptionError, match="num_speculative_tokens is None"):
        newest.LLM(str(trtllm_model), speculative_config={"drafter": "specplug:suffix"})


def test_importing_the_module_changes_nothing(newest):
    llm = sys.modules["tensorrt_llm.llmapi.llm"].BaseLLM
    before = llm.__init__
    importlib.reload(specplug.trtllm)
    assert llm.__init__ is before
    specplug.trtllm.accept_names()
    once = llm.__init__
    specplug.trtllm.accept_names()
    assert llm.__init__ is once is not before
