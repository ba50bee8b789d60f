"""Proposers that work on the device: what the runtime can check without looking at values."""

from types import SimpleNamespace

import pytest

from specplug import Capability, DeviceBatch, DeviceProposer, PluginManager, ProposerSpec
from specplug.errors import CapabilityError, OptionError, PluginError
from specplug.runtime import Arrival

K = 4
ON_DEVICE = frozenset({Capability.DEVICE_TENSORS})


def tensor(rows, columns=K, dtype="torch.int64"):
    return SimpleNamespace(dtype=dtype, shape=(rows, columns))


class OnDevice(DeviceProposer):
    def __init__(self, *results):
        self.results = list(results)
        self.batches = []

    def propose_on_device(self, batch):
        self.batches.append(batch)
        result = self.results.pop(0) if self.results else tensor(len(batch))
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def make(make_runtime, make_engine):
    def make(proposer, provides=ON_DEVICE, needs=ON_DEVICE, **settings):
        engine = make_engine(num_speculative_tokens=K, provides=provides)
        return make_runtime(proposer, engine=engine, settings=settings, needs=needs)

    return make


def batch(*ids):
    return DeviceBatch(ids, None, None, None, None, K)


def test_the_batch_reaches_the_proposer_and_its_tensor_comes_back_as_it_is(make):
    drafts = tensor(2)
    proposer = OnDevice(drafts)
    runtime = make(proposer)
    asked = batch("a", "b")
    assert runtime.step_on_device(asked) is drafts
    assert proposer.batches == [asked] and len(asked) == 2
    assert runtime.counters.num_propose_calls == 1
    assert runtime.counters.num_faults == 0


@pytest.mark.parametrize(
    "result",
    [
        tensor(1),
        tensor(2, K - 1),
        tensor(2, dtype="torch.float32"),
        None,
        [[1] * K] * 2,
        KeyError(),
    ],
    ids=["rows", "columns", "dtype", "nothing", "a list", "a raise"],
)
def test_a_wrong_result_is_a_fault_and_no_draft(make, result, caplog):
    runtime = make(OnDevice(result))
    assert runtime.step_on_device(batch("a", "b")) is None
    assert runtime.counters.num_faults == 1
    assert len(caplog.records) == 1
    assert runtime.step_on_device(batch("a", "b")) is not None


def test_one_that_only_fails_is_switched_off(make):
    proposer = OnDevice(*[ValueError("x")] * 9)
    runtime = make(proposer, max_consecutive_faults=3)
    assert [runtime.step_on_device(batch("a")) for _ in range(5)] == [None] * 5
    assert runtime.counters.switched_off
    assert len(proposer.batches) == 3


def test_the_limits_are_those_that_requests_set(make):
    runtime = make(OnDevice(), provides=ON_DEVICE | {Capability.REQUEST_OPTIONS})
    for name, wanted in (("off", 0), ("two", 2), ("many", 99)):
        arguments = {"specplug_num_speculative_tokens": wanted}
        runtime.begin(Arrival(name, [1], 50, arguments=arguments))
    runtime.begin(Arrival("plain", [1], 50))
    assert runtime.limits(["off", "plain", "two", "many", "unknown"]) == [0, K, 2, K, 0]


def test_an_engine_without_device_tensors_refuses_it(make):
    with pytest.raises(CapabilityError, match="needs device_tensors"):
        make(OnDevice(), provides=frozenset())


def test_a_spec_that_does_not_say_so_is_refused(make):
    with pytest.raises(PluginError, match="DeviceProposer, and its spec does not say"):
        make(OnDevice(), needs=frozenset())


def test_what_is_not_on_the_host_cannot_be_recorded(make, tmp_path):
    with pytest.raises(OptionError, match="record_folder is set"):
        make(OnDevice(), record_folder=tmp_path)


def test_it_can_be_no_part_of_a_proposer_that_works_on_the_host(make_engine):
    """A part would be asked for drafts on the host."""
    from specplug import Runtime

    plugins = PluginManager()
    plugins.add(ProposerSpec("on_device", lambda _: OnDevice(), needs=ON_DEVICE))
    runtime = Runtime("ngram", make_engine(provides=ON_DEVICE), plugins=plugins)
    with pytest.raises(CapabilityError, match="needs device_tensors"):
        runtime.engine.make_proposer("on_device", {})
    runtime.close()
