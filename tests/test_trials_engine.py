"""Failures others met, as trials: scheduling, prefix cache, leaving early."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import pytest_asyncio

from mistralrs_sdk import (
    ConfigError,
    ModelBuilder,
    PagedAttentionMetaBuilder,
    RequestBuilder,
    RequestError,
    SamplingParams,
    TextMessages,
)
from mistralrs_sdk.engine.request import SampledToken
from mistralrs_sdk.engine.scheduler import Scheduled
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    expected,
    generated_ids,
    greedy,
    prompt,
    resident_bytes,
    tiny_builder,
)
from tests.script_model import RAW_TEMPLATE

LETTERS = "ABCDEFGHIJKLMNOP"
"""Sixteen characters that the tiny tokenizer never merges."""


def real_model(test):
    """The marks of a test on the real model, which shares one event loop with the others."""
    for mark in (
        pytest.mark.real_model,
        pytest.mark.timeout(300),
        pytest.mark.asyncio(loop_scope="module"),
    ):
        test = mark(test)
    return test


def smol_builder(path: Path) -> ModelBuilder:
    paged = PagedAttentionMetaBuilder().with_block_size(16).build()
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_max_model_len(512)
    return builder.with_max_num_seqs(8).with_paged_attn(paged)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smol(demo_model: Path):
    async with await smol_builder(demo_model).build() as model:
        yield model
        await assert_idle(model)


@attrs.define
class Recorder:
    """A runner that writes down which request computed how many tokens in which step."""

    inner: Any
    steps: list[dict[int, int]] = attrs.field(factory=list)

    def run(self, scheduled: Sequence[Scheduled]) -> Sequence[SampledToken | None]:
        self.steps.append({item.sequence.request.id: item.num_tokens for item in scheduled})
        return self.inner.run(scheduled)


async def record_steps(model) -> list[dict[int, int]]:
    """From now on, the request ids and token counts of every step."""

    def install(engine) -> list[dict[int, int]]:
        engine.runner = Recorder(engine.runner)
        return engine.runner.steps

    return await model.inner().thread.call(install)


async def read(model, request) -> tuple[str, list[int], list[float]]:
    """The streamed text, the most likely id at each position and the drawn ids' logprobs."""
    async with await model.stream_chat_request(request) as stream:
        choices = [chunk.choices[0] async for chunk in stream]
    entries = [entry for choice in choices for entry in choice.logprobs.content]
    return (
        "".join(choice.delta.content for choice in choices),
        [entry.top_logprobs[0].token_id for entry in entries],
        [entry.logprob for entry in entries],
    )


@pytest.mark.parametrize("cache", [None, 16])
async def test_preempted_requests_lose_and_repeat_nothing(cache):
    """Text, logprobs and order equal the solo run; recomputing stays below six times the least."""
    raw = tiny_builder().with_chat_template(RAW_TEMPLATE)
    asked = RequestBuilder().set_sampler_max_len(40).set_sampler_ignore_eos(True)
    asked = asked.set_sampler_topn_logprobs(1)
    requests = [asked.add_message("user", LETTERS[i:] + LETTERS[:i]) for i in range(4)]
    requests[1] = requests[1].set_sampler_temperature(1.0).set_sampler_seed(5)
    async with await raw.build() as model:
        assert len(await model.tokenize(LETTERS)) == 16
        solo = [await read(model, request) for request in requests]
    tight = tiny_builder(kv_tokens=96).with_chat_template(RAW_TEMPLATE).with_max_num_seqs(4)
    tight = tight.with_max_num_batched_tokens(8).with_prefix_cache_n(cache)
    async with await tight.build() as model:
        together = await asyncio.gather(*(read(model, request) for request in requests))
        stats = await model.stats()
        await assert_idle(model)

    for (text, ids, logprobs), (solo_text, solo_ids, solo_logprobs) in zip(
        together, solo, strict=True
    ):
        assert (text, ids) == (solo_text, solo_ids)
        assert logprobs == pytest.approx(solo_logprobs, abs=1e-4)
        assert len(logprobs) == 40
    assert stats.preemptions > 0
    assert stats.computed_tokens < 6 * 4 * (16 + 39)


async def test_a_request_larger_than_the_pool_blocks_nobody():
    """Refused at once if its prompt is too long, ended by the capacity if its answer is."""
    async with await tiny_builder(kv_tokens=128).build() as model:
        with anyio.fail_after(10):
            with pytest.raises(RequestError, match=r"200 tokens.*128"):
                await model.send_completion_request(prompt(200))
            assert await continue_ids(model, prompt(10), 4) == expected(
                "llama", tuple(prompt(10)), 4
            )
        with anyio.fail_after(10):
            large, neighbour = await asyncio.gather(
                model.send_completion_request(prompt(60), greedy(400)),
                continue_ids(model, prompt(10), 20),
            )
        assert large.choices[0].finish_reason == "length"
        assert large.usage.total_tokens == 128
        assert generated_ids(large)[:8] == expected("llama", tuple(prompt(60)), 8)
        assert neighbour == expected("llama", tuple(prompt(10)), 20)
        await assert_idle(model)


