"""Failures others met, as trials: text out, limits, sampling, templates."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path

import anyio
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, processors

from mistralrs_sdk import (
    ModelBuilder,
    ModelLoadError,
    RequestBuilder,
    RequestError,
    SamplingParams,
    TextMessages,
)
from mistralrs_sdk.kernels import native
from mistralrs_sdk.loading.gguf import open_gguf
from tests.model_helpers import (
    assert_idle,
    endless,
    expected,
    generated_ids,
    greedy,
    prompt,
    tiny_builder,
)
from tests.script_model import script_folder
from tests.tiny_models import tiny_checkpoint

real_model = [
    pytest.mark.real_model,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
ALPHABET = "Here is the English alphabet: ABC"


def marked(test):
    """The marks of a test on the real model."""
    for mark in real_model:
        test = mark(test)
    return test


def small(path: Path) -> ModelBuilder:
    return ModelBuilder(path).with_force_cpu().with_num_threads(1).with_max_num_seqs(16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smol(demo_model: Path):
    async with await small(demo_model).with_max_model_len(512).build() as model:
        yield model
        await assert_idle(model)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return open_gguf(demo_model).tokenizer.tokenizer


async def chunks_of(model, request):
    async with await model.stream_chat_request(request) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([10813, 116, 246], "\N{PARROT}"),
        ([23274, 115, 40993, 179, 120, 248], "日本語"),
        ([153, 119, 40533, 226, 11512], "Ω≈ç"),
    ],
)
async def test_characters_spread_over_tokens_arrive_whole(tokenizer, tmp_path, script, text):
    """No delta holds U+FFFD, the deltas join to the text, logprobs carry each id's raw bytes."""
    folder = script_folder(tmp_path, script, tokenizer=tokenizer)
    request = RequestBuilder().add_message("user", "\n").return_logprobs(True)
    async with await small(folder).build() as model:
        assert await model.tokenize("\n") == [198]
        whole = (await model.send_chat_request(request)).choices[0]
        choices = [chunk.choices[0] for chunk in await chunks_of(model, request)]
        await assert_idle(model)

    assert "".join(choice.delta.content for choice in choices) == whole.message.content == text
    assert not any("\N{REPLACEMENT CHARACTER}" in choice.delta.content for choice in choices)
    assert whole.finish_reason == choices[-1].finish_reason == "stop"
    streamed = [entry for choice in choices for entry in choice.logprobs.content]
    assert streamed == list(whole.logprobs.content)
    assert len(streamed) == len(script)
    assert b"".join(entry.bytes for entry in streamed) == text.encode()
    assert json.dumps(whole.to_dict(), allow_nan=False)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "where",
    [
        {"generation_eos": [0, 16317]},
        {"generation_eos": 16317},
        {"generation_eos": [0], "eos_token": 16317},
        {"eos": 16317},
    ],
)
async def test_the_end_token_is_found_wherever_it_is_named(tokenizer, tmp_path, where):
    """generation_config as list or number, tokenizer, config: "hello", stop, no end text."""
    if "eos_token" in where:
        where = where | {"eos_token": tokenizer.id_to_token(where["eos_token"])}
    folder = script_folder(tmp_path, [28120, 16317, 10407], tokenizer=tokenizer, **where)
    async with await small(folder).build() as model:
        choice = (await model.send_chat_request("\n")).choices[0]

    assert choice.message.content == tokenizer.decode([28120]) == "hello"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason is None


@marked
async def test_an_over_long_prompt_is_refused_at_once_and_a_long_one_runs_in_chunks(
    demo_model, smol
):
    """Context 128, budget 32: 129 and 500 ids are errors with both numbers, 100 ids run."""
    ids = random.Random(0).sample(range(100, 40_000), 100)
    solo = await smol.send_completion_request("Hello", greedy(4))
    whole = await smol.send_completion_request(ids, greedy(4))
    builder = small(demo_model).with_max_model_len(128).with_max_num_batched_tokens(32)
    async with await builder.build() as model:
        hello = asyncio.create_task(model.send_completion_request("Hello", greedy(4)))
        for length in (129, 500):
            started = time.perf_counter()
            with pytest.raises(RequestError, match=rf"{length} tokens.*128"):
                await model.send_completion_request([500] * length)
            assert time.perf_counter() - started < 1
        assert generated_ids(await hello) == generated_ids(solo)
        chunked = await model.send_completion_request(ids, greedy(4))
        assert generated_ids(chunked) == generated_ids(whole)
        await assert_idle(model)


@pytest.mark.parametrize("max_len", [0, -1, 1.5, "10"])
def test_a_length_that_is_no_positive_whole_number_is_refused(max_len):
    """The same rule for chats and completions, with the name and the value in the message."""
    with pytest.raises(RequestError, match=f"max_len.*{max_len}"):
        SamplingParams(max_len=max_len)
    with pytest.raises(RequestError, match=f"max_len.*{max_len}"):
        RequestBuilder().set_sampler_max_len(max_len)


