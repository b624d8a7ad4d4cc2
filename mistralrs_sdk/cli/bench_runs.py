"""The runs of `bench`: one request at a time, clients in a closed loop, or requests at a rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from mistralrs_sdk import InferenceError
from mistralrs_sdk.cli.bench_numbers import (
    Answer,
    LoadResult,
    SingleResult,
    decode_result,
    first_token_result,
    load_result,
)
from mistralrs_sdk.cli.bench_targets import Target
from mistralrs_sdk.cli.bench_work import Job, Load, arrival_times, counted_prompt

Tick = Callable[[], None]
"""Called after each request."""

_WARM_TOKENS = 8


async def run_single(
    target: Target,
    cases: Sequence[tuple[int, int]],
    *,
    iterations: int,
    warmup: int,
    salt: int = 0,
    tick: Tick = lambda: None,
) -> list[SingleResult]:
    """Measure (prompt, new tokens) cases, one request at a time.

    A case with one new token is about the first token, any other about decoding.

    Raises:
        InferenceError: a request failed, or brought less than it should.
    """
    results = []
    for case, (prompt_tokens, new_tokens) in enumerate(cases):
        answers = []
        for iteration in range(warmup + iterations):
            prompt = counted_prompt(
                target.ids, prompt_tokens, iteration=iteration, case=case, salt=salt
            )
            answer = await target.answer(Job(prompt=prompt, new_tokens=new_tokens))
            if answer.error is not None:
                raise InferenceError(answer.error)
            if not answer.times or (new_tokens > 1 and answer.new_tokens < 2):
                raise InferenceError(
                    f"{target.name} brought {answer.new_tokens} of {new_tokens} tokens: does it "
                    "obey ignore_eos?"
                )
            if iteration >= warmup:
                answers.append(answer)
            tick()
        if new_tokens == 1:
            results.append(first_token_result(answers, prompt_tokens=prompt_tokens))
        else:
            results.append(decode_result(answers, new_tokens=new_tokens, depth=prompt_tokens))
    return results


async def run_load(
    target: Target,
    load: Load,
    jobs: Sequence[Job],
    *,
    warmup: Sequence[Job] = (),
    seed: int = 0,
    tick: Tick = lambda: None,
) -> LoadResult:
    """Send all jobs as the load says; those to warm up go first, shortened and not counted."""
    if warmup:
        short = [Job(prompt=job.prompt, new_tokens=_WARM_TOKENS) for job in warmup]
        await asyncio.gather(*[target.answer(job) for job in short])
    if load.concurrency is not None:
        answers = await _closed(target, jobs, load.concurrency, tick=tick)
    else:
        assert load.request_rate is not None, "a load has one of the two"
        arrivals = arrival_times(len(jobs), load.request_rate, seed=seed)
        answers = await _open(target, jobs, arrivals, tick=tick)
    return load_result(load, answers)


async def _closed(
    target: Target, jobs: Sequence[Job], concurrency: int, *, tick: Tick
) -> list[Answer]:
    waiting = iter(jobs)
    answers: list[Answer] = []

    async def client() -> None:
        for job in waiting:  # one iterator for all: each job is taken once
            answers.append(await target.answer(job))
            tick()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return answers


async def _open(
    target: Target, jobs: Sequence[Job], arrivals: Iterator[float], *, tick: Tick
) -> list[Answer]:
    loop = asyncio.get_running_loop()
    started = loop.time()
    answers: list[Answer] = []

    async def send(job: Job) -> None:
        answers.append(await target.answer(job))
        tick()

    async with asyncio.TaskGroup() as group:
        for job, arrival in zip(jobs, arrivals, strict=True):
            await asyncio.sleep(max(0.0, started + arrival - loop.time()))
            group.create_task(send(job))
    return answers
