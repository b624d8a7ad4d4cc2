"""The ways a request of the soak can end, and how each answer is checked."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import attrs
from soak_cases import CONTEXT, Case, TinyModel

from mistralrs_sdk import InferenceError, Model, RequestBuilder, RequestError
from mistralrs_sdk.engine.engine import Engine


@attrs.define
class Tally:
    """What happened so far."""

    counts: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)

    def fail(self, problem: str) -> None:
        self.failures.append(problem)
        print(f"WRONG: {problem}", flush=True)


@attrs.frozen
class Run:
    """One model under one configuration, and the book its requests write into."""

    model: Model
    tiny: TinyModel
    cases: tuple[Case, ...]
    tally: Tally

    def check(self, case: Case, answer: Iterable[Any], *, canceled: bool = False) -> None:
        """Compare a whole answer; with `canceled`, choices may have been cut short by us."""
        choices = {c.index: c for c in answer}
        found = {i: (text_of(c), c.finish_reason, c.stop_reason) for i, c in choices.items()}
        for choice in range(case.sampling.n_choices):
            ending = self.tiny.ending(case, choice, context=self.model.max_sequence_length())
            wanted = (ending.text, ending.finish_reason, ending.stop_reason)
            got = found.get(choice)
            if canceled and got is not None and got[1] == "canceled":
                self.check_start(case, {choice: got[0]})
            elif got != wanted:
                self.tally.fail(f"{self.tiny.name}: choice {choice} {got} != {wanted} of {case}")
            elif ending.logprobs and ending.logprobs != logprobs_of(choices[choice]):
                self.tally.fail(f"{self.tiny.name}: choice {choice} has other logprobs of {case}")
            else:
                self.tally.counts["texts compared"] += 1

    def check_start(self, case: Case, texts: dict[int, str]) -> None:
        """Compare an answer that was cut short: it must begin like the whole one."""
        for choice, text in texts.items():
            whole = self.tiny.whole(case, choice)
            # what a cut leaves of a character is U+FFFD
            if not whole.startswith(text.rstrip("\ufffd")):
                self.tally.fail(f"{self.tiny.name}: {text!r} does not begin {whole!r} of {case}")
            else:
                self.tally.counts["starts compared"] += 1

    def check_usage(self, case: Case, usage: Any) -> None:
        """Compare the token counts, as far as they are known."""
        context = self.model.max_sequence_length()
        numbers = range(case.sampling.n_choices)
        endings = [self.tiny.ending(case, i, context=context) for i in numbers]
        counts = [ending.num_tokens for ending in endings]
        if usage.prompt_tokens != len(case.prompt_ids):
            self.tally.fail(f"{usage.prompt_tokens} prompt tokens for {case}")
        if None not in counts and usage.completion_tokens != sum(counts):
            self.tally.fail(f"{usage.completion_tokens} tokens, not {counts}, for {case}")


def text_of(choice: Any) -> str:
    return choice.text if hasattr(choice, "text") else choice.message.content


def logprobs_of(choice: Any) -> tuple[tuple[str, float], ...]:
    content = None if choice.logprobs is None else choice.logprobs.content
    return tuple((entry.token, entry.logprob) for entry in content or ())


def settings_of(case: Case) -> RequestBuilder:
    """All that the case asks for but its prompt."""
    asked = RequestBuilder().set_sampling(case.sampling)
    return asked.set_constraint(case.constraint).set_adapter(case.adapter)


def chat_request(case: Case) -> RequestBuilder:
    return settings_of(case).add_message("user", case.text)


async def send(run: Run, case: Case) -> None:
    """Send and check the whole answer."""
    if case.text is None:
        answer: Any = await run.model.send_completion_request(case.prompt_ids, settings_of(case))
    else:
        answer = await run.model.send_chat_request(chat_request(case))
    run.check(case, answer.choices)
    run.check_usage(case, answer.usage)


async def stream_to_end(run: Run, case: Case, rng: random.Random) -> None:
    """Read all chunks, sometimes slowly; joined they are the whole answer."""
    texts: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    ends: dict[int, Any] = {}
    usage = None
    slow = rng.random() < 0.2
    async with await run.model.stream_chat_request(chat_request(case)) as stream:
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += 1
            parts.setdefault(choice.index, []).append(choice.delta.content or "")
            if choice.finish_reason is not None:
                ends[choice.index] = choice
            usage = chunk.usage
            if slow:
                await asyncio.sleep(rng.random() * 0.02)
        whole = await stream.collect()
    run.check(case, whole.choices)
    run.check_usage(case, usage)
    for choice in whole.choices:
        if "".join(parts[choice.index]) != text_of(choice) or choice.index not in ends:
            run.tally.fail(f"the chunks {parts[choice.index]} do not make up {choice} of {case}")


async def leave(run: Run, case: Case, rng: random.Random) -> None:
    """Break out of a stream after some chunks."""
    texts: dict[int, str] = {}
    wanted = rng.randint(1, 12)
    async with await run.model.stream_chat_request(chat_request(case)) as stream:
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            wanted -= 1
            if not wanted:
                break
    run.check_start(case, texts)
    await check_gone(run, stream.id, "left")


async def abort(run: Run, case: Case, rng: random.Random) -> None:
    """Abort by id, then read on: the stream ends, with "canceled" unless it was over before."""
    async with await run.model.stream_chat_request(chat_request(case)) as stream:
        for _ in range(rng.randint(0, 6)):
            if await anext(stream, None) is None:
                break
        run.model.abort(stream.id)
        await check_gone(run, stream.id, "aborted")
        answer = await stream.collect()
    run.check(case, answer.choices, canceled=True)


async def drop(run: Run, case: Case, rng: random.Random) -> None:
    """Forget a stream that still runs, plainly or inside a reference cycle."""
    stream = await run.model.stream_chat_request(chat_request(case))
    for _ in range(rng.randint(0, 4)):
        await anext(stream, None)
    id, in_cycle = stream.id, rng.random() < 0.2
    if in_cycle:
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    if in_cycle:
        gc.collect()
    await asyncio.sleep(0)  # the finalizer's abort takes one turn of the loop
    await check_gone(run, id, "dropped")


async def cancel(run: Run, case: Case, rng: random.Random) -> None:
    """Cancel the task that waits for an answer."""
    task = asyncio.create_task(send(run, case))
    await asyncio.sleep(rng.random() ** 2 * 0.3)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def time_out(run: Run, case: Case, rng: random.Random) -> None:
    """Wait for an answer not long enough, perhaps."""
    try:
        await asyncio.wait_for(send(run, case), timeout=rng.random() ** 2 * 0.3)
    except TimeoutError:
        run.tally.counts["timeouts"] += 1


async def set_deadline(run: Run, case: Case, rng: random.Random) -> None:
    """Let the engine end the request, if it is not faster."""
    asked = chat_request(case).with_deadline(0.001 + rng.random() ** 2 * 0.3)
    try:
        answer = await run.model.send_chat_request(asked)
    except InferenceError as error:
        if "its deadline passed" not in str(error):
            raise
        run.tally.counts["deadlines passed"] += 1
    else:
        run.check(case, answer.choices)


async def ask_wrongly(run: Run, case: Case, rng: random.Random) -> None:
    """Send what must be refused."""
    size = rng.choice((0, run.model.max_sequence_length()))
    try:
        await run.model.send_completion_request((case.prompt_ids * CONTEXT)[:size], case.sampling)
    except RequestError:
        return
    run.tally.fail(f"a prompt of {size} tokens was accepted")


Act = Callable[[Run, Case, random.Random], Awaitable[None]]
ENDS: dict[str, tuple[int, Act]] = {
    "sent": (30, lambda run, case, rng: send(run, case)),
    "streamed": (20, stream_to_end),
    "left": (10, leave),
    "aborted": (10, abort),
    "dropped": (10, drop),
    "task cancelled": (10, cancel),
    "wait_for": (10, time_out),
    "deadline": (5, set_deadline),
    "refused": (3, ask_wrongly),
}
"""How requests end, and how often."""
NEEDS_CHAT = ("streamed", "left", "aborted", "dropped", "deadline")


async def live_requests(run: Run) -> set[int]:
    """The ids of the requests in the engine, whose pool is verified on the way."""

    def look(engine: Engine) -> set[int]:
        engine.scheduler.check()
        return {s.request.id for s in (*engine.scheduler.running, *engine.scheduler.waiting)}

    # not public: only tests look into the scheduler
    return await run.model.inner().thread.call(look)


async def check_gone(run: Run, id: str, how: str) -> None:
    """Nothing of a request is left in the engine by the time it takes the next command."""
    if int(id.rpartition("-")[2]) in await live_requests(run):
        run.tally.fail(f"{id} was {how} and is still in the engine")
