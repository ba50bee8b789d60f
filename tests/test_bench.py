"""What ``specplug bench`` computes from what was measured: units, cells, intervals, verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug.bench import grids, pages
from specplug.bench.cells import ALL, cells, unsteadiness
from specplug.bench.chart import chart
from specplug.bench.methods import NO_SPECULATION, Method
from specplug.bench.samples import Output, Sample, Turn
from specplug.bench.statistics import Interval, ratio, weighted_quantile
from specplug.bench.verdict import Finding, find, verdicts
from specplug.bench.work import Prompt, units

PROMPTS = [Prompt("edit", "code", "…", 10), Prompt("tale", "story", "…", 10)]
UNITS = units(PROMPTS, [1])
METHODS = [
    Method(NO_SPECULATION),
    Method("fast", {"k": 4}, "--fast", "ngram", 4),
]


def answered(method, seconds, *, tokens=9, per_step=1, first=0.1, text=7, **counts):
    """One answer of ``tokens`` tokens: the first at its time, the others evenly after it."""
    steps = -(-(tokens - 1) // per_step)
    arrivals = [(first * seconds, 1)]
    for step in range(steps):
        time = seconds * (first + (1 - first) * (step + 1) / steps)
        arrivals.append((time, min(per_step, tokens - 1 - step * per_step)))
    return Sample(method, seconds, [Output([text] * tokens, arrivals)], counts, {"host": 10**9})


def turns(edit, tale, plain=(4.0, 4.0), **changes):
    """Rounds of both prompts: the seconds of ``fast`` next to those of no speculation."""
    return [
        Turn(
            number,
            unit.key,
            [answered(NO_SPECULATION, slow), answered("fast", seconds, **changes)],
        )
        for unit, rounds in zip(UNITS, (edit, tale), strict=True)
        for number, (seconds, slow) in enumerate(zip(rounds, plain, strict=True))
    ]


def by_place(found):
    return {(cell.workload, cell.method): cell for cell in found}


# -- units -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 9))
def test_every_prompt_is_in_a_full_batch_of_its_own_workload(workloads, size):
    prompts = [Prompt(str(i), name, "…", 1) for i, name in enumerate(workloads)]
    made = units(prompts, [size])
    assert {prompt for unit in made for prompt in unit.prompts} == set(range(len(prompts)))
    assert len({unit.key for unit in made}) == len(made)
    for unit in made:
        assert len(unit.prompts) == size
        assert {prompts[i].workload for i in unit.prompts} == {unit.workload}


def test_a_prompt_that_fills_up_a_batch_drafts_from_no_other_answer_to_it():
    [unit] = units(PROMPTS[:1], [3])
    assert len(set(unit.namespaces(0))) == 3
    assert not set(unit.namespaces(0)) & set(unit.namespaces(1))


# -- statistics ------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_rounds_then_the_geometric_mean():
    found = ratio([[2.0, 2.0, 9.0], [0.5, 0.5, 0.1]])
    assert found.value == pytest.approx(1.0)
    assert found.low < 1 < found.high
    once = ratio([[1.5]])
    assert once.value == pytest.approx(1.5)
    assert isnan(once.low)
    assert isnan(once.high)
    assert ratio([[1.5, 1.5], [1.5, 1.5]]) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        found = ratio(np.exp(rng.normal(0.2, 0.1, (8, 3))).tolist())
        held += found.low <= np.exp(0.2) <= found.high
    assert held >= 88


def test_a_quantile_counts_weights():
    assert weighted_quantile([3.0, 1.0, 2.0], [1, 98, 1], 0.5) == 1.0
    assert weighted_quantile([3.0, 1.0, 2.0], [1, 98, 1], 0.99) == 2.0
    assert isnan(weighted_quantile([], [], 0.5))


# -- cells -----------------------------------------------------------------------------------


def test_cells_hold_what_the_samples_say():
    counts = {
        "num_drafts": 2,
        "num_draft_tokens": 10,
        "num_accepted_tokens": 5,
        "propose_seconds": 0.2,
    }
    measured = turns(edit=[2.0, 2.0], tale=[8.0, 8.0], per_step=2, **counts)
    found = by_place(cells(measured, UNITS))
    assert list(dict.fromkeys(workload for workload, _ in found)) == [ALL, "code", "story"]
    assert found["code", "fast"].ratio.value == pytest.approx(2.0)
    assert found["story", "fast"].ratio.value == pytest.approx(0.5)
    assert found[ALL, "fast"].ratio.value == pytest.approx(1.0)
    fast, plain = found["code", "fast"], found["code", NO_SPECULATION]
    assert fast.tokens_per_second == pytest.approx(9 / 2)
    assert fast.acceptance_rate == pytest.approx(0.5)
    assert fast.mean_acceptance_length == pytest.approx(3.5)
    assert fast.tokens_per_step == pytest.approx(2)
    assert plain.tokens_per_step == pytest.approx(1)
    assert fast.drafting_share == pytest.approx(0.1)
    # 4 steps in 1.8 s, without the 0.2 s of drafting.
    assert fast.step_seconds == pytest.approx((1.8 - 0.2) / 4)
    assert fast.prefill_share == pytest.approx(0.1)
    assert fast.first_token_seconds == pytest.approx(0.2)
    assert fast.token_seconds_p50 == pytest.approx(1.8 / 4 / 2)
    assert (fast.peak_bytes, fast.peak_device_bytes) == (10**9, None)
    assert isnan(plain.acceptance_rate)


def test_one_differing_answer_is_counted():
    measured = turns(edit=[2.0, 2.0], tale=[2.0, 2.0])
    measured[1].samples[1].outputs[0].token_ids[-1] = 99
    found = by_place(cells(measured, UNITS))
    fast = found["code", "fast"]
    assert (fast.num_identical, fast.num_outputs, fast.identical) == (1, 2, False)
    assert found["story", "fast"].identical
    assert found["code", NO_SPECULATION].identical


def test_a_busy_machine_is_noticed_by_no_speculation_alone():
    assert unsteadiness(turns([1, 9], [1, 9])) == 1
    assert unsteadiness(turns([1, 1], [1, 1], plain=[2.0, 5.0])) == pytest.approx(2.5)


# -- verdicts --------------------------------------------------------------------------------


def cell(method, **changes):
    measured = [
        Turn(0, UNITS[0].key, [answered(NO_SPECULATION, 4.0), answered("fast", 4.0, per_step=2)])
    ]
    found = by_place(cells(measured, UNITS[:1]))["code", method]
    return replace(found, **changes)


def chances(value, low, high):
    return Interval(value, low, high)


@pytest.mark.parametrize(
    ("finding", "plain", "best", "said"),
    [
        (Finding.KEEP, {}, {"ratio": chances(1.4, 1.2, 1.6)}, "Keep it: fast with K=4, 1.40x"),
        (Finding.UNCLEAR, {}, {"ratio": chances(1.1, 0.9, 1.3)}, "which may be chance"),
        (
            Finding.PROMPT_BOUND,
            {"prefill_share": 0.8},
            {"ratio": chances(0.9, 0.8, 1.0)},
            "1.25x at the very most",
        ),
        (
            Finding.DRAFT_TOO_SLOW,
            {},
            {"ratio": chances(0.8, 0.7, 0.9), "drafting_share": 0.3},
            "30% of the time is spent drafting. Try `suffix`",
        ),
        (
            Finding.LOW_ACCEPTANCE,
            {},
            {"ratio": chances(0.9, 0.8, 1.0), "tokens_per_step": 1.05, "acceptance_rate": 0.02},
            "A step brings 1.05 tokens, 2% of drafts accepted. Try `suffix`",
        ),
        (
            Finding.COMPUTE_BOUND,
            {"step_seconds": 1.0},
            {"ratio": chances(0.9, 0.8, 1.0), "step_seconds": 2.5},
            "takes 2.50 times as long. Try fewer draft tokens (K = 2)",
        ),
    ],
)
def test_a_verdict_says_why(finding, plain, best, said):
    pair = [cell(NO_SPECULATION, **plain), cell("fast", **best)]
    assert find(*pair) is finding
    [verdict] = verdicts(pair, METHODS)
    assert verdict.finding is finding
    assert said in verdict.text
    assert verdict.flags == ("--fast" if finding is Finding.KEEP else "")


def test_the_best_of_the_clear_gains_is_advised():
    methods = [*METHODS, Method("chancy", {}, "--chancy", "suffix", 4)]
    compared = [
        cell(NO_SPECULATION),
        cell("fast", ratio=chances(1.2, 1.1, 1.3)),
        replace(cell("fast", ratio=chances(1.5, 0.9, 2.0)), method="chancy"),
    ]
    [verdict] = verdicts(compared, methods)
    assert verdict.method == "fast"


def test_a_verdict_does_not_hide_other_texts():
    wrong = cell("fast", ratio=chances(2.0, 1.9, 2.1), num_outputs=4, num_identical=3)
    [verdict] = verdicts([cell(NO_SPECULATION), wrong], METHODS)
    assert "BUT 1 of 4 texts differ" in verdict.text


# -- what people get -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    found = cells(turns([2.0, 2.1], [8.0, 8.1], per_step=2, num_drafts=0), UNITS)
    configuration = {"engine": "played", "model": "<tiny>", "prompts": ["code: edit"]}
    return pages.Report(configuration, found, verdicts(found, METHODS), ["Watch out."])


def test_tables_show_a_row_per_method_and_a_column_per_workload(report):
    grid = grids.ratios(report.cells, 1)
    assert grid.columns == ["method", ALL, "code", "story"]
    assert [row[0] for row in grid.rows] == [NO_SPECULATION, "fast"]
    assert grid.rows[0][1:] == ["1.00x"] * 3
    assert grid.rows[1][2].startswith("1.95x (")
    detail = dict(zip(("method", *grids.DETAILS), grids.details(report.cells, 1, "code").rows[1],
                      strict=True))  # fmt: skip
    assert detail["acceptance rate"] == "-"
    assert detail["peak memory"] == "1.00 GB"
    assert detail["same text"] == "2/2"


def test_json_has_null_where_there_is_no_number(report):
    found = json.loads(json.dumps(pages.as_json(report), allow_nan=False))
    fast = next(one for one in found["cells"] if one["method"] == "fast")
    assert fast["acceptance_rate"] is None
    assert set(fast["ratio"]) == {"value", "low", "high"}
    assert len(found["verdicts"]) == 3


def test_pages_say_everything_and_the_html_page_stands_alone(report, tmp_path):
    pytest.importorskip("matplotlib", reason="make setup-dev installs matplotlib")
    pages.write(report, tmp_path, chart(report.cells))
    markdown = (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    html = (tmp_path / "report.html").read_text()
    for verdict in report.verdicts:
        assert verdict.text in markdown
    for text in (markdown, html):
        assert "Watch out." in text
        assert "--fast" in text
    assert "&lt;tiny&gt;" in html
    assert "data:image/png;base64," in html
    assert "http" not in html
    assert 'src="report.png"' not in html


def test_a_level_speed_has_the_geometric_mean_of_its_workloads():
    found = by_place(cells(turns([2.0, 2.0], [5.0, 5.0]), UNITS))
    assert found[ALL, "fast"].ratio.value == pytest.approx(sqrt(2 * 0.8))
