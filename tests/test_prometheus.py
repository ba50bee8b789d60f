"""Counters on an engine's /metrics: what workers write, a front end in another process serves."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from specplug import Proposer, Usage, prometheus
from specplug.metrics import Counters
from specplug.prometheus import FOLDER, METRICS, SHARED_FOLDER, Publisher
from specplug.runtime import Arrival, Step

ROOT = Path(__file__).parent.parent
LABELS = {"model_name": "tiny", "engine": "0", "proposer": "tested"}

WORKER = """
import json, os, sys
if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    from prometheus_client import Counter
    Counter("engines_own", "What the engine itself counts in this process.").inc(5)
from specplug.metrics import Counters
from specplug.prometheus import Publisher
from specplug.proposer import EngineInfo, Usage

engine = EngineInfo("test", 100, 64, 8, 3, model_name="tiny", **json.loads(sys.argv[1]))
publisher = Publisher("tested", engine)
publisher.publish(
    Counters(
        num_requests=4, num_steps=20, num_proposed_tokens=40, num_drafts=10, num_draft_tokens=30,
        num_accepted_tokens=9, num_accepted_tokens_per_pos=[6, 2, 1], num_propose_calls=8,
        propose_seconds=0.5, longest_propose_seconds=0.25, num_faults=1, switched_off=True,
    ),
    2,
    lambda: Usage(3, 1000),
)
print("written", flush=True)
if input() == "close":
    publisher.close()
"""
WRITTEN = {
    "specplug_requests_total": 4,
    "specplug_steps_total": 20,
    "specplug_proposed_tokens_total": 40,
    "specplug_drafts_total": 10,
    "specplug_draft_tokens_total": 30,
    "specplug_accepted_tokens_total": 9,
    "specplug_propose_calls_total": 8,
    "specplug_propose_seconds_total": 0.5,
    "specplug_faults_total": 1,
    "specplug_running_requests": 2,
    "specplug_switched_off": 1,
    "specplug_longest_propose_seconds": 0.25,
    "specplug_proposer_requests": 3,
    "specplug_proposer_bytes": 1000,
}
GAUGES = [one.name for one in METRICS if one.kind != "counter"]


@contextmanager
def worker(**engine):
    """Run a worker in a process of its own, until the end of the block or until killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(engine)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout and process.stdin
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def no_folder(monkeypatch):
    """As if nothing had been prepared in this process."""
    for name in (FOLDER, SHARED_FOLDER):
        monkeypatch.setenv(name, "")  # so that what is set below is undone, too
        monkeypatch.delenv(name)
    before = set(REGISTRY._collector_to_names)
    for collector in before:
        if isinstance(collector, prometheus._FolderCollector):  # of an engine in this process
            REGISTRY.unregister(collector)
    prometheus._served_folder.cache_clear()
    prometheus._warn_once.cache_clear()
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
    prometheus._served_folder.cache_clear()
    prometheus._warn_once.cache_clear()


@pytest.fixture
def folder(no_folder):
    prometheus.prepare()
    yield Path(os.environ[FOLDER])
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


def served(registry=REGISTRY):
    """Return what /metrics shows of ours: ``{name: [(labels, value), ...]}``."""
    text = generate_latest(registry).decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("specplug_", "engines_own_total")):
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(name, registry=REGISTRY):
    ((_, found),) = served(registry)[name]
    return found


def test_what_a_worker_counts_is_served_by_another_process(folder):
    with worker():
        found = served()
    by_position = found.pop("specplug_accepted_tokens_per_pos_total")
    assert by_position == [({**LABELS, "position": str(i)}, n) for i, n in enumerate([6, 2, 1])]
    assert found == {name: [(LABELS, number)] for name, number in WRITTEN.items()}


def test_the_text_says_what_each_metric_is(folder):
    with worker():
        families = {f.name: f for f in text_string_to_metric_families(_text())}
    for metric in METRICS:
        family = families[metric.family]
        assert family.documentation == metric.help
        assert family.type == metric.kind.split("_")[0]


def _text():
    return generate_latest(REGISTRY).decode()


def test_registering_collects_nothing_and_names_can_be_filtered(folder):
    with worker():
        registry = REGISTRY.restricted_registry(["specplug_drafts_total"])
        assert list(served(registry)) == ["specplug_drafts_total"]


def test_replicas_have_a_label_each(folder):
    with worker(replica=0), worker(replica=1):
        found = served()["specplug_drafts_total"]
    assert sorted((labels["engine"], number) for labels, number in found) == [("0", 10), ("1", 10)]