async def test_requests_that_end_in_their_prefill_step_leak_nothing():
    """Two hundred one-token requests, four at a time, in chunks, through a pool of 8 blocks."""
    gate = asyncio.Semaphore(4)
    builder = tiny_builder(kv_tokens=64).with_max_num_seqs(4).with_max_num_batched_tokens(4)
    async with await builder.build() as model:

        async def one(number: int) -> None:
            ids = prompt(3 + number % 18, seed=number % 40)
            async with gate:
                response = await model.send_completion_request(ids, greedy(1))
            assert generated_ids(response) == expected("llama", tuple(ids), 1)
            assert response.choices[0].finish_reason == "length"

        await asyncio.gather(*map(one, range(200)))
        await assert_idle(model)
        await model.clear_prefix_cache()
        stats = await model.stats()
        assert (stats.used_blocks, stats.cached_blocks) == (0, 0)


@marked
async def test_choices_have_their_own_ends_and_repeat_with_the_seed(smol):
    """n 4: indices 0 to 3, whole and streamed and repeated alike; greedy gives four equal ones."""
    request = RequestBuilder().add_message("user", "Tell me a short story").set_sampler_max_len(24)
    request = request.set_sampler_n_choices(4)
    sampled = request.set_sampler_temperature(1.0).set_sampler_seed(7)
    whole, chunks, again, same = await asyncio.gather(
        smol.send_chat_request(sampled),
        chunks_of(smol, sampled),
        smol.send_chat_request(sampled),
        smol.send_chat_request(request.set_sampler_temperature(0.0)),
    )

    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.delta.content for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
    assert len({choice.message.content for choice in same.choices}) == 1
    assert whole.usage.prompt_tokens == len(smol.render_chat(sampled)[1])
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    assert 4 < whole.usage.completion_tokens <= 4 * 24


async def test_a_seeded_request_is_the_same_in_any_company():
    """With 0, 1, 3 and 7 neighbours, seeded or not, in any order, five times, twice in a batch."""
    shuffle = random.Random(3).shuffle
    request = endless("seeded").set_sampler_max_len(16).set_sampler_temperature(0.8)
    seeded = request.set_sampler_seed(42)
    async with await tiny_builder().build() as model:
        alone = (await model.send_chat_request(seeded)).choices[0].message.content
        for count in (0, 1, 3, 7) * 5:
            others = [
                request.add_message("user", f"neighbour {i}").set_sampler_max_len(1 + 5 * i)
                for i in range(count)
            ]
            others = [o.set_sampler_seed(i) if i % 2 else o for i, o in enumerate(others)]
            batch = [*others, seeded, seeded]
            shuffle(batch)
            answers = await asyncio.gather(*map(model.send_chat_request, batch))
            texts = [a.choices[0].message.content for a in answers]
            assert [t for t, r in zip(texts, batch, strict=True) if r is seeded] == [alone] * 2
        await assert_idle(model)


@pytest.mark.skipif(not native.available(), reason="torch's products depend on the batch")
@marked
async def test_a_seeded_request_is_the_same_in_any_company_on_the_real_model(smol):
    """Alone, and twice among seeded and unseeded neighbours."""
    request = RequestBuilder().add_message("user", "Tell me a story").set_sampler_max_len(8)
    request = request.set_sampler_temperature(0.8)
    seeded = request.set_sampler_seed(42)
    alone = (await smol.send_chat_request(seeded)).choices[0].message.content
    batch = [request, seeded, request.set_sampler_seed(1), request.set_sampler_seed(2), seeded]
    answers = await asyncio.gather(*map(smol.send_chat_request, batch))
    assert {answers[i].choices[0].message.content for i in (1, 4)} == {alone}


@marked
async def test_logprobs_have_the_shape_of_their_api_and_do_not_depend_on_the_sampler(smol):
    """Raw log-softmax in chats and completions, one entry a token, valid JSON, no NaN."""
    settings = [
        {"top_k": 1},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 1.0, "seed": 1},
        {"top_k": 5, "repetition_penalty": 1.2, "seed": 1},
    ]
    params = [SamplingParams(max_len=4, top_n_logprobs=3, **setting) for setting in settings]
    messages = RequestBuilder().add_message("user", "What is the capital of France?")
    answers = await asyncio.gather(
        *(smol.send_chat_request(messages.set_sampling(p)) for p in params),
        *(smol.send_completion_request(ALPHABET, p) for p in params),
    )

    for same in (answers[:4], answers[4:]):
        firsts = [answer.choices[0].logprobs.content[0] for answer in same]
        wanted = [(top.token_id, pytest.approx(top.logprob, abs=1e-4)) for top in
                  firsts[0].top_logprobs]  # fmt: skip
        for answer, first in zip(same, firsts, strict=True):
            assert [(top.token_id, top.logprob) for top in first.top_logprobs] == wanted
            content = answer.choices[0].logprobs.content
            assert len(content) == answer.usage.completion_tokens == 4
            assert all(math.isfinite(e.logprob) and e.logprob <= 0 for e in content)
            assert all(len(e.top_logprobs) == 3 for e in content)
    chat = json.loads(json.dumps(answers[1].to_dict(), allow_nan=False))["choices"][0]["logprobs"]
    text = json.loads(json.dumps(answers[5].to_dict(), allow_nan=False))["choices"][0]["logprobs"]
    assert set(chat) == {"content"}
    assert {"token", "logprob", "bytes", "top_logprobs"} <= set(chat["content"][0])
    assert set(text) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in text.values()} == {4}


