"""The traffic of the soak test: what clients ask, how they ask it, and whether they get it."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import aiohttp
from testproposers import ALPHABET

BASE, ADAPTER = "base", "adapter"
MAX_MODEL_LEN = 512
ANSWER_SECONDS = 120
MOST_FAILURES = 20
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
WORDS = ["the", "parser", "reads", "a", "file", "and", "writer", "writes", "that", "1", "2"]
PREDICTION = "specplug_prediction_token_ids"
WRONG_OPTIONS = ({"specplug_num_speculative_tokens": "many"}, {"specplug_no_such_option": 1})


@dataclass(frozen=True)
class Case:
    """What is asked: where, and the body but for the model and how the answer is delivered."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What was answered; no reason to finish if the client hung up before the end."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None

    def agrees(self, expected: "Answer") -> bool:
        """Return whether this is ``expected`` or, if the client hung up, how that begins."""
        if self.finish_reason is None:
            return expected.token_ids[: len(self.token_ids)] == self.token_ids
        return self == expected


class ServerError(RuntimeError):
    """The server did not answer, or not with an answer."""


def make_cases(count: int, seed: int) -> list[Case]:
    """Return greedy requests of all kinds, in turns."""
    rng = random.Random(seed)

    def completion(length: int, most: int, **more: Any) -> tuple[str, dict[str, Any]]:
        # A phrase that comes back, so that there is something to draft from.
        phrase = rng.choices(ALPHABET, k=rng.randint(3, 12))
        prompt = list(islice(cycle(phrase), length))
        return "/v1/completions", {"prompt": prompt, "max_tokens": most, **more}

    def chat() -> tuple[str, dict[str, Any]]:
        content = " ".join(rng.choices(WORDS, k=rng.randint(3, 30)))
        messages = [{"role": "user", "content": content}]
        return "/v1/chat/completions", {"messages": messages, "max_tokens": rng.randint(20, 60)}

    kinds = {
        "phrases": lambda: completion(rng.randint(8, 60), rng.randint(20, 120)),
        "chat": chat,
        "long prompt": lambda: completion(rng.randint(200, 380), rng.randint(20, 60)),
        "no end": lambda: completion(rng.randint(8, 60), rng.randint(60, 200), ignore_eos=True),
        "one-token prompt": lambda: completion(1, rng.randint(20, 80)),
        "one output token": lambda: completion(rng.randint(8, 60), 1),
        "stop strings": lambda: completion(
            rng.randint(8, 60), rng.randint(40, 120), stop=rng.sample("ABCDEFGHIJKL", 2)
        ),
        "JSON schema": lambda: completion(20, 32, response_format=RESPONSE_FORMAT),
        "to the model's length": lambda: completion(
            length := rng.randint(400, 500), MAX_MODEL_LEN - length, ignore_eos=True
        ),
    }
    return [Case(kind, *kinds[kind]()) for kind in islice(cycle(kinds), count)]


async def ask(
    session: aiohttp.ClientSession,
    case: Case,
    model: str = BASE,
    *,
    stream: bool = False,
    hang_up: int | None = None,
    **more: Any,
) -> Answer:
    """Ask once.

    Args:
        session: a session whose base address is the server's.
        case: what to ask.
        model: whom to ask.
        stream: whether the answer comes in pieces.
        hang_up: after how many pieces to hang up, or, with no stream, hundredths of a second.
        more: what to add to the body.

    Raises:
        ServerError: there was no whole answer.
    """
    body = {
        "model": model, "temperature": 0, "stream": stream, "return_token_ids": True,
        **case.body, **more,
    }  # fmt: skip
    patience = hang_up / 100 if hang_up is not None and not stream else ANSWER_SECONDS
    try:
        async with asyncio.timeout(patience), session.post(case.path, json=body) as response:
            if response.status != 200:
                raise ServerError(f"{response.status}: {await response.text()}")
            if not stream:
                return _answer([await response.json()])
            pieces = []
            async for line in response.content:
                if line.startswith(b"data: {"):
                    pieces.append(json.loads(line[6:]))
                    if len(pieces) == hang_up:
                        response.close()
                        return _answer(pieces)
            if (answer := _answer(pieces)).finish_reason is None:
                raise ServerError("the stream broke off")
            return answer
    except TimeoutError as error:
        if hang_up is None or stream:
            raise ServerError(f"no whole answer in {ANSWER_SECONDS} s") from error
        return Answer((), "", None)
    except aiohttp.ClientError as error:
        raise ServerError(repr(error)) from error


