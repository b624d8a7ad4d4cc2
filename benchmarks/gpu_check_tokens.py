"""Requests in storms, whose tokens must be those of each request alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs
import torch
from gpu_check_answers import (
    TIES,
    Answer,
    Tally,
    answers_alone,
    check_with_transformers,
    drive,
    greedy,
    ids_of,
    prompts,
)
from gpu_check_models import TOKENS, builder, checkpoint
from gpu_check_report import Book, Check, LeftOutError

from mistralrs_sdk import Model
from mistralrs_sdk.attention import flashinfer
from mistralrs_sdk.engine.request import Request

IDLE_SECONDS = 10.0
STALL_SECONDS = 30.0
"""A request that has no news for so long hangs."""


@attrs.frozen(kw_only=True)
class Counts:
    """How much is asked."""

    prompts: int
    longest: int
    answer: int
    mixed: int
    storm: int
    clients: int
    groups: tuple[int, ...]
    """Requests at once where graphs are compared with what runs without them."""


FULL = Counts(
    prompts=64, longest=200, answer=48, mixed=2000, storm=200, clients=64,
    groups=(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21, 33, 40),
)  # fmt: skip
TINY = Counts(prompts=6, longest=40, answer=16, mixed=30, storm=24, clients=8, groups=(1, 3, 9))


async def check_exact(book: Book, work: Path, *, device: torch.device, counts: Counts) -> None:
    """In float32, by torch's attention: every token must be right."""
    place = checkpoint(TOKENS, work, device=device)
    base = builder(place, device=device, dtype="f32", seqs=counts.clients)
    answers: list[Answer] = []
    with book.check("one at a time against transformers") as check:
        async with await base.build() as model:
            answers = await _alone(model, counts)
        check_with_transformers(check, answers, place, device=device)
    await check_storms(
        book, place, answers, device=device, dtype="f32", counts=counts, mixed=counts.mixed
    )


async def check_graphs(book: Book, work: Path, *, device: torch.device, counts: Counts) -> None:
    """In bfloat16, by FlashInfer and in graphs, as models run by default."""
    place = checkpoint(TOKENS, work, device=device)
    seqs = max(counts.groups)
    base = builder(place, device=device, dtype="bf16", seqs=seqs)
    answers: list[Answer] = []
    # with_flashinfer: where it is installed and cannot be had, these checks are to fail
    eager = base.with_flashinfer().with_cuda_graphs(False)
    with book.check("alone, by torch's attention") as check:
        async with await base.with_flashinfer(False).build() as model:
            answers = await _alone(model, counts)
        check.say(f"{len(answers)} answers")
    with book.check("FlashInfer against torch's attention") as check:
        require_flashinfer()
        async with await eager.build() as model:
            tally = await compare_groups(model, answers, counts.groups)
        tally.report(check)
    with book.check("graphs against eager") as check:
        require_flashinfer()
        async with await eager.with_prefix_cache_n(None).build() as model:
            alone = await _alone(model, counts)
        async with await base.with_flashinfer().with_cuda_graphs().build() as model:
            tally = await compare_groups(model, alone, counts.groups)
            tally.report(check)
            await report_graphs(check, model)
    with book.check("drawn on the device as on the host") as check:
        async with await base.with_prefix_cache_n(None).build() as model:
            await compare_draws(check, model, answers, counts)
    await check_storms(
        book, place, answers, device=device, dtype="bf16", counts=counts, mixed=counts.storm
    )


async def check_storms(
    book: Book,
    place: Path,
    answers: Sequence[Answer],
    *,
    device: torch.device,
    dtype: str,
    counts: Counts,
    mixed: int,
) -> None:
    """Many requests at once; in a cache too small for them; many of them left in the middle."""
    tie, room = TIES[dtype], counts.longest + counts.answer
    base = builder(place, device=device, dtype=dtype, seqs=counts.clients)
    # what one sequence may need, so that those beside it are preempted
    small = builder(place, device=device, dtype=dtype, seqs=counts.clients, kv_tokens=room)
    small = small.with_max_model_len(room)
    for name, made, count, leaving in (
        (f"{mixed} mixed requests", base, mixed, 0.0),
        ("preemption storm", small, counts.storm, 0.0),
        ("cancel storm", base, counts.storm, 0.6),
        ("cancel storm, preempting", small, counts.storm, 0.6),
    ):
        with book.check(name) as check:
            if not answers:
                raise RuntimeError("there are no answers to compare with")
            async with await made.build() as model:
                tally = Tally(tie)
                shortest = 1 if made is base else counts.answer // 2
                asked = draw_asks(count, answers, shortest=shortest, leaving=leaving)
                await ask_all(model, asked, tally, clients=counts.clients)
                tally.report(check)
                await expect_idle(check, model)
                metrics = await model.metrics()
                preempted, seen = metrics.preemptions, f"{metrics.preemptions} preemptions"
                if made is small and not leaving:
                    check.expect(preempted > 0, seen, preemptions=preempted)
                else:
                    check.say(f"{seen}, {metrics.prefix_hits} prefix hits", preemptions=preempted)


@attrs.frozen(kw_only=True)
class Ask:
    """A request, the answer its tokens are those of, and how it is to end."""

    answer: Answer
    request: Request
    length: int
    stops: bool = False
    leaves_after: int | None = None
    """Tokens after which nobody listens any more."""


