"""``specplug replay``: hand-computed measurements, and what arithmetic says they must be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from specplug import Capability, PluginManager, Proposer, ProposerSpec, RequestOptions, Usage
from specplug.cli import app
from specplug.errors import CapabilityError, OptionError, SpecplugError
from specplug.metrics import Counters
from specplug.replay.command import ReplaySettings, run_replay
from specplug.replay.records import Record, RecordError, read_records
from specplug.replay.report import as_row
from specplug.replay.run import Candidate, Result, parse_candidate, replay

KEYS = [
    "proposer",
    "options",
    "num_speculative_tokens",
    "length_policy",
    "speed",
    "tokens_per_step",
    "drafted_per_step",
    "acceptance_rate",
    "acceptance_by_position",
    "draft_share",
    "microseconds_per_proposal",
    "p99_microseconds",
    "longest_call_milliseconds",
    "state_bytes",
    "num_faults",
]


def record(prompt, output, reference=None):
    ids = np.array([*prompt, *output], np.int32)
    return Record(
        "r", ids, len(prompt), None if reference is None else np.array(reference, np.int32)
    )


class Knowing(Proposer):
    """Knows every record; drafts what follows, or always the same."""

    known: list[Record] = []  # noqa: RUF012
    always: list[int] | None = None

    def propose(self, batch):
        drafts = []
        for i in range(len(batch)):
            tokens = batch.tokens(i).tolist()
            found = next(
                (r for r in self.known if r.token_ids[: len(tokens)].tolist() == tokens), None
            )
            rest = [] if found is None else found.token_ids[len(tokens) :].tolist()
            drafts.append(rest if self.always is None else self.always)
        return drafts


class Failing(Proposer):
    def propose(self, batch):
        raise ValueError("ouch")


class Peeking(Proposer):
    """Drafts what stands in the engine's matrix behind the request's tokens."""

    def propose(self, batch):
        ends = zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        return [batch.token_ids[row, end : end + 4].tolist() for row, end in ends]


class Predicted(RequestOptions):
    prediction_token_ids: list[int] | None = None


class Watching(Proposer):
    """Notes what requests bring, and pretends to hold memory."""

    seen: list[object] = []  # noqa: RUF012

    def begin(self, request):
        self.seen.append(request.options.prediction_token_ids)

    def propose(self, batch):
        return [[]] * len(batch)

    def usage(self):
        return Usage(1, 1000 * len(self.seen))


@pytest.fixture(scope="session")
def plugins():
    manager = PluginManager()
    manager.add(ProposerSpec("knowing", lambda _: Knowing()))
    manager.add(ProposerSpec("failing", lambda _: Failing()))
    manager.add(ProposerSpec("peeking", lambda _: Peeking()))
    needs = frozenset({Capability.TARGET_TOKENS})
    manager.add(ProposerSpec("demanding", lambda _: Peeking(), needs=needs))
    manager.add(
        ProposerSpec(
            "watching",
            lambda _: Watching(),
            request_options=Predicted,
            needs=frozenset({Capability.REQUEST_OPTIONS}),
        )
    )
    return manager


def measured(plugins, records, name="knowing", k=4, known=None, always=None, **more):
    Knowing.known = records if known is None else known
    Knowing.always = always
    result = replay(records, Candidate(name), k, plugins=plugins, **more)
    return as_row(result)


# -- what is measured -------------------------------------------------------------------------


def test_a_hand_computed_example(plugins):
    # After 5, the draft is 1 2 9 9 each time.
    records = [record([5], [7, 1, 2, 3, 1, 2])]
    row = measured(plugins, records, always=[1, 2, 9, 9], vocab_size=10)
    # 7 | 1 2 3 | 1 2: two steps for five tokens.
    assert list(row) == KEYS
    assert row["tokens_per_step"] == 5 / 2
    assert row["drafted_per_step"] == 4
    assert row["acceptance_rate"] == 4 / 8
    assert row["acceptance_by_position"] == [1.0, 1.0, 0.0, 0.0]
    assert row["draft_share"] == 1.0
    assert row["num_faults"] == 0
    assert row["state_bytes"] is None
    assert 0 < row["microseconds_per_proposal"] <= 1000 * row["longest_call_milliseconds"]
    assert row["p99_microseconds"] > 0


outputs = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30), min_size=1, max_size=6)


@given(outputs=outputs, k=st.integers(1, 9), concurrency=st.integers(1, 4))
def test_who_knows_everything_needs_the_fewest_steps(plugins, outputs, k, concurrency):
    records = [record([100 + i, 1], output) for i, output in enumerate(outputs)]
    row = measured(plugins, records, k=k, concurrency=concurrency)
    rest = [len(output) - 1 for output in outputs]
    steps = sum(-(-n // (k + 1)) for n in rest)
    assert row["tokens_per_step"] == (sum(rest) / steps if steps else None)
    assert row["acceptance_rate"] in (1.0, None)


@given(outputs=outputs, always=st.sampled_from([[], [999]]), concurrency=st.integers(1, 4))
def test_who_knows_nothing_takes_a_step_per_token(plugins, outputs, always, concurrency):
    records = [record([1], output) for output in outputs]
    row = measured(plugins, records, always=always, concurrency=concurrency, vocab_size=1000)
    rest = sum(len(output) - 1 for output in outputs)
    assert row["tokens_per_step"] == (1.0 if rest else None)
    assert row["acceptance_rate"] == (0.0 if always and rest else None)
    assert row["draft_share"] == (float(bool(always)) if rest else None)


@given(outputs=outputs, concurrency=st.integers(2, 5))
def test_how_many_are_served_at_a_time_changes_no_count(plugins, outputs, concurrency):
    records = [record([1, 2, 3], output) for output in outputs]
    rows = [measured(plugins, records, "ngram", concurrency=n) for n in (1, concurrency)]
    for key in KEYS[5:10]:
        assert rows[0][key] == rows[1][key]


def test_the_last_draft_is_counted_whole(plugins):
    # 7 | 1: the only step; its draft goes three tokens beyond the end.
    row = measured(plugins, [record([5], [7, 1])], always=[1, 2, 3, 4])
    assert row["tokens_per_step"] == 1
    assert row["drafted_per_step"] == 4
    assert row["acceptance_by_position"] == [1.0, 0.0, 0.0, 0.0]


def test_what_a_token_costs_makes_a_speed(plugins):
    # 7 | 1 2 3 | 1 2, with 4 draft tokens at both steps; without, a step for each of 5 tokens.
    records = [record([5], [7, 1, 2, 3, 1, 2])]
    known = {"always": [1, 2, 9, 9], "vocab_size": 10}
    assert measured(plugins, records, **known)["speed"] == 5 / 2
    row = measured(plugins, records, token_cost=0.1, **known)
    assert row["speed"] == pytest.approx(5 * 1.1 / (2 * 1.5))


@given(outputs=outputs, concurrency=st.integers(1, 4), token_cost=st.floats(0, 2))
def test_who_drafts_nothing_is_as_fast_as_no_speculation(plugins, outputs, concurrency, token_cost):
    records = [record([1], output) for output in outputs]
    row = measured(plugins, records, always=[], concurrency=concurrency, token_cost=token_cost)
    assert row["speed"] == pytest.approx(1)


@pytest.mark.parametrize("token_cost", [0.02, 0.2, 1.0])
def test_adaptive_lengths_gain_on_copies_and_lose_nothing_else(plugins, token_cost):
    """Against no speculation, and against whole drafts where a token is dear."""
    chance = np.random.default_rng(0)
    copies = [record([3] * 20, chance.integers(10, 90, 200).tolist()) for _ in range(4)]
    speeds = {}
    for policy in ("fixed", "adaptive"):
        same = {"length_policy": policy, "token_cost": token_cost, "k": 8, "concurrency": 4}
        speeds[policy, "copy"] = measured(plugins, copies, **same)["speed"]
        speeds[policy, "free"] = measured(plugins, copies, always=[1] * 8, **same)["speed"]
    assert speeds["adaptive", "free"] > 0.97
    assert speeds["adaptive", "copy"] > 0.9 * max(1, speeds["fixed", "copy"])
    if token_cost > 0.1:
        assert speeds["adaptive", "free"] > 1.2 * speeds["fixed", "free"]


def test_what_is_to_come_cannot_be_seen(plugins):
    records = [record([1] * n, range(1, 30)) for n in (5, 3, 8)]
    for concurrency in (1, 2):
        row = measured(plugins, records[:concurrency], "peeking", concurrency=concurrency)
        assert row["tokens_per_step"] == 1.0
        assert row["draft_share"] == 1.0


def test_a_proposal_is_a_requests_share_of_a_call():
    counters = Counters(num_accepted_tokens_per_pos=[])
    # One call of 2 seconds for 1 request; 99 calls of 3 seconds for 3 each.
    seconds, requests = [2.0] + [3.0] * 99, [1] + [3] * 99
    row = as_row(Result(Candidate("x"), 1, 0, counters, [], seconds, requests, None, 1))
    assert row["microseconds_per_proposal"] == pytest.approx(1e6 * (2 + 3 * 99) / (1 + 3 * 99))
    assert row["p99_microseconds"] == 1e6
    assert row["longest_call_milliseconds"] == 3000


def test_a_finished_request_makes_room_for_the_next(plugins):
    records = [record([i], [7] * n) for i, n in enumerate((2, 9, 2, 2, 3))]
    result = replay(records, Candidate("knowing"), 1, concurrency=2, plugins=plugins)
    assert max(result.call_requests) == 2
    assert sum(result.call_requests) == sum(1 + n - 1 for n in (2, 9, 2, 2, 3))
    assert len(result.call_requests) == 2 + 2 + 2 + 3  # the others, one after another, beside the 9


def test_the_vocabulary_must_hold_the_records(plugins):
    records = [record([1], [2, 3], reference=[9])]
    assert measured(plugins, records, vocab_size=10)["num_faults"] == 0
    with pytest.raises(OptionError, match="vocabulary size is 9, but the records hold the token 9"):
        measured(plugins, records, vocab_size=9)


def test_what_no_record_tells_cannot_be_needed(plugins):
    with pytest.raises(CapabilityError, match="target_tokens"):
        measured(plugins, [record([1], [2])], "demanding")


def test_no_prompt_and_two_records_of_one_id(plugins):
    records = [record([], [1, 2, 3, 4]), record([], [2, 2])]
    assert measured(plugins, records, concurrency=2)["tokens_per_step"] == 4 / 2


def test_references_reach_those_who_take_them(plugins):
    Watching.seen = []
    records = [record([1], [2], reference=[2, 3]), record([1], [2])]
    row = measured(plugins, records, "watching")
    assert Watching.seen == [[2, 3], None]
    assert row["state_bytes"] == 2000
    assert row["tokens_per_step"] is None  # no steps at all


def test_a_reference_is_followed(plugins):
    output = list(range(10, 40))
    records = [record([1], output, reference=output)]
    assert measured(plugins, records, "prediction", k=5)["tokens_per_step"] == pytest.approx(29 / 5)


# -- files ------------------------------------------------------------------------------------

GOOD = '{"id": "x", "prompt_token_ids": [1, 2], "output_token_ids": [3, 4]}'


def write(tmp_path, *lines, name="f.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_files_are_read(tmp_path):
    path = write(
        tmp_path,
        GOOD,
        "",
        '{"prompt_token_ids": [], "output_token_ids": [5], "reference_token_ids": [6], "more": 1}',
        '{"prompt_token_ids": [1], "output_token_ids": []}',
    )
    first, second = read_records([path])
    assert (first.id, first.token_ids.tolist(), first.num_prompt_tokens) == ("x", [1, 2, 3, 4], 2)
    assert (second.id, second.token_ids.tolist()) == (f"{path}:3", [5])
    assert first.reference_token_ids is None
    assert second.reference_token_ids.tolist() == [6]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "the line: Invalid JSON"),
        ("3", "the line"),
        ('{"output_token_ids": [1]}', "prompt_token_ids: Field required"),
        ('{"prompt_token_ids": [1]}', "output_token_ids: Field required"),
        ('{"prompt_token_ids": 3, "output_token_ids": [1]}', "prompt_token_ids: Input should be"),
        ('{"prompt_token_ids": [1, "a"], "output_token_ids": [1]}', "prompt_token_ids.1"),
        ('{"prompt_token_ids": [1], "output_token_ids": [-1]}', "output_token_ids.0"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2147483648]}', "output_token_ids.0"),
        ('{"prompt_token_ids": [1.5], "output_token_ids": [1]}', "prompt_token_ids.0"),
        ('{"prompt_token_ids": [true], "output_token_ids": [1]}', "prompt_token_ids.0"),
        ('{"id": [], "prompt_token_ids": [1], "output_token_ids": [1]}', "id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, told):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(RecordError) as raised:
        read_records([path])
    assert f"{path}:2: {told}" in str(raised.value)
    assert "'prompt_token_ids' and 'output_token_ids'" in str(raised.value)


@pytest.mark.parametrize(
    "content", ["", "\n\n", '{"prompt_token_ids": [1], "output_token_ids": []}']
)
def test_files_with_nothing_in_them_are_refused(tmp_path, content):
    with pytest.raises(RecordError, match="no request with an output"):
        read_records([write(tmp_path, content)])


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\x00")
    with pytest.raises(RecordError, match="f:2: the line: Invalid JSON"):
        read_records([path])


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_text_is_read_with_a_tokenizer(tmp_path, tokenizer):
    path = write(tmp_path, '{"prompt": "a b", "output": "c", "reference": "b c"}')
    (found,) = read_records([path], tokenizer)
    assert found.token_ids.tolist() == [1, 2, 3]
    assert found.reference_token_ids.tolist() == [2, 3]
    with pytest.raises(RecordError, match=r"f\.jsonl:1: prompt: Field required"):
        read_records([write(tmp_path, GOOD)], tokenizer)
    with pytest.raises(RecordError, match="is no tokenizer file"):
        read_records([path], path)


# -- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ngram", "ngram", {}),
        ("ngram:", "ngram", {}),
        (
            "suffix:min_confidence=0.1,cache_bytes=0",
            "suffix",
            {"min_confidence": 0.1, "cache_bytes": 0},
        ),
        ("ngram:prefer=earliest", "ngram", {"prefer": "earliest"}),
        ('cascade:parts=["a","b"],by=order', "cascade", {"parts": ["a", "b"], "by": "order"}),
        ('p:o={"x":{"y":[1,2]},"z":"a,b"}', "p", {"o": {"x": {"y": [1, 2]}, "z": "a,b"}}),
        ("suffix:cache_file=/tmp/x=y", "suffix", {"cache_file": "/tmp/x=y"}),
        ("p:a=Infinity,b=true,c=null", "p", {"a": "Infinity", "b": True, "c": None}),
    ],
)
def test_options_inline(text, name, options):
    assert parse_candidate(text) == Candidate(name, options)


@pytest.mark.parametrize("text", ["ngram:min_n", "ngram:=3", "ngram:a=1,,b=2"])
def test_options_without_a_value_are_refused(text):
    with pytest.raises(OptionError, match="is no option"):
        parse_candidate(text)


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_the_command_writes_json_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = write(
        tmp_path, *[GOOD, '{"prompt_token_ids": [1, 2, 1], "output_token_ids": [2, 1, 2]}']
    )
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    done = run(
        path, "--proposer", "ngram:min_n=1", "--proposer", "suffix", "--concurrency", 2,
        "--num-speculative-tokens", "2,4", "--json", out, "--picture", picture,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "ngram:min_n=1" in done.output
    rows = json.loads(out.read_text())
    assert [(row["proposer"], row["num_speculative_tokens"]) for row in rows] == [
        ("ngram", 2), ("ngram", 4), ("suffix", 2), ("suffix", 4),
    ]  # fmt: skip
    assert all(list(row) == KEYS for row in rows)
    assert rows[0]["options"] == {"min_n": 1}
    assert [len(row["acceptance_by_position"]) for row in rows] == [2, 4, 2, 4]
    assert "<svg" in picture.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"f.jsonl", "out.json", "out.svg"}


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (["--proposer", "sufix"], LookupError, "suffix"),
        (["--proposer", "suffix:depth=3"], OptionError, "'depth'"),
        (["--proposer", "ngram:min_n=x"], OptionError, "'min_n'"),
        (["--json", "/nowhere/x.json"], OptionError, "cannot be written"),
        (["--picture", "/nowhere/x.png"], OptionError, "cannot be written"),
        (["--picture", "x.docx"], OptionError, "no kind of picture"),
        (["--json", "/dev/null"], OptionError, "Name an ordinary file"),
        (["--vocab-size", "4"], OptionError, "the records hold the token 4"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    tmp_path, monkeypatch, arguments, error, told
):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, GOOD)
    done = run(path, *arguments)
    assert isinstance(done.exception, error)
    assert isinstance(done.exception, SpecplugError)
    assert told in str(done.exception)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("numbers", ["0", "4,", "a", "4,-1", ""])
def test_k_must_be_numbers_above_0(tmp_path, numbers):
    done = run(write(tmp_path, GOOD), "--num-speculative-tokens", numbers)
    assert done.exit_code == 2
    assert "num-speculative-tokens" in done.output


def test_a_proposer_that_fails_is_said(tmp_path, plugins, caplog):
    settings = ReplaySettings([write(tmp_path, GOOD)], ["failing"], [4])
    console = Console(record=True)
    assert not run_replay(settings, console, plugins)
    assert "FAILED 2 times: failing, K = 4; see the log." in console.export_text()
    assert "'failing': propose raised ValueError: ouch" in caplog.text


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    out.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    done = run(write(tmp_path, GOOD), "--proposer", "ngram", "--json", out)
    assert isinstance(done.exception, OptionError)
    assert f"{out} cannot be written: full" in str(done.exception)
    assert out.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"f.jsonl", "out.json"}