def _answer(pieces: Sequence[dict[str, Any]]) -> Answer:
    token_ids: list[int] = []
    text, finish_reason = "", None
    for piece in pieces:
        if "error" in piece:
            raise ServerError(str(piece["error"]))
        for choice in piece["choices"]:
            said = choice.get("delta") or choice.get("message")
            text += (said["content"] if said and "content" in said else choice.get("text")) or ""
            token_ids += choice.get("token_ids") or []
            finish_reason = choice["finish_reason"] or finish_reason
    return Answer(tuple(token_ids), text, finish_reason)


@dataclass
class Traffic:
    """Clients that ask cases at random, and what came of it.

    Attributes:
        cases: what they ask.
        expected: the right answers, by model and number of the case; what is not in it is asked,
            but not compared.
        options: what requests may bring beside wrong options, as ``vllm_xargs``; a prediction is
            made from the right answer.
        seed: makes each client ask the same in the same order, for as long as it gets.
        counts: how many requests there were of what sort.
        compared: how many greedy answers were compared.
        differences: those that are wrong.
        failures: requests that got no answer.
    """

    cases: Sequence[Case]
    expected: dict[tuple[str, int], Answer]
    options: Sequence[dict[str, Any]]
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run(self, session: aiohttp.ClientSession, seconds: float, num_clients: int) -> None:
        """Let clients ask for a while, and wait for their last answers."""
        until = asyncio.get_running_loop().time() + seconds

        async def client(number: int) -> None:
            rng = random.Random(f"{self.seed} {number}")
            while asyncio.get_running_loop().time() < until:
                await self._one(session, rng)
                if len(self.failures) >= MOST_FAILURES:
                    return

        await asyncio.gather(*map(client, range(num_clients)))

    async def _one(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        model = ADAPTER if rng.random() < 0.2 else BASE
        number = rng.randrange(len(self.cases))
        expected = self.expected.get((model, number))
        more: dict[str, Any] = {"stream": rng.random() < 0.6}
        if sampled := rng.random() < 0.2:
            more |= {"temperature": rng.uniform(0.5, 1.5), **rng.choice([{}, {"top_k": 20}])}
        draw = rng.random()
        wrong = draw > 0.95
        if draw < 0.2:
            more["hang_up"] = rng.randint(1, 30)
        elif wrong:
            more["vllm_xargs"] = rng.choice(WRONG_OPTIONS)
        elif draw > 0.5:
            more["vllm_xargs"] = self._option(rng, expected)
        try:
            answer = await ask(session, self.cases[number], model, **more)
        except ServerError as error:
            self.failures.append(f"{self.cases[number].kind}, {more}: {error}")
            return
        hung_up = answer.finish_reason is None
        self.counts.update(
            {
                "requests": 1,
                model: 1,
                "streamed": more["stream"],
                "sampled": sampled,
                "hung up": hung_up,
                "wrong options": wrong,
            }
        )
        if sampled or expected is None or (hung_up and not answer.token_ids):
            return
        self.compared += 1
        if not answer.agrees(expected):
            case = self.cases[number]
            self.differences.append(
                {"kind": case.kind, "case": number, "model": model, "asked": more,
                 "expected": expected, "answer": answer}
            )  # fmt: skip

    def _option(self, rng: random.Random, expected: Answer | None) -> dict[str, Any]:
        option = rng.choice(self.options)
        if PREDICTION in option and expected is not None:
            return {PREDICTION: [one for one in expected.token_ids if rng.random() < 0.9]}
        return option
