"""What a user gets wrong is refused at start-up, in words; what a proposer gets wrong is not."""

import pytest
from harness import RUNNER
from testproposers import Switch


@pytest.mark.parametrize(
    ("proposer", "k", "settings", "words"),
    [
        ("ngrm", 4, {}, ["unknown-proposer", "no proposer 'ngrm'", "'ngram'", "prompt_lookup"]),
        ("ngram", 4, {"options": {"mn_n": 3}}, ["bad-option", "'mn_n'", "min_n: int = 2"]),
        ("ngram", 4, {"options": {"min_n": "two"}}, ["bad-option", "'two'", "type int"]),
        ("ngram", 4, {"options": {"min_n": 6}}, ["min_n (6) must not be above max_n (5)"]),
        ("ngram", 4, {"min_n": 3}, ["bad-option", "unknown option 'min_n'", "options: dict"]),
        ("ngram", 129, {}, ["num_speculative_tokens is 129", "1 to 128"]),
        ("ngram", 0, {}, ["num_speculative_tokens"]),
    ],
)
def test_bad_input_is_refused_in_words(start, tiny_model, proposer, k, settings, words):
    with pytest.raises(Exception) as caught:
        start(tiny_model, proposer, k, settings)
    said = str(caught.value)
    for word in words:
        assert word in said


def test_k_at_the_models_length_is_refused(start, tiny_model):
    with pytest.raises(Exception, match="is 40; it must be a whole number from 1 to 39"):
        start(tiny_model, "ngram", 40, max_model_len=40)


def test_pipeline_parallelism_is_refused(start, tiny_model):
    with pytest.raises(Exception) as caught:
        start(tiny_model, "ngram", pipeline_parallel_size=2, distributed_executor_backend="mp")
    for word in ("bad-option", "pipeline_parallel_size is 2", "tensor or data parallelism"):
        assert word in str(caught.value)


@pytest.mark.skipif(RUNNER != "v1", reason="where V2 can be used, forcing it is no mistake")
def test_v2_by_force_is_refused_where_it_cannot_be(start, tiny_model):
    with pytest.raises(Exception, match="V2 requires Triton"):
        start(tiny_model, "ngram", 4, {"runner": "v2"})


@pytest.mark.parametrize("version", ["0.21.3", "0.99.0", "1.0.0", "dev"])
def test_an_unknown_vllm_is_refused(start, tiny_model, monkeypatch, version):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(Exception) as caught:
        start(tiny_model, "ngram")
    for word in ("unsupported-engine", version, "0.22 to 0.33", "allow_untested_engine"):
        assert word in str(caught.value)


def test_a_changed_signature_is_refused(start, tiny_model, monkeypatch):
    if RUNNER == "v1":
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        name = "_update_states"
    else:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        name = "add_requests"

    def changed(self, batch, scheduler_output): ...

    monkeypatch.setattr(GPUModelRunner, name, changed)
    with pytest.raises(Exception) as caught:
        start(tiny_model, "ngram")
    for word in (f"{name}: expected (self, scheduler_output, …)", "self, batch, scheduler_output"):
        assert word in str(caught.value)
    assert getattr(GPUModelRunner, name) is changed, "nothing is wrapped when refused"


def test_a_proposer_that_only_fails_is_switched_off(start, tiny_model, caplog):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, engine = start(tiny_model), start(tiny_model, "raising", 4)
    outputs = engine.generate(["x", "y"], params)

    assert [o.tokens for o in outputs] == [o.tokens for o in plain.generate(["x", "y"], params)]
    counters = engine.runtime.counters
    assert counters.switched_off
    assert counters.num_propose_calls == engine.runtime.settings.max_consecutive_faults == 10
    messages = [record.getMessage() for record in caplog.records]
    assert sum("propose raised IndexError" in message for message in messages) == 1
    assert sum("is switched off" in message for message in messages) == 1
    assert engine.runtime.num_requests == engine.runtime.proposer.usage().num_requests == 0


@pytest.mark.parametrize("method", ["begin", "step"])
def test_a_fault_of_specplug_itself_ends_no_engine(start, tiny_model, monkeypatch, caplog, method):
    from vllm import SamplingParams

    from specplug import Runtime

    def broken(*arguments):
        raise KeyError("a bug")

    engine = start(tiny_model, "ngram")
    monkeypatch.setattr(Runtime, method, broken)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    outputs = engine.generate(["x", "y", "z"], params)

    assert [len(output.tokens) for output in outputs] == [10] * 3
    told = [record.getMessage() for record in caplog.records]
    assert sum("specplug failed and drafts no more" in message for message in told) == 1


@pytest.mark.skipif(RUNNER != "v1", reason="vLLM's own custom_class runs on V1 only")
def test_without_specplug_the_same_failure_ends_the_engine(start, tiny_model):
    """The contrast: vLLM does not guard a custom proposer."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(tiny_model), dtype="float32", max_model_len=64, enforce_eager=True,
        speculative_config={"model": "bare.Raising", "num_speculative_tokens": 2},
    )  # fmt: skip
    with pytest.raises(IndexError):
        llm.generate(["x"], SamplingParams(max_tokens=5), use_tqdm=False)


def test_the_tokenizer_is_there_for_the_asking(start, tiny_model):
    start(tiny_model, "switch")
    tokenizer = Switch.engine.load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("the same text")) == "the same text"


def test_k_that_the_scheduler_lowers_is_honoured(start, tiny_model):
    """vLLM can lower K as the batch grows: 3 for one request, none from two on."""
    from testproposers import Random
    from vllm import SamplingParams

    engine = start(
        tiny_model, "switch", 3,
        speculative_config={"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 0]]},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for prompts, drafted in ((["x"], True), (["x", "y", "z"], False)):
        Switch.to(Random)
        engine.reset_counters()
        engine.generate(prompts, params)
        assert (engine.runtime.counters.num_draft_tokens > 0) is drafted
