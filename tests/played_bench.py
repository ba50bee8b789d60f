"""Plays an engine for ``specplug bench``: the same tokens for each prompt, as fast as it is told.

Environment variables say how: ``PLAY_LOG`` is a file for what its processes are asked,
``PLAY_SPEED`` how fast speculation is, ``PLAY_FAST`` and ``PLAY_FASTER`` which arguments make it
twice as fast, ``PLAY_CRASH`` which proposer ends the process, ``PLAY_FREE`` how many bytes are
free, and with ``PLAY_DIFFERENT`` speculation changes the text.
"""

import json
import os
import sys
from pathlib import Path

LARGEST_BATCH = 4


def own_methods(k):
    return {"its own": {"own": k}}


def own(arguments):
    return arguments


def ours(proposer, k, section):
    return {"name": proposer, "k": k, **section}


def flags(speculation):
    return f"--play {json.dumps(speculation)}"


def serve():
    configuration = json.loads(sys.stdin.readline())
    speculation = configuration["speculation"]
    print("started", speculation, file=sys.stderr)
    with Path(os.environ["PLAY_LOG"]).open("a") as log:
        print(json.dumps(configuration), file=log)
    if speculation and speculation.get("name", "") == os.environ.get("PLAY_CRASH"):
        sys.exit("no memory left")
    free = int(os.environ.get("PLAY_FREE", "10000000000"))
    memory = {"host": 10**9, "host_free": free, "device": None, "device_free": None}
    print(json.dumps({"memory": memory}), flush=True)
    seconds = 1 / _speed(speculation)
    last = 8 if speculation and os.environ.get("PLAY_DIFFERENT") else 7
    for line in sys.stdin:
        outputs = [
            {"token_ids": [prompt, 1, last], "arrivals": [[seconds / 10, 1], [seconds, 2]]}
            for prompt in json.loads(line)["batch"]
        ]
        answer = {"seconds": seconds, "outputs": outputs, "counts": {}, "memory": memory}
        print(json.dumps(answer), flush=True)


def _speed(speculation):
    if not speculation:
        return 1.0
    speed = float(os.environ.get("PLAY_SPEED", "2"))
    for name in ("PLAY_FAST", "PLAY_FASTER"):
        fast = json.loads(os.environ.get(name, "{}"))
        if fast and all(speculation.get(key) == value for key, value in fast.items()):
            speed *= 2
    return speed
