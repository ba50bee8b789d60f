"""vLLM's OpenAI-compatible server in processes of its own, its memory and its counters."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from traffic import ADAPTER, BASE, MAX_MODEL_LEN

from specplug.demo.environment import engine_environment

# What the command does, which looks for a distribution that the CPU build does not have.
SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
cli_env_setup()
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
ServeSubcommand.cmd(parser.parse_args())
"""
START_SECONDS, STOP_SECONDS, SAMPLE_SECONDS = 300, 90, 2.0


@dataclass
class Server:
    """A running server.

    Attributes:
        process: its first process.
        port: where it listens.
        log: what all its processes wrote.
        memory: samples of the resident bytes of all its processes, by their names.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    memory: list[dict[str, int]] = field(default_factory=list)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Open a session for any number of clients."""
        connector = aiohttp.TCPConnector(limit=0)
        address = f"http://127.0.0.1:{self.port}"
        async with aiohttp.ClientSession(address, connector=connector) as session:
            yield session

    async def watch_memory(self) -> None:
        """Sample the memory until cancelled."""
        while True:
            self.memory.append(self._resident_bytes())
            await asyncio.sleep(SAMPLE_SECONDS)

    def _resident_bytes(self) -> dict[str, int]:
        server = psutil.Process(self.process.pid)
        resident: dict[str, int] = {}
        for process in (server, *server.children(recursive=True)):
            try:
                name = process.name() if process != server else "server"
                resident[name] = resident.get(name, 0) + process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return resident

    def growth(self) -> dict[str, float]:
        """Return by how many bytes the last quarter's mean is above the second quarter's."""
        quarter = len(self.memory) // 4
        if not quarter:
            return {}
        second, last = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return {
            name: fmean(one.get(name, 0) for one in last)
            - fmean(one.get(name, 0) for one in second)
            for name in {name for one in second + last for name in one}
        }


@contextmanager
def serving(model: Path, adapter: Path, log: Path, *flags: str) -> Iterator[Server]:
    """Run vLLM's server for the tiny model and its adapter, as the soak test needs it.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    flags = (
        "--served-model-name", BASE, "--shutdown-timeout", "30",
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", "24", "--max-num-batched-tokens", "256",
        # A KV cache that is all used after a minute, and so small that requests are preempted.
        "--block-size", "32", "--num-gpu-blocks-override", "96",
        # Room for one adapter more than there is: on a CPU, vLLM 0.32 gives requests without one,
        # in a batch with others, that in the last slot.
        "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2",
        "--lora-modules", f"{ADAPTER}={adapter}", *flags,
    )  # fmt: skip
    with started(model, log, *flags) as server:
        yield server


@contextmanager
def started(model: Path, log: Path, *flags: str, logging_level: str = "INFO") -> Iterator[Server]:
    """Run ``vllm serve`` for a tiny model.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable, "-c", SERVE, "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning",
        "--dtype", "float32", "--enforce-eager", *flags,
    ]  # fmt: skip
    environment = {
        **os.environ,
        **engine_environment(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": logging_level,
    }
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        server = Server(process, port, log)
        try:
            asyncio.run(until(server, "/health", lambda _: True, START_SECONDS))
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


async def until(server: Server, path: str, wanted: Callable[[str], bool], seconds: float) -> str:
    """Return what the server says at an address once it is as wanted."""
    text = "nothing"
    async with server.session() as session:
        for _ in range(int(seconds)):
            if server.process.poll() is not None:
                break
            try:
                async with session.get(path) as response:
                    text = await response.text()
                    if response.status == 200 and wanted(text):
                        return text
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
    end = "\n".join(server.log.read_text().splitlines()[-40:])
    raise RuntimeError(f"{path} of the server said, at last, {text[-2000:]}\nIts log ends:\n{end}")


def counters(metrics: str) -> dict[str, float]:
    """Return vLLM's counters by their names, without ``vllm:`` and labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:")
            found[name] = found.get(name, 0) + sample.value
    return found


def idle(metrics: str) -> bool:
    """Return whether vLLM has no request left."""
    found = counters(metrics)
    return found["num_requests_running"] == found["num_requests_waiting"] == 0