def test_only_rank_0_of_tensor_parallel_counts(folder):
    with worker(rank=0, world_size=2), worker(rank=1, world_size=2):
        assert value("specplug_drafts_total") == 10
        assert value("specplug_running_requests") == 2


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_worker_that_ended_keeps_its_counters_and_loses_its_gauges(folder, end):
    with worker() as process:
        if end == "killed":
            process.kill()
        else:
            process.stdin.write("close\n")
            process.stdin.flush()
        process.wait()
        found = served()
    assert value("specplug_drafts_total") == 10
    assert not set(found) & set(GAUGES)


def test_a_restarted_worker_counts_on_and_its_gauges_are_its_own(folder):
    with worker() as process:
        process.kill()
        process.wait()
    with worker():
        assert value("specplug_drafts_total") == 20
        assert value("specplug_running_requests") == 2
        assert value("specplug_switched_off") == 1


def test_an_engine_with_several_front_ends_serves_it_from_its_own_folder(
    no_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path))
    before = set(REGISTRY._collector_to_names)
    prometheus.prepare()
    assert os.environ[FOLDER] == str(tmp_path)
    assert set(REGISTRY._collector_to_names) == before

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    with worker() as first:
        assert value("specplug_running_requests", registry) == 2
        assert value("engines_own_total", registry) == 5
        first.kill()
        first.wait()
    with worker():  # takes the gauges of the dead away: nobody else does here
        found = served(registry)
        assert value("specplug_running_requests", registry) == 2
        assert value("specplug_drafts_total", registry) == 20
        assert set(found) == {
            *WRITTEN, "specplug_accepted_tokens_per_pos_total", "engines_own_total"
        }  # fmt: skip


def test_preparing_twice_is_preparing_once(folder):
    registered = set(REGISTRY._collector_to_names)
    prometheus.prepare()
    assert os.environ[FOLDER] == str(folder)
    assert set(REGISTRY._collector_to_names) == registered


def test_a_worker_that_makes_a_config_keeps_the_folder_of_its_front_end(no_folder, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "a process")
    monkeypatch.setenv(FOLDER, "/inherited")
    prometheus.prepare()
    assert os.environ[FOLDER] == "/inherited"


def test_a_server_started_by_another_has_a_folder_of_its_own(no_folder, monkeypatch):
    monkeypatch.setenv(FOLDER, "/inherited")
    prometheus.prepare()
    assert os.environ[FOLDER] != "/inherited"
    shutil.rmtree(os.environ[FOLDER])


def test_the_folder_is_private_and_removed_at_exit(run_python):
    script = """
import os
from specplug import prometheus
prometheus.prepare()
folder = os.environ[prometheus.FOLDER]
if os.fork() == 0:
    raise SystemExit  # a forked copy leaves it
os.wait()
print(oct(os.stat(folder).st_mode & 0o777), folder)
"""
    mode, path = run_python(script).split()
    assert mode == "0o700"
    assert not Path(path).exists()


# -- how often it is written ----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(prometheus, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def publish(folder, make_engine, clock):
    """Publish, and return how often it was written so far."""
    publisher = Publisher("tested", make_engine(model_name="tiny"))
    counters = Counters(num_accepted_tokens_per_pos=[0] * 4)
    written = []

    def usage():
        written.append(1)
        return Usage(0, 0)

    def step(num_running=1):
        counters.num_steps += 1
        publisher.publish(counters, num_running, usage)
        return len(written)

    yield step
    publisher.close()


def test_running_requests_are_written_once_in_an_interval(publish, clock):
    assert {publish() for _ in range(1000)} == {1}
    clock[0] += prometheus.INTERVAL_SECONDS
    assert {publish() for _ in range(1000)} == {2}
    assert value("specplug_steps_total") == 1001


def test_what_is_served_is_exact_when_nothing_runs(publish):
    publish()
    publish()
    assert value("specplug_steps_total") == 1
    publish(num_running=0)
    assert value("specplug_steps_total") == 3
    assert value("specplug_running_requests") == 0


# -- through the runtime --------------------------------------------------------------------


class Sevens(Proposer):
    def __init__(self, usage=None):
        self._usage = usage

    def propose(self, batch):
        return [[7, 7]] * len(batch)

    def usage(self):
        if isinstance(self._usage, Exception):
            raise self._usage
        return self._usage


def run_a_request(runtime):
    """Two steps: the second verifies a draft, of which one token is right."""
    tokens = np.array([[1, 2, 3, 7, 7, 9]], np.int32)
    runtime.begin(Arrival("a", [1, 2, 3], 60))
    for num_tokens, verified in ((4, {}), (6, {"a": [7, 7]})):
        drafts = runtime.step(
            Step(["a"], tokens, np.zeros(1, np.int32), [num_tokens], [True], verified)
        )
    runtime.end("a")
    return drafts.to_lists()


