"""Text completions: chunks, echo with the prompt's log probabilities, best-of."""

from __future__ import annotations

import json
import math

import pytest

from mistralrs_sdk import InferenceError, RequestBuilder, RequestError, SamplingParams
from mistralrs_sdk.answers.completions import CompletionStream
from mistralrs_sdk.chat.responses import CompletionResponse
from tests.model_helpers import assert_idle, greedy, prompt, tiny_builder, tiny_folder
from tests.tiny_models import hf_logits

SAMPLED = SamplingParams(temperature=1.0, max_len=6, seed=5, ignore_eos=True)


@pytest.fixture
async def model():
    async with await tiny_builder().build() as model:
        yield model
        await assert_idle(model)


async def chunks_of(model, *args, **kwargs):
    async with await model.stream_completion_request(*args, **kwargs) as stream:
        return [chunk async for chunk in stream]


async def anext_until_the_end(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_pieces_joined_equal_the_whole(model, echo):
    """Text, log probabilities and usage, for every choice."""
    asked = RequestBuilder().set_sampling(
        SamplingParams(temperature=1.0, max_len=6, seed=5, n_choices=2, return_logprobs=True)
    )
    whole = await model.send_completion_request("hello there", asked, echo=echo)
    chunks = await chunks_of(model, "hello there", asked, echo=echo)

    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        entries = [entry for piece in own for entry in piece.logprobs.content]
        assert json.dumps([e.to_dict() for e in entries]) == json.dumps(
            [e.to_dict() for e in choice.logprobs.content]
        )
        assert own[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert all("usage" not in chunk.to_dict() for chunk in chunks[:-1])


async def test_echo_puts_the_prompt_before_the_text(model):
    """A text prompt comes back to the letter; ids as their text, special tokens and all."""
    plain = (await model.send_completion_request("hello", greedy(4))).choices[0].text
    echoed = (await model.send_completion_request("hello", greedy(4), echo=True)).choices[0].text
    ids = [1, *await model.tokenize("hello", add_special_tokens=False)]
    from_ids = (await model.send_completion_request(ids, greedy(4), echo=True)).choices[0].text

    assert echoed == "hello" + plain
    assert from_ids.startswith("<bos>hello")


async def test_echo_reports_the_prompts_log_probabilities(model):
    """Those of Hugging Face at each position; the first token has none, null in JSON."""
    ids = prompt(20)
    response = await model.send_completion_request(ids, greedy(3), echo=True)

    entries = response.choices[0].logprobs.content
    rows = hf_logits(tiny_folder(), ids).log_softmax(-1)
    assert len(entries) == 23
    assert math.isnan(entries[0].logprob)
    for i, entry in enumerate(entries[1:20]):
        assert entry.logprob == pytest.approx(rows[i, ids[i + 1]].item(), abs=1e-4)
        assert entry.top_logprobs[0].token_id == rows[i].argmax()
    data = json.loads(json.dumps(response.to_dict()))["choices"][0]["logprobs"]
    assert data["token_logprobs"][0] is None
    assert data["top_logprobs"][0] is None
    assert data["tokens"] == [entry.token for entry in entries]


async def test_echo_without_logprobs_computes_the_prompt_once(model):
    """Only reported log probabilities cost a second pass."""
    await model.send_completion_request(prompt(30), SAMPLED, echo=True)
    stats = await model.stats()

    assert stats.computed_tokens == 30 + 5


async def test_best_of_returns_the_likeliest_of_all_answers(model):
    """The n with the highest mean log probability of all that were made, best first."""
    asked = SamplingParams(
        temperature=2.0, max_len=6, seed=5, ignore_eos=True, n_choices=6, return_logprobs=True
    )
    everything = (await model.send_completion_request("hello", asked)).choices

    def mean(choice):
        return sum(entry.logprob for entry in choice.logprobs.content) / 6

    best = sorted(everything, key=mean, reverse=True)[:2]
    two = RequestBuilder().set_sampling(asked).set_sampler_n_choices(2).return_logprobs(False)
    found = await model.send_completion_request("hello", two, best_of=6)

    assert [choice.text for choice in found.choices] == [choice.text for choice in best]
    assert [choice.index for choice in found.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in found.choices)
    assert found.usage.completion_tokens == 36


@pytest.mark.parametrize("best_of", [1, 0, True, 2.5, 129])
async def test_a_bad_best_of_is_refused(model, best_of):
    """It is a number from n_choices to 128."""
    two = RequestBuilder().set_sampler_n_choices(2)
    with pytest.raises(RequestError, match=r"best_of|n_choices"):
        await model.send_completion_request("hello", two, best_of=best_of)


@pytest.mark.parametrize(
    "asked",
    [
        RequestBuilder().add_message("user", "x"),
        RequestBuilder().with_session_id("s"),
        RequestBuilder().with_max_tool_rounds(1),
        RequestBuilder().enable_thinking(True),
        RequestBuilder().with_chat_template_kwargs(a=1),
    ],
    ids=["messages", "session_id", "max_tool_rounds", "thinking", "chat_template_kwargs"],
)
async def test_what_only_a_chat_can_use_is_refused(model, asked, request):
    """A raw prompt has no template, tools or sessions: the field is named."""
    with pytest.raises(RequestError, match=request.node.callspec.id):
        await model.send_completion_request("hello", asked)


async def test_requests_without_settings_are_greedy(model):
    """None is the greedy default of a request, to its end."""
    short = RequestBuilder().set_sampler_max_len(5)

    default = (await model.send_completion_request("hello", short)).choices[0].text
    assert default == (await model.send_completion_request("hello", greedy(5))).choices[0].text


async def test_truncation_cuts_what_is_echoed_too(model):
    """The echo is the prompt that was answered."""
    asked = RequestBuilder().set_sampler_max_len(4).with_truncate_sequence(True)
    text = "ab " * 700
    plain = (await model.send_completion_request(text, asked)).choices[0].text
    response = await model.send_completion_request(text, asked, echo=True)

    kept = response.choices[0].text.removesuffix(plain).removeprefix("<bos>")
    assert response.usage.prompt_tokens == 508
    assert text.endswith(kept)
    assert 0 < len(kept) < len(text)


@pytest.mark.parametrize("read", [CompletionStream.collect, anext_until_the_end])
async def test_a_failed_completion_keeps_its_shape(model, read):
    """The partial response is a completion, with its echo."""

    def fail(logits, ids):
        if len(ids) > 8:
            raise ValueError("no more")
        return logits

    asked = RequestBuilder().set_sampler_ignore_eos(True).add_logits_processor(fail)
    stream = await model.stream_completion_request("hello", asked, echo=True)
    with pytest.raises(InferenceError, match="no more") as caught:
        await read(stream)

    partial = caught.value.partial_response
    assert isinstance(partial, CompletionResponse)
    assert partial.choices[0].text.startswith("hello")
    assert partial.choices[0].finish_reason == "error"


async def test_leaving_a_stream_aborts_the_request(model):
    """What nobody reads is not computed."""
    endless = RequestBuilder().set_sampler_ignore_eos(True)
    async with await model.stream_completion_request("hello", endless) as stream:
        async for _ in stream:
            break

    assert stream.id.startswith("cmpl-")


@pytest.mark.parametrize("prompt", [None, 3, b"text", {"a": 1}])
async def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt):
    """With what was given, before anything runs."""
    async with await tiny_builder().build() as model:
        with pytest.raises(RequestError, match="a prompt is a str or a list of token ids, not"):
            await model.send_completion_request(prompt)
