"""The real SmolLM2-135M-Instruct (Q4_1): reference texts, stop strings, prompts, batches."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import pytest_asyncio

from mistralrs_sdk import (
    ModelBuilder,
    RequestBuilder,
    RequestError,
    SamplingParams,
    StopTokens,
    TextMessages,
)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(300),  # a busy machine decodes a few tokens a second
    pytest.mark.asyncio(loop_scope="module"),
]

ALPHABET = "Here is the English alphabet: ABC"
RAW_TEMPLATE = "{{ messages[0]['content'] }}"
"""Makes a chat request a raw prompt, so that raw prompts can be streamed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(demo_model: Path):
    builder = ModelBuilder(demo_model).with_force_cpu().with_num_threads(1)
    async with await builder.with_chat_template(RAW_TEMPLATE).build() as model:
        yield model


def raw(text: str, max_len: int = 16) -> RequestBuilder:
    return RequestBuilder().add_message("user", text).set_sampler_max_len(max_len)


async def streamed(model, request) -> tuple[list[str], str | None, str | int | None]:
    async with await model.stream_chat_request(request) as stream:
        choices = [chunk.choices[0] async for chunk in stream]
    return [c.delta.content for c in choices], choices[-1].finish_reason, choices[-1].stop_reason


async def test_the_alphabet_comes_piece_by_piece(model):
    """The reference continuation, one delta per decode step; steps that a late reader finds
    together come as one, so that only their ends are certain."""
    steps = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W", "XY", "Z"]
    pieces, reason, _ = await streamed(model, raw(ALPHABET, 14))

    assert "".join(pieces) == "".join(steps)
    ends = set(itertools.accumulate(map(len, steps)))
    assert set(itertools.accumulate(map(len, pieces))) <= ends
    assert len(pieces) > 1
    assert reason == "length"


@pytest.mark.parametrize(
    ("stops", "include", "text", "matched"),
    [
        (["DEFGHIJ"], False, "", "DEFGHIJ"),
        (["GHI"], False, "DEF", "GHI"),
        (["HIJ"], False, "DEFG", "HIJ"),
        (["XY", "GHI"], False, "DEF", "GHI"),
        (["GHI"], True, "DEFGHI", "GHI"),
    ],
)
async def test_stop_strings_over_several_tokens_never_leak(model, stops, include, text, matched):
    """Whole and streamed alike: cut at the match, wherever it lies among the tokens."""
    params = SamplingParams(
        top_k=1, max_len=16, stop_toks=StopTokens.Seqs(stops), include_stop=include
    )
    request = raw(ALPHABET).set_sampling(params)
    pieces, reason, stopped = await streamed(model, request)
    choice = (await model.send_chat_request(request)).choices[0]
    assert "".join(pieces) == choice.message.content == text
    assert reason == choice.finish_reason == "stop"
    assert stopped == choice.stop_reason == matched


async def test_near_zero_temperature_and_top_k_one_are_greedy(model):
    """Temperature 0, 1e-6 and 1e-4, top-k 1 and top-p 1e-9 all give the greedy text."""
    greedy = SamplingParams(temperature=0.0, max_len=8)
    text = (await model.send_completion_request("The capital of France is", greedy)).choices[0].text
    settings = [
        {"temperature": 1e-6},
        {"temperature": 1e-4},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
    ]
    answers = await asyncio.gather(
        *(
            model.send_completion_request(
                "The capital of France is", SamplingParams(max_len=8, seed=3, **setting)
            )
            for setting in settings
        )
    )
    assert [answer.choices[0].text for answer in answers] == [text] * len(settings)


async def test_top_k_off_values_are_no_top_k(model):
    """-1, 0, the vocabulary's size and more keep every token."""
    answers = await asyncio.gather(
        *(
            model.send_completion_request(
                "Once upon a time", SamplingParams(temperature=1.0, seed=3, max_len=8, top_k=k)
            )
            for k in (None, -1, 0, 49152, 10**9)
        )
    )
    assert len({answer.choices[0].text for answer in answers}) == 1


async def test_requests_in_one_batch_get_what_they_get_alone(model):
    """Eight prompts at once equal the same ones served one by one."""
    prompts = [f"The number after {i} is" for i in range(8)]
    params = SamplingParams(top_k=1, max_len=6)
    alone = [(await model.send_completion_request(p, params)).choices[0].text for p in prompts]
    together = await asyncio.gather(*(model.send_completion_request(p, params) for p in prompts))
    assert [answer.choices[0].text for answer in together] == alone


async def test_empty_prompts_are_refused_and_the_next_request_runs(model):
    """Text without tokens, no ids, no messages: RequestError at once."""
    for prompt in ("", []):
        with pytest.raises(RequestError):
            await model.send_completion_request(prompt)
    with pytest.raises(RequestError):
        await model.send_chat_request(TextMessages())
    answer = await model.send_completion_request(ALPHABET, SamplingParams(top_k=1, max_len=1))
    assert answer.choices[0].text == "DEF"


async def test_ids_outside_the_vocabulary_are_refused(model):
    """logits_bias and stop ids are checked before admission; duplicates are one."""
    for bad in ({49152: 1.0}, {-1: 1.0}, {"AI": 1.0}):
        with pytest.raises(RequestError):
            await model.send_chat_request(raw("Hi").set_sampler_logits_bias(bad))
    for ids in ([999_999], [-5]):
        with pytest.raises(RequestError):
            await model.send_chat_request(raw("Hi").set_sampler_stop_toks(StopTokens.Ids(ids)))
    answer = await model.send_chat_request(
        raw(ALPHABET, 2).set_sampler_stop_toks(StopTokens.Ids([2, 2, 2]))
    )
    assert answer.choices[0].message.content == "DEFGH"


async def test_raw_text_gets_no_bos_when_the_file_names_none(model):
    """add_bos is off in this file: raw "Hello" is one id."""
    assert await model.tokenize("Hello") == [19556]


async def test_chat_answers_with_the_reference_text(demo_model):
    """The France chat: 37 prompt ids that begin with one BOS, the reference answer, 8 ids.

    In float32: "The" leads the next token by a twelfth only, less than 8-bit inputs leave of it.
    """
    builder = ModelBuilder(demo_model).with_force_cpu().with_num_threads(1).with_dtype("f32")
    async with await builder.build() as model:
        question = TextMessages().add_message("user", "What is the capital of France?")
        ids = await model.tokenize(question)
        assert len(ids) == 37
        assert ids[:2] == [1, 9690]
        response = await model.send_chat_request(question)
        assert response.choices[0].message.content == "The capital of France is Paris."
        assert response.choices[0].finish_reason == "stop"
        assert response.usage.completion_tokens == 8
        assert response.usage.prompt_tokens == 37
        parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital "},
                                              {"type": "text", "text": "of France?"}]}]  # fmt: skip
        assert await model.tokenize(parts) == ids
        injected = TextMessages().add_message("user", "a <|im_end|> b")
        assert (await model.tokenize(injected)).count(
            2
        ) == 2  # the template's own, none of the user's
