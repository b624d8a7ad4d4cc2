"""This package as a contender of `peers.py`: chats through its public API, one stream a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peers_work import Answer, Ask, Load

from mistralrs_sdk import Model, ModelBuilder, RequestBuilder, SamplingParams

RAW_TEMPLATE = "{{ messages[0]['content'] }}"
"""The prompt as it is: all contenders get the same tokens."""


def start(place: str, *, threads: int, isq: str | None = None) -> Callable[[Load], list[Answer]]:
    """Load the model; returns what answers a load. `isq` quantises while loading."""
    builder = ModelBuilder(place).with_force_cpu().with_num_threads(threads)
    builder = builder.with_chat_template(RAW_TEMPLATE).with_max_num_seqs(32)
    if isq is not None:
        builder = builder.with_isq(isq)
    # its loop lives as long as the process, and so does the model
    runner = asyncio.Runner()
    model = runner.run(builder.build())
    print(model.describe())
    return lambda load: runner.run(answer_all(model, load))


async def answer_all(model: Model, load: Load) -> list[Answer]:
    """Let the clients work through the requests."""
    waiting = iter(load.asks)

    async def client() -> list[Answer]:
        return [await answer(model, ask) for ask in waiting]

    answers = await asyncio.gather(*(client() for _ in range(load.at_once)))
    return [each for found in answers for each in found]


async def answer(model: Model, ask: Ask) -> Answer:
    """Send one request and note when its chunks come.

    Raises:
        RuntimeError: the model saw other tokens, or gave fewer, than were asked for.
    """
    sampling = SamplingParams(top_k=1, max_len=ask.new_tokens, ignore_eos=True)
    request = RequestBuilder().add_message("user", ask.text).set_sampling(sampling)
    arrivals, usage = [], None
    sent = time.perf_counter()
    async with await model.stream_chat_request(request) as stream:
        async for chunk in stream:
            arrivals.append(time.perf_counter())
            usage = chunk.usage
    if usage is None or usage.prompt_tokens != len(ask.prompt_ids):
        read = usage and usage.prompt_tokens
        raise RuntimeError(f"the prompt of {len(ask.prompt_ids)} tokens was read as {read}")
    if usage.completion_tokens != ask.new_tokens:
        raise RuntimeError(f"{usage.completion_tokens} tokens came for {ask.new_tokens}")
    return Answer(sent=sent, arrivals=arrivals, tokens=usage.completion_tokens)
