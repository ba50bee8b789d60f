"""The soak test of ``make soak``, for seconds instead of minutes."""

import pytest
from harness import RUNNER
from soak import Soak, run
from tinymodel import make_adapter


@pytest.mark.skipif(RUNNER != "v1", reason="Triton's interpreter is too slow for traffic")
def test_a_server_under_mixed_traffic(tiny_model, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", tiny_model)
    soak = Soak(minutes=1 / 3, num_clients=8, num_cases=60)

    result = run(soak, tiny_model, adapter, tmp_path, print)

    assert [check for check in result.checks if not check.passed] == []
    for sort in ("base", "adapter", "streamed", "sampled", "hung up", "wrong options"):
        assert result.counts[sort] > 0