@marked
async def test_content_forms_give_the_prompt_of_the_joined_string(smol):
    """Parts, null, missing and empty content, on a template that can only join strings."""

    def ids(*messages):
        return smol.render_chat(list(messages))[1]

    user = {"role": "user", "content": "Hello world"}
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert ids({"role": "user", "content": parts}) == ids(user)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    empty = ids(user, {"role": "assistant", "content": ""}, user)
    for turn in ({"content": None, "tool_calls": [call]}, {"content": None}, {}, {"content": []}):
        assert ids(user, {"role": "assistant", **turn}, user) == empty
    assert "[{" not in smol.render_chat([{"role": "user", "content": parts}])[0]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(RequestError, match="image_url"):
        ids({"role": "user", "content": [*parts, image]})


async def test_one_bos_however_it_is_asked_for(tmp_path, caplog):
    """Template and tokenizer both write one: chat, raw text and raw text with the literal."""
    folder = tiny_checkpoint("llama", tmp_path)
    file = folder / "tokenizer.json"
    adding = Tokenizer.from_file(str(file))
    adding.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    adding.save(str(file))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    builder = ModelBuilder(folder).with_num_threads(1).with_chat_template(template)
    async with await builder.build() as model:
        asked = TextMessages().add_message("user", "Hello")
        chat, raw = await model.tokenize(asked), await model.tokenize("Hello")
        assert chat == raw
        assert (chat[0], chat.count(1)) == (1, 1)
        assert not caplog.records
        assert await model.tokenize("<bos>Hello") == raw
        assert "BOS" in caplog.text
        response = await model.send_chat_request(RequestBuilder.from_messages(asked))
        assert response.usage.prompt_tokens == len(raw)


STRICT = """\
{%- for m in messages -%}
{%- if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate user/assistant') }}
{%- endif -%}
{{ m['content'] }}
{%- endfor -%}
"""


async def test_a_refusal_of_the_template_is_the_requests_error():
    """System role and role order are refused in the template's words; the next request runs."""
    system = TextMessages().add_message("system", "Be brief").add_message("user", "Hi")
    twice = TextMessages().add_message("user", "Hi").add_message("user", "Hi again")
    async with await tiny_builder().with_chat_template(STRICT).build() as model:
        for request, words in (
            (system, "System role not supported"),
            (twice, "Roles must alternate user/assistant"),
        ):
            for call in (model.send_chat_request, model.stream_chat_request):
                with pytest.raises(RequestError, match=words):
                    await call(request)
        fine = endless().set_sampler_max_len(2)
        assert (await model.send_chat_request(fine)).usage.completion_tokens == 2
        await assert_idle(model)


async def test_an_unknown_filter_is_found_when_the_model_is_built():
    """Not with the first request that happens to reach it."""
    template = "{% if false %}{{ messages | no_such_filter }}{% endif %}"
    with pytest.raises((ModelLoadError, RequestError), match="no_such_filter"):
        await tiny_builder().with_chat_template(template).build()


async def test_a_template_cannot_reach_into_python():
    """The sandbox refuses __class__, and the model goes on."""
    template = (
        "{% if messages[0]['content'] == 'attack' %}"
        "{{ messages.__class__.__mro__[1].__subclasses__() }}{% endif %}hello"
    )
    async with await tiny_builder().with_chat_template(template).build() as model:
        with pytest.raises(RequestError, match=r"__class__|unsafe"):
            await model.chat("attack")
        fine = endless().set_sampler_max_len(2)
        assert (await model.send_chat_request(fine)).usage.completion_tokens == 2


async def test_the_event_loop_stays_awake_during_a_long_prefill(tmp_path):
    """A 10 ms ticker beside a 4000-token prefill and four streams: no gap above 200 ms."""
    folder = tiny_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    gaps: list[float] = []

    async def tick() -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    async def read(stream) -> None:
        async for _ in stream:
            pass

    builder = ModelBuilder(folder).with_force_cpu().with_num_threads(1).with_max_num_seqs(8)
    async with await builder.with_prefix_cache_n(None).build() as model:
        for _attempt in range(3):  # a machine shared with others has hiccups of its own
            gaps.clear()
            streams = [await model.stream_chat_request(endless(f"s{i}")) for i in range(4)]
            ticker = asyncio.create_task(tick())
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.05)
            response = await model.send_completion_request([5] * 4000, greedy(1))
            assert response.usage.prompt_tokens == 4000
            for stream in streams:
                model.abort(stream.id)
            with anyio.fail_after(10):
                await asyncio.gather(*readers)
            ticker.cancel()
            await assert_idle(model)
            if max(gaps) <= 0.2:
                break
        assert max(gaps) <= 0.2
