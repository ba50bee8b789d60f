"""Recording what is served, and reading it again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specplug import Proposer
from specplug.errors import OptionError
from specplug.recording import Recorder
from specplug.replay.records import read_records
from specplug.runtime import Arrival, Step


class Never(Proposer):
    def propose(self, batch):
        return [[]] * len(batch)


@pytest.fixture
def serve(make_runtime, make_engine, tmp_path):
    def start(rank=0, **settings):
        settings = {"record_folder": str(tmp_path), **settings}
        return make_runtime(Never(), engine=make_engine(rank=rank), settings=settings)

    return start


def say(runtime, request_id, text, num_tokens):
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(text)] = text
    runtime.step(Step([request_id], tokens, np.zeros(1, np.int32), [num_tokens], [True], {}))


def answer(runtime, request_id, prompt, output, **arrival):
    runtime.begin(Arrival(request_id, prompt, 60, **arrival))
    for n in range(1, len(output) + 1):
        say(runtime, request_id, [*prompt, *output], len(prompt) + n)


def lines(folder):
    return [json.loads(line) for path in folder.iterdir() for line in path.open()]


def test_what_is_recorded_reads_back(serve, tmp_path):
    runtime = serve()
    answer(runtime, "a", [1, 2], [3, 4, 5])
    answer(runtime, "b", np.array([6], np.int32), [7])
    answer(runtime, "none", [1], [])
    assert lines(tmp_path) == []  # as long as they run
    for request_id in ("b", "none", "a"):
        runtime.end(request_id)
    assert lines(tmp_path) == [
        {"id": "b", "prompt_token_ids": [6], "output_token_ids": [7]},
        {"id": "a", "prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5]},
    ]
    (path,) = tmp_path.iterdir()
    found = read_records([path])
    assert [(r.id, r.token_ids.tolist(), r.num_prompt_tokens) for r in found] == [
        ("b", [6, 7], 1),
        ("a", [1, 2, 3, 4, 5], 2),
    ]


def test_it_is_off_by_default(make_runtime, make_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runtime = make_runtime(Never(), engine=make_engine())
    answer(runtime, "a", [1, 2], [3])
    runtime.close()
    assert list(tmp_path.iterdir()) == []


def test_requests_that_still_run_at_shutdown_are_recorded(serve, tmp_path):
    runtime = serve()
    answer(runtime, "a", [1, 2], [3, 4])
    runtime.close()
    assert [line["output_token_ids"] for line in lines(tmp_path)] == [[3, 4]]


def test_tokens_behind_a_stop_token_are_not_recorded(serve, tmp_path):
    runtime = serve()
    runtime.begin(Arrival("a", [1], 60, stop_token_ids=frozenset({9})))
    say(runtime, "a", [1, 5, 9, 7], 4)
    runtime.end("a")
    assert [line["output_token_ids"] for line in lines(tmp_path)] == [[5, 9]]


def test_a_rewound_request_is_recorded_up_to_there(serve, tmp_path):
    runtime = serve()
    answer(runtime, "a", [1, 2], [3, 4, 5])
    say(runtime, "a", [1, 2, 3, 4], 4)
    say(runtime, "a", [1, 2, 3, 4, 5, 6], 6)
    runtime.end("a")
    assert [line["output_token_ids"] for line in lines(tmp_path)] == [[3, 4, 5]]


def test_only_one_rank_records(serve, tmp_path):
    answer(serve(rank=1), "a", [1], [2])
    assert list(tmp_path.iterdir()) == []


def test_several_workers_have_files_of_their_own(serve, tmp_path):
    for _ in range(3):
        runtime = serve()
        answer(runtime, "a", [1], [2])
        runtime.end("a")
    assert len(list(tmp_path.iterdir())) == len(lines(tmp_path)) == 3


def test_at_the_limit_recording_ends_and_serving_does_not(serve, tmp_path, caplog):
    runtime = serve(record_max_bytes=200)
    for i in range(20):
        answer(runtime, str(i), [1], [2])
        runtime.end(str(i))
    (path,) = tmp_path.iterdir()
    assert 0 < path.stat().st_size <= 200
    assert len(lines(tmp_path)) == 3
    assert sum("records no more requests" in r.getMessage() for r in caplog.records) == 1
    assert "record_max_bytes (200)" in caplog.text
    assert runtime.counters.num_requests == 20


class Full:
    """A disk with no room: takes half a line."""

    def __init__(self, file):
        self._file = file

    def write(self, line):
        return self._file.write(line[: len(line) // 2])

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_leaves_no_half_line(tmp_path, caplog):
    recorder = Recorder(tmp_path, 10**6)
    for request_id in ("a", "b"):
        recorder.begin(request_id, [1])
        recorder.add(request_id, [2])
    recorder.end("a")
    recorder._file = Full(recorder._file)
    recorder.end("b")
    recorder.begin("c", [1])
    recorder.add("c", [2])
    recorder.end("c")
    assert [line["id"] for line in lines(tmp_path)] == ["a"]
    assert "cannot be written (no room for a whole line)" in caplog.text


def test_a_deleted_file_ends_the_recording_once(serve, tmp_path, caplog):
    runtime = serve()
    for path in tmp_path.iterdir():
        path.unlink()
    for i in range(3):
        answer(runtime, str(i), [1], [2])
        runtime.end(str(i))
    assert [r.getMessage().endswith("(it was deleted).") for r in caplog.records] == [True]


def test_only_the_owner_may_read_it(serve, tmp_path):
    serve()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@given(
    served=st.lists(
        st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=20),
                  st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_whatever_is_recorded_reads_back(tmp_path_factory, served):
    recorder = Recorder(tmp_path_factory.mktemp("records"), 10**6)
    for i, (prompt, output) in enumerate(served):
        recorder.begin(str(i), prompt)
        for token in output:
            recorder.add(str(i), [token])
        recorder.end(str(i))
    recorder.close()
    found = read_records([recorder.path])
    assert [r.id for r in found] == [str(i) for i in range(len(served))]
    assert [(r.token_ids.tolist(), r.num_prompt_tokens) for r in found] == [
        ([*prompt, *output], len(prompt)) for prompt, output in served
    ]


def test_a_folder_that_cannot_be_written_is_refused(serve, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(OptionError, match=f"{name}, where no file can be written"):
            serve(record_folder=str(tmp_path / name))