async def test_a_long_prefill_does_not_stall_a_stream():
    """While a 400-id prompt arrives in chunks of 32, the stream gets a token every two steps."""
    builder = tiny_builder(kv_tokens=1024).with_max_num_batched_tokens(32)
    async with await builder.build() as model:
        stream = await model.stream_chat_request(endless())
        streaming = int(stream.id.rpartition("-")[2])
        await anext(stream)
        steps = await record_steps(model)
        response = await model.send_completion_request(prompt(400), greedy(1))
        await stream.aclose()
        await assert_idle(model)

    arriving = int(response.id.rpartition("-")[2])
    first = next(i for i, step in enumerate(steps) if arriving in step)
    last = max(i for i, step in enumerate(steps) if arriving in step)
    assert last - first >= 400 // 32
    for i in range(first, last):
        assert streaming in steps[i] or streaming in steps[i + 1]


@pytest.mark.parametrize("name", ["llama", "mistral_swa"])
@pytest.mark.parametrize("cache", [None, 16])
async def test_chunk_and_block_boundaries(name, cache):
    """Prompt lengths and budgets around blocks of 16 give the oracle's ids, also sent twice."""
    paged = PagedAttentionMetaBuilder().with_block_size(16).build()
    builder = tiny_builder(name).with_paged_attn(paged).with_max_num_seqs(1)
    builder = builder.with_prefix_cache_n(cache).with_max_model_len(128)
    prompts = [list(range(3, 3 + length)) for length in (15, 16, 17, 31, 32, 33, 48)]
    oracle = [expected(name, tuple(ids), 20) for ids in prompts]
    for budget in (1, 7, 8, 16, 17, 32, 1000):
        async with await builder.with_max_num_batched_tokens(budget).build() as model:
            for _ in range(2 if cache else 1):
                assert [await continue_ids(model, ids, 20) for ids in prompts] == oracle


@real_model
async def test_max_num_seqs_is_kept_and_the_queue_is_fair(demo_model, smol):
    """Caps of 1 and 2: all finish, in order, never more at once, with their solo texts."""
    prompts = [f"The number after {i} is" for i in range(8)]
    params = SamplingParams(top_k=1, max_len=3)

    async def text(model, prompt_text: str) -> str:
        return (await model.send_completion_request(prompt_text, params)).choices[0].text

    solo = [await text(smol, p) for p in prompts]
    for cap, count in ((1, 5), (2, 8)):
        async with await smol_builder(demo_model).with_max_num_seqs(cap).build() as model:
            steps = await record_steps(model)
            assert await text(model, prompts[0]) == solo[0]
            tasks = [asyncio.create_task(text(model, p)) for p in prompts[:count]]
            with anyio.fail_after(60):
                while not (await model.stats()).waiting:
                    await asyncio.sleep(0.002)
            cancelled = count - 2 if cap == 2 else None
            if cancelled is not None:
                tasks[cancelled].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            await assert_idle(model)
        for i, answer in enumerate(answers):
            if i == cancelled:
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert answer == solo[i]
        assert max(map(len, steps)) == cap
        order = list(dict.fromkeys(request for step in steps for request in step))
        assert order == sorted(order)
        assert len(order) == 1 + count - (cancelled is not None)


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap):
    """Where it is written."""
    with pytest.raises(ConfigError, match=rf"with_max_num_seqs\({cap}\)"):
        ModelBuilder("x").with_max_num_seqs(cap)


