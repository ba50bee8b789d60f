"""What the adapter records of live traffic is what was served, in replay's format."""

from __future__ import annotations

from harness import PROMPTS, sampling

from specplug.replay.records import read_records
from specplug.replay.run import Candidate, replay


def test_live_traffic_is_recorded_and_replays_alike(start, tiny_model, tmp_path):
    settings = {"record_folder": str(tmp_path), "options": {"min_n": 2, "max_n": 4}}
    engine = start(tiny_model, "ngram", 4, settings)
    outputs = engine.generate(PROMPTS, sampling({"max_tokens": 40}))

    (path,) = tmp_path.iterdir()
    records = read_records([path])
    assert sorted(record.token_ids.tolist() for record in records) == sorted(
        [*output.prompt, *output.tokens] for output in outputs
    )
    again = replay(records, Candidate("ngram", settings["options"]), 4).counters
    live = engine.runtime.counters
    assert again.num_steps >= live.num_steps > 0
    # The engine cuts the last drafts to max_tokens, which is not recorded.
    assert abs(again.num_accepted_tokens - live.num_accepted_tokens) <= len(PROMPTS)
    assert again.num_draft_tokens >= live.num_draft_tokens > 0