def test_a_runtime_publishes_what_it_counted(folder, make_runtime, make_engine):
    runtime = make_runtime(Sevens(), engine=make_engine(model_name="tiny"))
    assert value("specplug_requests_total") == 0, "shown from the start, for rates"
    run_a_request(runtime)
    found = served()
    by_position = found["specplug_accepted_tokens_per_pos_total"]
    assert [number for _, number in by_position] == [1, 0, 0, 0]
    assert found["specplug_steps_total"] == [(LABELS, 1)]
    assert found["specplug_draft_tokens_total"] == [(LABELS, 2)]
    assert found["specplug_accepted_tokens_total"] == [(LABELS, 1)]
    assert found["specplug_propose_calls_total"] == [(LABELS, 2)]
    assert found["specplug_running_requests"] == [(LABELS, 0)]
    assert "specplug_proposer_bytes" not in found, "this proposer does not count them"
    runtime.close()
    assert not set(served()) & set(GAUGES)


def test_nothing_is_written_where_no_front_end_asked_for_it(no_folder, make_runtime, monkeypatch):
    monkeypatch.setattr(prometheus, "_File", lambda *_: pytest.fail("a file was made"))
    runtime = make_runtime(Sevens())
    run_a_request(runtime)
    runtime.close()
    assert FOLDER not in os.environ


# -- faults ---------------------------------------------------------------------------------


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("broken", ["no folder", "no room", "usage raises", "writing raises"])
def test_what_fails_is_logged_once_and_drafts_go_on(
    folder, make_runtime, monkeypatch, caplog, broken
):
    def fail(*_):
        raise OSError("no space left on device")

    usage = None
    if broken == "no folder":
        shutil.rmtree(folder)
    elif broken == "no room":
        monkeypatch.setattr(Path, "write_bytes", fail)
    elif broken == "usage raises":
        usage = KeyError("x")
    else:
        monkeypatch.setattr(prometheus._File, "write", fail)
    runtime = make_runtime(Sevens(usage))
    for _ in range(3):
        assert run_a_request(runtime) == [[7, 7]]
    runtime.close()
    assert warnings(caplog) == ["specplug cannot write its metrics; the engine goes on without."]
    assert runtime.counters.num_faults == 0


def test_metrics_of_others_are_served_when_the_folder_is_gone(folder, caplog):
    shutil.rmtree(folder)
    assert served() == served() == {}
    assert "python_info" in _text()
    assert warnings(caplog) == ["specplug cannot read its metrics; the engine goes on without."]


def test_without_prometheus_client_nothing_is_said(run_python):
    printed = run_python(
        """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
sys.modules["prometheus_client"] = None
from specplug import EngineInfo, prometheus
prometheus.prepare()
os.environ[prometheus.FOLDER] = os.path.realpath(".")
from specplug.metrics import Counters
publisher = prometheus.Publisher("tested", EngineInfo("test", 100, 64, 8, 4))
publisher.publish(Counters(), 0, lambda: None)
publisher.close()
"""
    )
    assert printed == ""


def test_importing_specplug_does_not_import_prometheus_client(run_python):
    assert run_python("import specplug, sys; print('prometheus_client' in sys.modules)") == "False"


# -- what is written about it ---------------------------------------------------------------

VLLM = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
}
"""What an engine test finds on a real server."""
WORDS = {"sum", "max", "le", "position", "proposer", "engine"}


def names(expression):
    """Return the metrics that a PromQL expression names."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\w+\s*(?=\()", "", expression)
    return set(re.findall(r"[A-Za-z_:][\w:]*", bare)) - WORDS


def dashboard():
    return json.loads((ROOT / "grafana" / "specplug.json").read_text(encoding="utf-8"))


def expressions():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            (inner,) = re.findall(r"label_values\((.*), *\w+\)", variable["query"]["query"])
            yield inner


def test_names_are_found():
    query = 'sum by (le, engine) (rate(vllm:a_b{x="y_z"}[5m])) / on (engine) scalar(c_total) > 1'
    assert names(query) == {"vllm:a_b", "c_total"}


def test_the_dashboard_names_existing_metrics_only():
    known = {one.name for one in METRICS} | VLLM
    used = set()
    for expression in expressions():
        assert names(expression), expression
        assert names(expression) <= known, expression
        used |= names(expression)
    assert {one.name for one in METRICS} <= used


def test_the_dashboard_uses_variables_that_it_has_and_places_panels_apart():
    board = dashboard()
    variables = {one["name"] for one in board["templating"]["list"]}
    assert variables == {"datasource", "model_name", "proposer", "engine"}
    for expression in expressions():
        assert set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"} <= variables
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_metric_is_documented():
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert [one.name for one in METRICS if f"`{one.name}`" not in reference] == []


def test_the_documented_queries_use_metrics_that_exist():
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```promql\n(.*?)```", page, re.S)
    assert blocks
    known = {one.name for one in METRICS} | VLLM
    for expression in "".join(blocks).split("\n\n"):
        query = re.sub(r"#.*", "", expression)
        assert names(query) <= known, query
