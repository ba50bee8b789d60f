"""The soak test: mixed traffic on vLLM's server, with specplug and without, compared."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import Server, counters, idle, serving, until
from traffic import ADAPTER, BASE, PREDICTION, Answer, Case, Traffic, ask, make_cases

MIB = 2**20
IDLE_SECONDS = 60
MOST_GROWTH = 16 * MIB
"""The most that all processes together may grow from the second quarter to the last."""
JUDGED_MINUTES = 4
"""Shorter runs are not judged by their memory: they are still warming up."""
CACHE = {"cache_bytes": 4 * MIB}  # full after the first quarter
BOUNDED = {
    "suffix": CACHE,
    "lookahead": {"pool_bytes": 4 * MIB},
    "prediction": {"fallback_options": CACHE},
    "cascade": {"part_options": {"suffix": CACHE, "lookahead": {"pool_bytes": 4 * MIB}}},
}
"""Options that keep small what the built-in proposers remember of earlier requests."""
NAMESPACED, PREDICTING = ("suffix", "prediction", "cascade"), ("prediction", "cascade")
COUNTED = re.compile(
    r"specplug proposer '\w+': (?P<requests>\d+) requests, .* (?P<drafted>\d+) drafted, "
    r"(?P<accepted>\d+) accepted, .* (?P<faults>\d+) faults(?P<off>.*), (?P<running>\d+) running"
)
ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR|CRITICAL) .*|^.*Traceback \(most recent.*", re.MULTILINE
)


@dataclass(frozen=True)
class Soak:
    """What to run.

    Attributes:
        proposer: the proposer's name.
        num_speculative_tokens: K.
        minutes: how long there is traffic.
        num_clients: how many clients ask at a time.
        num_cases: how many different requests they ask.
        runner: vLLM's model runner; ``auto`` leaves it to specplug.
        seed: of all that is drawn.
    """

    proposer: str = "suffix"
    num_speculative_tokens: int = 5
    minutes: float = 10
    num_clients: int = 32
    num_cases: int = 200
    runner: str = "auto"
    seed: int = 0

    def flags(self) -> list[str]:
        """Return the server's flags that select the proposer."""
        speculative = {
            "model": f"specplug.vllm.{self.proposer}",
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        settings: dict[str, Any] = {
            "options": BOUNDED.get(self.proposer, {}),
            "log_interval_seconds": 10,
        }
        if self.runner != "auto":
            settings["runner"] = self.runner
        return [
            "--speculative-config", json.dumps(speculative),
            "--additional-config", json.dumps({"specplug": settings}),
        ]  # fmt: skip

    def request_options(self) -> list[dict[str, Any]]:
        """Return what requests may bring as ``vllm_xargs``."""
        limits = (0, 1, self.num_speculative_tokens)
        options = [{"specplug_num_speculative_tokens": limit} for limit in limits]
        if self.proposer in NAMESPACED:
            options += [{"specplug_cache_namespace": name} for name in ("one", "another")]
        if self.proposer in PREDICTING:
            options.append({PREDICTION: [1]})
        return options


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, whether it is as it should be, and what was seen."""

    name: str
    passed: bool
    detail: str


@dataclass
class Result:
    """What a soak test found.

    Attributes:
        checks: what was checked; the test passed if all of them did.
        counts: how many requests of what sort there were.
        metrics: vLLM's own counters at the end.
        growth: by how many bytes each process grew from the second quarter to the last.
        memory: the samples that this comes from: resident bytes by process.
        differences: the answers that are not those without speculation.
    """

    checks: list[Check]
    counts: dict[str, int]
    metrics: dict[str, float]
    growth: dict[str, float]
    memory: list[dict[str, int]]
    differences: list[dict[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)


def run(
    soak: Soak, model: Path, adapter: Path, folder: Path, tell: Callable[[str], None]
) -> Result:
    """Run a soak test.

    Args:
        soak: what to run.
        model: the tiny model.
        adapter: its LoRA adapter.
        folder: where the servers' logs go.
        tell: called with a line of text before what takes long.

    Raises:
        RuntimeError: a server did not start, or did not come to rest.
    """
    cases = make_cases(soak.num_cases, soak.seed)
    tell("starting vLLM without speculation")
    with serving(model, adapter, folder / "plain.log") as server:
        tell(f"asking it {len(cases)} requests, and the adapter, several times")
        expected, unstable = asyncio.run(_baseline(server, cases, soak))

    traffic = Traffic(cases, expected, soak.request_options(), soak.seed)
    tell(f"starting vLLM with '{soak.proposer}'")
    log = folder / "specplug.log"
    with serving(model, adapter, log, *soak.flags()) as server:
        tell(f"{soak.num_clients} clients for {soak.minutes:.3g} minutes")
        metrics = counters(asyncio.run(_load(server, soak, traffic)))
    checks = [
        _compared(traffic, unstable),
        *_checks_of_log(log.read_text(), traffic),
        _memory(server, soak),
        _drafted(metrics),
        Check(
            "server ends by itself",
            server.process.returncode == 0,
            f"exit status {server.process.returncode}",
        ),
    ]
    return Result(
        checks,
        dict(traffic.counts),
        metrics,
        server.growth(),
        server.memory,
        traffic.differences,
    )


async def _baseline(
    server: Server, cases: Sequence[Case], soak: Soak
) -> tuple[dict[tuple[str, int], Answer], int]:
    """Return the answers without speculation, and how many are not the same every time.

    Each is asked twice, in another order, so beside others.
    """
    answers: dict[tuple[str, int], set[Answer]] = {}
    free = asyncio.Semaphore(soak.num_clients)
    rng = random.Random(soak.seed)
    async with server.session() as session:

        async def one(model: str, number: int) -> None:
            async with free:
                answer = await ask(session, cases[number], model)
            answers.setdefault((model, number), set()).add(answer)

        keys = [(model, number) for model in (BASE, ADAPTER) for number in range(len(cases))]
        for _ in range(2):
            rng.shuffle(keys)
            await asyncio.gather(*(one(*key) for key in keys))
    stable = {key: found.pop() for key, found in answers.items() if len(found) == 1}
    return stable, len(answers) - len(stable)


async def _load(server: Server, soak: Soak, traffic: Traffic) -> str:
    """Let the clients loose, wait until the server has come to rest, return its metrics."""
    watch = asyncio.create_task(server.watch_memory())
    async with server.session() as session:
        await traffic.run(session, 60 * soak.minutes, soak.num_clients)
    watch.cancel()
    return await until(server, "/metrics", idle, IDLE_SECONDS)


def _compared(traffic: Traffic, unstable: int) -> Check:
    wrong = len(traffic.differences)
    detail = f"{traffic.compared} greedy answers compared, {wrong} differ"
    if unstable:
        detail += f"; {unstable} left out: not the same every time without speculation either"
    return Check("same answers", not wrong and traffic.compared > 0, detail)


def _checks_of_log(log: str, traffic: Traffic) -> list[Check]:
    failures = traffic.failures
    requests, wrong = traffic.counts["requests"], traffic.counts["wrong options"]
    told = log.count("without its options")
    # vLLM itself sometimes logs an error while it shuts down.
    serving, _, ending = log.partition("shutdown triggered")
    errors = [*ERROR.findall(serving), *(e for e in ERROR.findall(ending) if "specplug" in e)]
    checks = [
        Check(
            "every request answered",
            not failures and requests > 0,
            f"{requests} requests, {len(failures)} failed" + "".join(failures[:1]),
        ),
        Check("no errors in the log", not errors, f"{len(errors)} lines" + "".join(errors[:1])),
        Check("wrong options only warned of", told == wrong, f"{wrong} requests, {told} warnings"),
    ]
    lines = list(COUNTED.finditer(log))
    if not lines:
        return [*checks, Check("specplug's counters", False, "not in the log")]
    last = lines[-1]
    faults, running = int(last["faults"]), int(last["running"])
    return [
        *checks,
        Check("no faults", not faults and not last["off"], f"{faults} faults{last['off']}"),
        Check(
            "no requests left",
            running == 0,
            f"{running} of {last['requests']} at shutdown; the most at a time in the log: "
            f"{max(int(line['running']) for line in lines)}",
        ),
    ]


def _memory(server: Server, soak: Soak) -> Check:
    growth = sum(server.growth().values())
    detail = f"{growth / MIB:+.1f} MiB from the second quarter to the last"
    if soak.minutes < JUDGED_MINUTES:
        return Check("flat memory", True, f"{detail}; not judged below {JUDGED_MINUTES} minutes")
    return Check("flat memory", growth <= MOST_GROWTH, f"{detail}, of at most {MOST_GROWTH // MIB}")


def _drafted(metrics: dict[str, float]) -> Check:
    drafts, drafted, accepted = (
        int(metrics.get(f"spec_decode_num_{name}_total", 0))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    detail = f"vLLM counts {drafts} drafts, {drafted} tokens in them, {accepted} accepted"
    return Check("drafts are accepted", 0 < accepted <= drafted, detail)