def draw_asks(
    count: int, answers: Sequence[Answer], *, shortest: int, leaving: float, seed: int = 0
) -> list[Ask]:
    """Random lengths, stop tokens, choices and log probabilities; a part of them is left."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        answer = rng.choice(answers)
        length = rng.randint(shortest, len(answer.ids))
        kind = rng.choice(("plain", "plain", "stop", "choices", "logprobs"))
        options: dict = {"priority": rng.choice((0, 0, 1))}
        if kind == "stop":
            options["stop_ids"] = frozenset([answer.ids[length - 1]])
            length = answer.ids.index(answer.ids[length - 1]) + 1
        elif kind == "choices":
            options["sampling"] = {"n_choices": 2}
        elif kind == "logprobs":
            options["sampling"] = {"return_logprobs": True}
        most = len(answer.ids) if kind == "stop" else length
        leaves = rng.randint(0, length) if rng.random() < leaving else None
        asks.append(
            Ask(
                answer=answer,
                request=greedy(answer.prompt, most, **options),
                length=length,
                stops=kind == "stop",
                leaves_after=leaves,
            )
        )
    return asks


async def ask_all(model: Model, asks: Iterable[Ask], tally: Tally, *, clients: int) -> None:
    """Let the clients work through the requests."""
    waiting = iter(asks)

    async def client() -> None:
        for ask in waiting:
            await send(model, ask, tally)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def send(model: Model, ask: Ask, tally: Tally) -> None:
    """Send one request, read its tokens to the end or leave, and compare them."""
    stream = await model.inner().thread.submit(ask.request)
    found: dict[int, list[int]] = {i: [] for i in range(ask.request.sampling.n_choices)}
    ends: dict[int, str] = {}
    leaves = ask.leaves_after
    while len(ends) < len(found):
        if leaves is not None and len(found[0]) >= leaves:
            stream.close()
            break
        try:
            outputs = await asyncio.wait_for(stream.take(), STALL_SECONDS)
        except TimeoutError:
            text = f"request {ask.request.id} had no news for {STALL_SECONDS:.0f} s"
            raise RuntimeError(text) from None
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {ask.request.id} failed: {output.error}")
            found[output.choice] += output.token_ids
            if output.finish_reason is not None:
                ends[output.choice] = output.finish_reason
    left = len(ends) < len(found)
    tally.counts["left"] += left
    for choice, ids in found.items():
        whole = not left or choice in ends
        length = ask.length if whole else None
        ties = tally.ties
        tally.compare(ask.answer, ids, length=length, what=f"request {ask.request.id}")
        wanted = "stop" if ask.stops else "length"
        if whole and tally.ties == ties and ends[choice] != wanted:
            tally.wrong.append(f"request {ask.request.id} ended with {ends[choice]}, not {wanted}")


async def expect_idle(check: Check, model: Model) -> None:
    """Nothing is left in the engine, and every block is free, soon."""
    thread, end = model.inner().thread, time.monotonic() + IDLE_SECONDS
    while True:
        stats = await model.stats()
        if not stats.running and not stats.waiting and not stats.used_blocks:
            break
        if time.monotonic() > end:
            break
        await asyncio.sleep(0.01)
    await thread.call(lambda engine: engine.scheduler.check())
    left = stats.running + stats.waiting
    check.expect(
        left == 0 and stats.used_blocks == 0,
        f"{left} sequences and {stats.used_blocks} blocks left behind",
    )


def require_flashinfer() -> None:
    """Leave a check out where FlashInfer is not installed."""
    if (missing := flashinfer.flashinfer_missing()) is not None:
        raise LeftOutError(missing)


async def compare_groups(model: Model, answers: Sequence[Answer], groups: Sequence[int]) -> Tally:
    """As many requests at once as each group has, against the answers alone."""
    tally = Tally(TIES["bf16"])
    for size in groups:
        # as long as each other, so that the group decodes together to the end
        some = [answers[i % len(answers)] for i in range(size)]
        requests = [greedy(answer.prompt, len(answer.ids)) for answer in some]
        found = await model.inner().thread.call(_driver(requests))
        for answer, request in zip(some, requests, strict=True):
            ids = ids_of(found[request.id])
            tally.compare(answer, ids, length=len(answer.ids), what=f"one of {size}")
    return tally


async def report_graphs(check: Check, model: Model) -> None:
    """Steps must have been replayed, and no size of graph may have failed."""
    stats = await model.inner().thread.call(lambda engine: engine.runner.graphs.stats)
    ahead = (await model.metrics()).steps_ahead
    check.expect(stats.replayed > 0 and not stats.disabled, str(stats), replayed=stats.replayed)
    check.expect(ahead > 0, f"{ahead} steps launched ahead", ahead=ahead)


async def compare_draws(
    check: Check, model: Model, answers: Sequence[Answer], counts: Counts
) -> None:
    """Seeded draws, alone: with log probabilities the host draws, without them the device."""
    equal, settings = 0, ({"temperature": 0.8}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1})
    for number, answer in enumerate(answers):
        told = []
        for options in ({"return_logprobs": True}, {}):
            sampling = {"temperature": 1.0, "top_k": 0} | settings[number % 4] | options
            request = greedy(answer.prompt, counts.answer, sampling=sampling, seed=number)
            found = await model.inner().thread.call(_driver([request]))
            told.append(ids_of(found[request.id]))
        equal += told[0] == told[1]
    check.expect(
        equal == len(answers) > 0, f"{equal} of {len(answers)} answers are equal", equal=equal
    )


async def _alone(model: Model, counts: Counts) -> list[Answer]:
    asked = prompts(counts.prompts, longest=counts.longest, vocab=TOKENS.vocab)
    return await answers_alone(model, asked, counts.answer)


def _driver(requests: Sequence[Request]) -> Callable:
    return lambda engine: drive(engine, requests)
