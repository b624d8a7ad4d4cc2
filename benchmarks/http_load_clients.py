"""The clients of `http_load.py`, in a process of their own: they stream, leave, or talk nonsense.

    python http_load_clients.py PORT CLIENTS SECONDS SEED

Prints a report as JSON: what was done, the statuses, and what was wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import attrs

from mistralrs_sdk import InferenceError
from mistralrs_sdk.cli.bench_http import Address, HttpClient

PATIENCE_S = 60.0
LONG = 300
"""Tokens of an answer that is not waited for."""
KINDS = {"read": 55, "leave": 33, "nonsense": 12}
"""How often a client does what, of a hundred times."""

NONSENSE: tuple[tuple[str, bytes, tuple[int, ...]], ...] = (
    ("/v1/completions", b"{", (400, 422)),
    ("/v1/completions", b"\xff\xfe", (400, 422)),
    ("/v1/completions", b"[]", (400, 422)),
    ("/v1/completions", b'{"model": "default", "prompt": {"a": 1}}', (400, 422)),
    ("/v1/completions", b'{"model": "default", "prompt": [99999999]}', (400, 422)),
    ("/v1/completions", b'{"model": "default", "prompt": "x", "max_tokens": -3}', (400, 422)),
    ("/v1/completions", b'{"model": "default", "prompt": "x", "temperature": "hot"}', (400, 422)),
    ("/v1/chat/completions", b'{"model": "default", "messages": 5}', (400, 422)),
    ("/v1/chat/completions", b'{"model": "default", "messages": [{"role": 7}]}', (400, 422)),
    ("/v1/chat/completions", b'{"model": "nobody", "messages": [{"role": "user"}]}', (400, 404)),
    ("/v1/chat/completions", b'{"messages": [], "stream": true}', (400, 422)),
    ("/v1/embeddings", b'{"model": "default", "input": "x"}', (400, 404, 422, 501)),
    ("/nowhere", b"{}", (404, 405)),
)
"""A path, a body, and the statuses that are right."""


@attrs.frozen(kw_only=True)
class Case:
    """A request, and the text it must bring."""

    path: str
    body: dict[str, Any]
    text: str = ""


@attrs.define
class Tally:
    """What was done, what was answered, and what was wrong."""

    counts: Counter[str] = attrs.field(factory=Counter)
    statuses: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)


def make_cases() -> list[Case]:
    """Chats and raw prompts, greedy and seeded, short and long."""
    rng = random.Random(7)
    words = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")
    cases = []
    for number in range(24):
        said = " ".join(rng.choice(words) for _ in range(rng.randint(3, 40)))
        body: dict[str, Any] = {
            "model": "default",
            "stream": True,
            "max_tokens": rng.choice((4, 16, 48)),
            "ignore_eos": True,
        }
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        if number % 3:
            body["messages"] = [{"role": "user", "content": said}]
            cases.append(Case(path="/v1/chat/completions", body=body))
        else:
            cases.append(Case(path="/v1/completions", body=body | {"prompt": said}))
    return cases


async def read(client: HttpClient, case: Case, *, leave_after: int | None = None) -> str:
    """The text of an answer, or the beginning of a long one: then the connection is cut."""
    pieces: list[str] = []
    body = case.body if leave_after is None else case.body | {"max_tokens": LONG}
    async with contextlib.aclosing(client.events(case.path, body)) as events:
        async for event in events:
            for choice in event.get("choices") or ():
                piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                pieces.append(piece or "")
            if leave_after is not None and len(pieces) >= leave_after:
                break
    return "".join(pieces)


async def nonsense(port: int, rng: random.Random, tally: Tally) -> None:
    """Send what no server can answer, or only the beginning of something."""
    path, body, right = rng.choice(NONSENSE)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        kind = rng.randrange(10)
        if kind == 0:
            writer.write(rng.randbytes(200) + b"\r\n\r\n")
            right = (400,)
        elif kind == 1:  # a body that is promised and never comes
            writer.write((head + "Content-Length: 5000\r\n\r\n").encode() + body)
            await writer.drain()
            return
        else:
            writer.write((head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body)
        await writer.drain()
        words = (await reader.readline()).split()
        status = int(words[1]) if len(words) > 1 else 0
        tally.statuses[str(status)] += 1
        if status not in right:
            tally.failures.append(f"{path} {body!r:.60} was answered with {status}")
    finally:
        writer.close()


async def one(
    client: HttpClient, port: int, cases: list[Case], rng: random.Random, tally: Tally
) -> None:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    case = rng.choice(cases)
    tally.counts[kind] += 1
    if kind == "nonsense":
        await nonsense(port, rng, tally)
    elif kind == "leave":
        if rng.random() < 0.3:  # before anything came, perhaps while it waits its turn
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.1):
                    await read(client, case, leave_after=LONG)
        else:
            await read(client, case, leave_after=rng.randint(1, 8))
    else:
        text = await read(client, case)
        tally.statuses["200"] += 1
        if text != case.text:
            tally.failures.append(f"{case.body} brought {text!r:.80}, alone {case.text!r:.80}")


async def client_loop(
    port: int, cases: list[Case], rng: random.Random, tally: Tally, *, until: float
) -> None:
    """One client: a request after the other, until the time is over."""
    client = HttpClient(Address.parse(f"http://127.0.0.1:{port}"))
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await one(client, port, cases, rng, tally)
        except TimeoutError:
            tally.failures.append(f"no end within {PATIENCE_S:g} s")
        except (InferenceError, OSError, EOFError, ValueError) as error:
            tally.failures.append(f"{type(error).__name__}: {error}")
    await client.aclose()


async def run(port: int, *, clients: int, seconds: float, seed: int) -> Tally:
    """Learn the texts one by one, then let all clients loose."""
    alone = HttpClient(Address.parse(f"http://127.0.0.1:{port}"))
    cases = [attrs.evolve(case, text=await read(alone, case)) for case in make_cases()]
    await alone.aclose()
    tally = Tally()
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            rng = random.Random(seed * 100_000 + number)
            group.create_task(client_loop(port, cases, rng, tally, until=until))
    return tally


def main() -> None:
    port, clients, seconds, seed = sys.argv[1:]
    tally = asyncio.run(
        run(int(port), clients=int(clients), seconds=float(seconds), seed=int(seed))
    )
    print(json.dumps(attrs.asdict(tally)))


if __name__ == "__main__":
    main()
