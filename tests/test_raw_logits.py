"""Logits at every prompt position: equal to Hugging Face's, whatever runs beside them."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from mistralrs_sdk import DeadlineError, RequestBuilder, RequestError, SamplingParams
from mistralrs_sdk.answers.raw_logits import (
    MAX_RAW_LOGITS_BYTES,
    cross_entropy_loss,
    prompt_logprobs,
    require_room,
)
from mistralrs_sdk.builders.lora_builder import LoraModelBuilder
from mistralrs_sdk.engine.model_runner import lay_out
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import Scheduled
from mistralrs_sdk.engine.sequence import Sequence
from tests.adapter_files import peft_merged, tiny_adapter
from tests.model_helpers import (
    assert_idle,
    expected,
    generated_ids,
    greedy,
    prompt,
    tiny_builder,
    tiny_folder,
)
from tests.tiny_models import hf_logits

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
SETTINGS = {
    "paged": lambda builder: builder,
    "unpaged": lambda builder: builder.with_paged_attn(None),
    "small budget": lambda builder: builder.with_max_num_seqs(4).with_max_num_batched_tokens(16),
}


@pytest.fixture
async def model():
    async with await tiny_builder().build() as model:
        yield model
        await assert_idle(model)


@pytest.mark.parametrize("name", ["llama", "mistral_swa", "gemma2"])
@pytest.mark.parametrize("setting", SETTINGS)
async def test_logits_are_hugging_faces_at_every_position(name, setting):
    """Window, soft caps and budgets smaller than the prompt change nothing."""
    ids = prompt(50)
    async with await SETTINGS[setting](tiny_builder(name)).build() as model:
        logits, tokens = await model.send_raw_chat_request(ids)

    assert tokens == ids
    torch.testing.assert_close(torch.cat(logits), hf_logits(tiny_folder(name), ids), **CLOSE)


async def test_a_chat_gives_the_logits_of_its_rendered_prompt(model):
    """The tokens are those of the chat template, and the logits are theirs."""
    chat = RequestBuilder().add_message("user", "hello")
    logits, tokens = await model.send_raw_chat_request(chat)

    assert tokens == await model.tokenize(chat)
    torch.testing.assert_close(logits[0], hf_logits(tiny_folder(), tokens), **CLOSE)


async def test_one_token_has_one_row(model):
    """The shortest prompt, again and again, also where a step is replayed."""
    for _ in range(4):
        logits, _ = await model.send_raw_chat_request([7])
        torch.testing.assert_close(logits[0], hf_logits(tiny_folder(), [7]), **CLOSE)


async def test_nothing_is_drawn_reused_or_left_in_the_cache(model):
    """A prompt seen before is computed again in full, and leaves no prefix."""
    await model.send_raw_chat_request(prompt(40))
    assert (await model.stats()).cached_blocks == 0
    await model.send_completion_request(prompt(40), greedy(1))
    before = await model.stats()

    logits, _ = await model.send_raw_chat_request(prompt(40))

    assert len(logits[0]) == 40
    assert (await model.stats()).computed_tokens == before.computed_tokens + 40


async def test_others_that_run_beside_are_not_touched(model):
    """Decodes ride along in the pass: their tokens and the logits are as if alone."""
    ids = [prompt(length, seed=length) for length in (5, 19, 33)]
    raw = [prompt(length, seed=length) for length in (1, 20, 41)]
    answers, found = await asyncio.gather(
        asyncio.gather(*(model.send_completion_request(each, greedy(12)) for each in ids)),
        asyncio.gather(*(model.send_raw_chat_request(each) for each in raw)),
    )

    for each, answer in zip(ids, answers, strict=True):
        assert generated_ids(answer) == expected("llama", tuple(each), 12)
    for each, (logits, _) in zip(raw, found, strict=True):
        torch.testing.assert_close(logits[0], hf_logits(tiny_folder(), each), **CLOSE)


async def test_the_tensors_are_ones_own(model):
    """They can be written to and take part in autograd, unlike what a step computes with."""
    (first,), _ = await model.send_raw_chat_request([5, 6])
    first += 1
    first.requires_grad_().sum().backward()

    assert first.grad is not None


async def test_a_long_prompt_is_refused_or_cut_as_in_a_chat(model):
    """with_truncate_sequence keeps the end; without it the length is an error."""
    long = RequestBuilder().add_message("user", "x y " * 400)
    with pytest.raises(RequestError, match="shorten it"):
        await model.send_raw_chat_request(long)

    _, tokens = await model.send_raw_chat_request(long.with_truncate_sequence(True))

    assert len(tokens) == 511
    assert tokens[1:] == (await model.tokenize(long))[-510:]


async def test_sessions_are_refused(model):
    """Nothing is answered, so there is nothing to keep."""
    with pytest.raises(RequestError, match="session_id"):
        await model.send_raw_chat_request(
            RequestBuilder().add_message("user", "x").with_session_id("s")
        )


async def test_a_deadline_holds_for_logits_too(model):
    """A request that did not make it in time fails like any other."""
    late = RequestBuilder().add_message("user", "x").with_deadline(1e-9)
    with pytest.raises(DeadlineError, match="deadline"):
        await model.send_raw_chat_request(late)


def test_all_rows_of_a_raw_prompt_are_asked_of_the_model():
    """Beside it only the last row of each other sequence is."""

    def scheduled(number, ids, *, raw):
        request = Request(
            id=number, prompt_ids=ids, sampling=SamplingParams(), max_tokens=1, raw_logits=raw
        )
        return Scheduled(Sequence.from_request(number, request, 0), len(ids))

    both = [scheduled(0, (5, 6, 7, 8), raw=False), scheduled(1, (3, 4, 5), raw=True)]

    assert lay_out(both, block_size=None).logits_indices == [3, 4, 5, 6]


def test_logits_that_would_fill_the_memory_are_refused():
    """Two GiB are allowed; the error says how many tokens that is."""
    vocab_size = 100_000
    longest = MAX_RAW_LOGITS_BYTES // (4 * vocab_size)
    require_room(longest, vocab_size=vocab_size)
    with pytest.raises(RequestError, match=f"at most {longest} tokens"):
        require_room(longest + 1, vocab_size=vocab_size)


def test_cross_entropy_is_the_mean_of_negative_logprobs():
    """In nats; even odds over 8 are log 8."""
    assert cross_entropy_loss(torch.zeros(3, 8), [1, 2, 3]).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("targets", [[1, 2], [[1, 2, 3]], []])
def test_targets_that_do_not_fit_are_refused(targets):
    """One target per row."""
    with pytest.raises(RequestError, match="drop the last row"):
        cross_entropy_loss(torch.zeros(3, 8), targets)


def test_prompt_logprobs_are_those_of_the_tokens_that_follow():
    """Over more rows than are worked out at once; the most likely ids come first."""
    logits = torch.randn(600, 16, generator=torch.Generator().manual_seed(0))
    tokens = [i * 7 % 16 for i in range(600)]

    found = prompt_logprobs(logits, tokens, top_n=2)

    assert [entry.token_id for entry in found] == tokens[1:]
    rows = logits.log_softmax(-1)
    for i, entry in enumerate(found):
        assert entry.logprob == pytest.approx(rows[i, tokens[i + 1]].item())
        assert [id for id, _ in entry.top] == rows[i].topk(2).indices.tolist()


def test_prompt_logprobs_agree_with_the_loss():
    """Their mean is minus the loss of the shifted prompt."""
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    tokens = list(range(9))
    found = prompt_logprobs(logits, tokens, top_n=0)

    loss = cross_entropy_loss(logits[:-1], tokens[1:]).item()
    assert -sum(entry.logprob for entry in found) / 8 == pytest.approx(loss)


async def test_a_choice_of_sampler_does_not_matter(model):
    """Nothing is drawn, so what would decide a draw is not looked at."""
    chat = RequestBuilder().add_message("user", "x")
    sampled = chat.set_sampling(SamplingParams(temperature=2.0, n_choices=3, ignore_eos=True))

    plain, _ = await model.send_raw_chat_request(chat)
    other, _ = await model.send_raw_chat_request(sampled)

    assert torch.equal(plain[0], other[0])


async def test_the_adapter_of_a_request_counts(tmp_path):
    """Logits with an adapter are those of the merged weights, beside a request without."""
    folder = tiny_adapter(tmp_path)
    chat = RequestBuilder().add_message("user", "hello there")
    builder = LoraModelBuilder.from_text_model_builder(tiny_builder())
    async with await builder.with_adapter("a", folder).build() as model:
        (adapted, tokens), (plain, _) = await asyncio.gather(
            model.send_raw_chat_request(chat.set_adapter("a")), model.send_raw_chat_request(chat)
        )

    torch.testing.assert_close(
        adapted[0], hf_logits(peft_merged("llama", folder), tokens), atol=1e-3, rtol=1e-3
    )
    torch.testing.assert_close(plain[0], hf_logits(tiny_folder(), tokens), **CLOSE)