@real_model
@pytest.mark.parametrize("length", [48, 53])
async def test_the_same_prompt_again_gives_the_same_answer(smol, length):
    """Three times in turn and three at once: equal, never empty, only the cached share differs."""
    ids = [1000 * length // 48 + 7 * i for i in range(length)]
    await smol.clear_prefix_cache()
    answers = [await smol.send_completion_request(ids, greedy(12)) for _ in range(3)]
    answers += await asyncio.gather(
        *(smol.send_completion_request(ids, greedy(12)) for _ in range(3))
    )

    assert answers[0].choices[0].text
    assert {tuple(generated_ids(answer)) for answer in answers} == {
        tuple(generated_ids(answers[0]))
    }
    cached = [answer.usage.cached_tokens for answer in answers]
    assert cached == [0] + [(length - 1) // 16 * 16] * 5
    assert {(a.usage.prompt_tokens, a.usage.completion_tokens) for a in answers} == {(length, 12)}


async def converse(model, system: str, word: str, *, turns: int, max_len: int) -> list[str]:
    """A chat of several turns that mentions its own code word in the first."""
    chat = TextMessages().add_message("system", system)
    answers = []
    for turn in range(turns):
        asked = f"My code word is {word}." if turn == 0 else f"Question {turn}: what is next?"
        chat = chat.add_message("user", asked)
        request = RequestBuilder.from_messages(chat).set_sampler_max_len(max_len)
        response = await model.send_chat_request(request)
        answers.append(response.choices[0].message.content)
        chat = chat.add_message("assistant", answers[-1])
    return answers


async def test_later_turns_of_many_conversations_do_not_mix():
    """Sixteen chats of three turns at once from one system turn equal the serial, uncached run."""
    system, words = LETTERS * 12, [f"W{i:02}" for i in range(16)]
    async with await tiny_builder().with_prefix_cache_n(None).build() as model:
        serial = [await converse(model, system, word, turns=3, max_len=8) for word in words]
    async with await tiny_builder().build() as model:
        together = await asyncio.gather(
            *(converse(model, system, word, turns=3, max_len=8) for word in words)
        )
        stats = await model.stats()
        assert stats.prefix_hits >= 32  # every later turn
        await assert_idle(model)
    assert together == serial


@real_model
async def test_code_words_stay_in_their_conversation(demo_model, smol):
    """Three chats of two turns on the real model, at once and cached, as serial and uncached."""
    system = "You are a patient assistant who answers in one short sentence. " * 3
    words = ["Apricot", "Walrus", "Teapot"]
    async with await smol_builder(demo_model).with_prefix_cache_n(None).build() as model:
        serial = [await converse(model, system, word, turns=2, max_len=4) for word in words]
    together = await asyncio.gather(
        *(converse(smol, system, word, turns=2, max_len=4) for word in words)
    )
    assert together == serial
    for i, answers in enumerate(together):
        for other in words[:i] + words[i + 1 :]:
            assert (other in " ".join(answers)) == (other in " ".join(serial[i]))


async def test_two_models_never_share_cached_blocks():
    """Other weights under the same tokenizer, or the same model built again, start cold."""
    ids = prompt(64)

    async def ask(model, name: str) -> int:
        response = await model.send_completion_request(ids, greedy(8))
        assert generated_ids(response) == expected(name, tuple(ids), 8)
        return response.usage.cached_tokens

    async with (
        await tiny_builder("llama").build() as llama,
        await tiny_builder("qwen2").build() as qwen,
    ):
        cached = [await ask(m, n) for m, n in [(llama, "llama"), (qwen, "qwen2")] * 2]
        assert cached == [0, 0, 56, 56]
    async with await tiny_builder("llama").build() as again:
        assert [await ask(again, "llama"), await ask(again, "llama")] == [0, 56]


async def leave_by_break(model) -> None:
    stream = await model.stream_chat_request(endless())
    taken = 0
    async for _chunk in stream:
        taken += 1
        if taken == 3:
            break
    del stream
    gc.collect(0)


async def leave_by_cancel_inside_anext(model) -> None:
    stream = await model.stream_chat_request(endless())
    await anext(stream)

    async def drain() -> None:
        async for _chunk in stream:
            pass

    task = asyncio.create_task(drain())
    await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancel_while_asleep(model) -> None:
    asleep = asyncio.Event()

    async def consume() -> None:
        async for _chunk in await model.stream_chat_request(endless()):
            asleep.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await asleep.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def leave_by_timeout(model) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(model.send_chat_request(endless()), 0.005)


async def leave_by_abort(model) -> None:
    stream = await model.stream_chat_request(endless())
    await anext(stream)
    reader = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    model.abort(stream.id)
    with anyio.fail_after(10):
        response = await reader
    assert response.choices[0].finish_reason == "canceled"


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_cancel_inside_anext,
        leave_by_cancel_while_asleep,
        leave_by_timeout,
        leave_by_abort,
    ],
)
async def test_leaving_fifty_times_leaves_nothing(leave):
    """Each way out: idle within a second, tasks and memory do not grow, the next request runs."""
    async with await tiny_builder().build() as model:
        for i in range(50):
            await leave(model)
            if i == 10:
                before = resident_bytes()
        gc.collect()
        await assert_idle(model)
        assert len(asyncio.all_tasks()) <= 2
        assert resident_bytes() < 1.05 * before
        await model.clear_prefix_cache()
        stats = await model.stats()
        assert (stats.used_blocks, stats.cached_blocks) == (0, 0)
        assert await continue_ids(model, prompt(9), 8) == expected("llama", tuple(prompt(9)), 8)
