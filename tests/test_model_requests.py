"""What requests may ask for, and what they get back."""

from __future__ import annotations

import asyncio

import pytest

from mistralrs_sdk import (
    DeadlineError,
    DrySamplingParams,
    QueueFullError,
    RequestBuilder,
    RequestError,
    SamplingParams,
    StopTokens,
    TextMessageRole,
    TextMessages,
)
from tests.model_helpers import (
    assert_idle,
    continue_ids,
    endless,
    expected,
    generated_ids,
    greedy,
    prompt,
    tiny_builder,
)


async def chunks_of(model, request):
    async with await model.stream_chat_request(request) as stream:
        return [chunk async for chunk in stream]


@pytest.fixture
async def model():
    async with await tiny_builder().with_seed(1).build() as model:
        yield model
        await assert_idle(model)


async def test_streamed_pieces_joined_equal_the_whole_answer(model):
    """Greedy and sampled, with several choices: the stream says what the response says."""
    request = endless().set_sampler_max_len(40)
    for asked in (
        request,
        request.set_sampler_temperature(1.5).set_sampler_seed(3).set_sampler_n_choices(3),
    ):
        whole = await model.send_chat_request(asked)
        chunks = await chunks_of(model, asked)
        for choice in whole.choices:
            own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
            assert "".join(c.delta.content for c in own) == choice.message.content
            assert own[-1].finish_reason == choice.finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_usage_counts_the_prompt_once_and_adds_the_choices(model):
    """n choices: prompt tokens once, completion tokens summed, times and rates filled in."""
    response = await model.send_chat_request(
        endless().set_sampler_max_len(5).set_sampler_n_choices(3)
    )
    usage = response.usage
    assert usage.prompt_tokens == len(await model.tokenize(endless()))
    assert usage.completion_tokens == 15
    assert usage.total_tokens == usage.prompt_tokens + 15
    assert usage.total_time_sec == pytest.approx(
        usage.total_prompt_time_sec + usage.total_completion_time_sec
    )
    assert min(usage.avg_prompt_tok_per_sec, usage.avg_compl_tok_per_sec) > 0


async def test_choices_differ_when_sampled_and_agree_when_greedy(model):
    """Each choice draws for itself; greedy choices are equal."""
    request = endless().set_sampler_max_len(20).set_sampler_n_choices(4)
    greedy_texts = [c.message.content for c in (await model.send_chat_request(request)).choices]
    assert len(set(greedy_texts)) == 1
    sampled = request.set_sampler_temperature(1.0).set_sampler_seed(7)
    first = [c.message.content for c in (await model.send_chat_request(sampled)).choices]
    again = [c.message.content for c in (await model.send_chat_request(sampled)).choices]
    assert first == again
    assert len(set(first)) > 1


async def test_a_seeded_request_does_not_depend_on_its_neighbours(model):
    """Alone, twice in one batch, among seeded and unseeded others: the same text."""
    seeded = (
        endless("seeded").set_sampler_max_len(16).set_sampler_temperature(0.8).set_sampler_seed(42)
    )
    alone = (await model.send_chat_request(seeded)).choices[0].message.content
    others = [
        endless(f"neighbour {i}").set_sampler_max_len(16).set_sampler_temperature(1.0)
        for i in range(7)
    ]
    for count in (1, 3, 7):
        batch = [*others[:count], seeded, seeded.set_sampler_seed(5), seeded]
        results = await asyncio.gather(*map(model.send_chat_request, batch))
        texts = [r.choices[0].message.content for r in results]
        assert texts[count] == texts[-1] == alone


async def test_the_model_seed_makes_unseeded_requests_repeatable():
    """with_seed fixes the seeds of requests that bring none, in order of arrival."""
    texts = []
    for seed in (1, 1, 2):
        async with await tiny_builder().with_seed(seed).build() as model:
            request = endless().set_sampler_max_len(16).set_sampler_temperature(1.0)
            answers = [await model.send_chat_request(request) for _ in range(2)]
            texts.append([a.choices[0].message.content for a in answers])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


async def test_a_stop_string_is_cut_and_reported(model):
    """The text ends before the match, whole and streamed; include_stop keeps it."""
    full = await model.send_completion_request(prompt(9), greedy(40))
    text = full.choices[0].text
    stop = text[10:13]
    for include in (False, True):
        params = greedy(40, stop_toks=StopTokens.Seqs(["no such text", stop]), include_stop=include)
        choice = (await model.send_completion_request(prompt(9), params)).choices[0]
        assert choice.text == text[: text.index(stop) + len(stop) * include]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


async def test_a_stop_string_ends_one_choice_and_not_its_siblings(model):
    """Each choice of a request stops by itself."""
    request = endless().set_sampler_max_len(60).set_sampler_temperature(1.0).set_sampler_seed(2)
    request = request.set_sampler_n_choices(4)
    texts = [c.message.content for c in (await model.send_chat_request(request)).choices]
    stop = texts[0][20:23]
    answer = await model.send_chat_request(request.set_sampler_stop_toks(StopTokens.Seqs([stop])))
    for choice, text in zip(answer.choices, texts, strict=True):
        cut = text.find(stop)
        assert choice.message.content == (text if cut < 0 else text[:cut])
        assert choice.finish_reason == ("length" if cut < 0 else "stop")


async def test_a_stop_id_ends_the_answer_and_counts_as_generated(model):
    """The id's text is not in the answer; usage counts it; duplicates are one."""
    ids = prompt(9)
    third = expected("llama", tuple(ids), 3)[2]
    params = greedy(40, stop_toks=StopTokens.Ids([third, third]))
    response = await model.send_completion_request(ids, params)
    choice = response.choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", third)
    assert response.usage.completion_tokens == 3
    assert len(choice.logprobs.content) == 2


async def test_max_len_one_gives_exactly_one_token(model):
    """Two hundred one-token requests, four at a time."""
    gate = asyncio.Semaphore(4)

    async def one(i: int) -> int:
        async with gate:
            response = await model.send_completion_request(prompt(5, seed=i), greedy(1))
            return response.usage.completion_tokens

    assert await asyncio.gather(*map(one, range(200))) == [1] * 200


async def test_a_prompt_longer_than_the_context_is_refused_and_its_neighbour_runs():
    """The error names the prompt's length and the limit; nothing was computed for it."""
    async with await tiny_builder().with_max_model_len(64).build() as model:
        good = asyncio.create_task(continue_ids(model, prompt(9), 8))
        for length in (64, 65, 200):
            with pytest.raises(RequestError, match=rf"{length} tokens.*64"):
                await model.send_completion_request([5] * length)
        assert await good == expected("llama", tuple(prompt(9)), 8)
        assert (await model.send_completion_request([5] * 63)).usage.completion_tokens == 1


async def test_a_long_prompt_can_lose_its_start_instead(model):
    """with_truncate_sequence keeps the end and leaves room for max_len."""
    request = endless("x" * 2000).set_sampler_max_len(16).with_truncate_sequence(True)
    response = await model.send_chat_request(request)
    assert response.usage.prompt_tokens == model.max_sequence_length() - 16
    assert response.usage.completion_tokens == 16


async def test_cutting_the_start_off_keeps_the_bos():
    """A prompt that is cut still has its one BOS in front."""
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    async with await tiny_builder().with_chat_template(template).build() as model:
        request = endless("x" * 2000).set_sampler_max_len(8)
        _, ids = model.render_chat(request)
        kept = model.inner()._encoder.keep_end(ids, 100)
        assert (len(kept), kept[0], kept[1:]) == (100, ids[0], ids[-99:])
        response = await model.send_chat_request(request.with_truncate_sequence(True))
        assert response.usage.prompt_tokens == model.max_sequence_length() - 8


async def test_the_answer_ends_with_the_context():
    """Without max_len a request runs to the end of the context: finish_reason length."""
    async with await tiny_builder().with_max_model_len(64).build() as model:
        params = SamplingParams(top_k=1, ignore_eos=True)
        response = await model.send_completion_request(prompt(10), params)
        assert response.usage.total_tokens == 64
        assert response.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "bad",
    [
        lambda: TextMessages(),
        lambda: RequestBuilder(),
        lambda: [],
        lambda: 7,
        lambda: [{"content": "no role"}],
        lambda: RequestBuilder().add_message("user", "x").set_sampler_max_len(0),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_temperature(float("nan")),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_temperature(-1),
        lambda: (
            RequestBuilder().add_message("user", "x").set_sampler_stop_toks(StopTokens.Seqs([]))
        ),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_logits_bias({512: 1.0}),
        lambda: (
            RequestBuilder().add_message("user", "x").set_sampler_stop_toks(StopTokens.Ids([999]))
        ),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_n_choices(0),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_n_choices(None),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_n_choices(129),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_topn_logprobs(None),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_logits_bias({5: None}),
        lambda: RequestBuilder().add_message("user", "x").set_sampler_temperature(10**400),
        lambda: (
            RequestBuilder().add_message("user", "x").set_sampler_stop_toks(StopTokens.Ids([None]))
        ),
        lambda: (
            RequestBuilder().add_message("user", "x").set_sampling(SamplingParams(stop_toks=["a"]))
        ),
        lambda: RequestBuilder().add_message("user", "\ud800"),
        lambda: (
            RequestBuilder()
            .add_message("user", "x")
            .set_sampler_dry_params(DrySamplingParams(multiplier=1, base=None))
        ),
        lambda: RequestBuilder().add_message("user", "x").set_adapter("no such adapter"),
    ],
)
async def test_bad_requests_are_refused_before_anything_runs(model, bad):
    """Each is a RequestError; a healthy request beside it is untouched."""
    healthy = asyncio.create_task(continue_ids(model, prompt(9), 8))
    with pytest.raises(RequestError):
        await model.send_chat_request(bad())
    assert await healthy == expected("llama", tuple(prompt(9)), 8)


@pytest.mark.parametrize("bad", ["", [], [512], [-1], [1.5], [True]])
async def test_bad_prompts_are_refused(model, bad):
    """Empty text, no ids, ids outside the vocabulary or that are no ints."""
    if bad == "" and (await model.tokenize("")):
        pytest.skip("this tokenizer adds a BOS, so the prompt is not empty")
    with pytest.raises(RequestError):
        await model.send_completion_request(bad)


async def test_logprobs_come_with_every_token_and_do_not_depend_on_the_sampler(model):
    """Raw log-softmax: the first token's values are the same greedy, hot or penalised."""
    settings = [
        {"top_k": 1},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 1.0, "seed": 1},
        {"top_k": 5, "repetition_penalty": 1.2, "seed": 1},
    ]
    tops = []
    for setting in settings:
        params = SamplingParams(
            max_len=4, ignore_eos=True, return_logprobs=True, top_n_logprobs=3, **setting
        )
        response = await model.send_completion_request(prompt(9), params)
        content = response.choices[0].logprobs.content
        assert len(content) == response.usage.completion_tokens == 4
        assert all(entry.logprob <= 0 for entry in content)
        tops.append([(t.token_id, round(t.logprob, 4)) for t in content[0].top_logprobs])
    assert tops == [tops[0]] * 4


async def test_chat_takes_text_messages_builders_and_openai_dicts(model):
    """All forms of the same turn are the same request."""
    text = "hi"
    forms = [
        text,
        TextMessages().add_message(TextMessageRole.USER, text),
        RequestBuilder().add_message(TextMessageRole.USER, text),
        [{"role": "user", "content": text}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            }
        ],
    ]
    prompts = [model.render_chat(form)[1] for form in forms]
    assert prompts == [prompts[0]] * len(forms)
    assert isinstance(await model.chat(text), str)


async def test_tokenize_and_detokenize_are_inverse(model):
    """Raw text goes through ids and back."""
    ids = await model.tokenize("the rain", add_special_tokens=False)
    assert await model.detokenize(ids) == "the rain"
    with pytest.raises(RequestError, match="512"):
        await model.detokenize([512])


async def test_temperature_alone_samples(model):
    """mistral.rs' trap, where a temperature without top_k stays greedy, is not copied."""
    request = endless().set_sampler_max_len(24)
    plain = (await model.send_chat_request(request)).choices[0].message.content
    hot = await model.send_chat_request(request.set_sampler_temperature(2.0).set_sampler_seed(1))
    assert hot.choices[0].message.content != plain


async def test_repetition_penalty_sees_the_prompt_and_presence_penalty_does_not(model):
    """At the first step only the repetition penalty may change the token, cache warm or cold."""
    prompts = (prompt(200, seed=i) for i in range(50))
    ids = next(ids for ids in prompts if expected("llama", tuple(ids), 1)[0] in ids)
    usual = expected("llama", tuple(ids), 1)

    def chosen(response) -> bytes:
        return response.choices[0].logprobs.content[0].bytes

    plain = await model.send_completion_request(ids, greedy(1))
    assert generated_ids(plain) == usual
    for penalties, same in (
        ({"presence_penalty": 1e3, "frequency_penalty": 1e3}, True),
        ({"repetition_penalty": 1e6}, False),
        ({"repetition_penalty": 1e6}, False),
    ):
        response = await model.send_completion_request(ids, greedy(1, **penalties))
        assert (chosen(response) == chosen(plain)) is same


async def test_a_request_behind_its_deadline_fails_with_what_there_is():
    """A DeadlineError says so; the partial answer is kept; others go on."""
    async with await tiny_builder().build() as model:
        other = asyncio.create_task(continue_ids(model, prompt(9), 48))
        with pytest.raises(DeadlineError, match="deadline") as caught:
            await model.send_chat_request(endless().with_deadline(0.05))
        assert caught.value.partial_response.usage.completion_tokens > 0
        assert await other == expected("llama", tuple(prompt(9)), 48)
        await assert_idle(model)


async def test_a_deadline_also_ends_a_request_that_still_waits():
    """max_num_seqs 1: who waits longer than its deadline never runs."""
    async with await tiny_builder().with_max_num_seqs(1).build() as model:
        running = await model.stream_chat_request(endless())
        await anext(running)
        with pytest.raises(DeadlineError, match="deadline") as caught:
            await model.send_chat_request(endless().with_deadline(0.03))
        assert caught.value.partial_response.usage.completion_tokens == 0
        await running.aclose()
        await assert_idle(model)


async def test_a_smaller_priority_is_admitted_first():
    """Within one priority first come first served."""
    async with await tiny_builder().with_max_num_seqs(1).build() as model:
        first = await model.stream_chat_request(endless())
        await anext(first)
        computed = []  # in the engine's order, whenever the answers are read

        async def ask(name: str, priority: int) -> None:
            def note(logits, ids):
                computed.append(name)
                return logits

            request = endless(name).with_priority(priority).set_sampler_max_len(2)
            await model.send_chat_request(request.add_logits_processor(note))

        tasks = []
        for name, priority in (("late", 1), ("a", 0), ("b", 0), ("urgent", -1)):
            tasks.append(asyncio.create_task(ask(name, priority)))
            await asyncio.sleep(0.005)
        await first.aclose()
        await asyncio.gather(*tasks)
        assert list(dict.fromkeys(computed)) == ["urgent", "a", "b", "late"]


async def test_a_full_queue_refuses_at_once():
    """max_num_seqs 1 and max_queue 2: the fourth request gets QueueFullError, the others run."""
    builder = tiny_builder().with_max_num_seqs(1).with_max_queue(2)
    async with await builder.build() as model:
        request = endless().set_sampler_max_len(8)
        streams = [await model.stream_chat_request(request) for _ in range(3)]
        with pytest.raises(QueueFullError, match="with_max_queue"):
            await model.send_chat_request(request)
        answers = [await stream.collect() for stream in streams]
        assert {answer.usage.completion_tokens for answer in answers} == {8}
        assert (await model.send_chat_request(request)).usage.completion_tokens == 8


async def test_salts_keep_prefixes_apart_and_opting_out_leaves_nothing(model):
    """A hit needs the same salt; with prefix_cache False nothing is found and nothing left."""
    text = "x" * 100

    async def cached(**settings) -> int:
        request = endless(text).set_sampler_max_len(1)
        for name, value in settings.items():
            request = getattr(request, name)(value)
        return (await model.send_chat_request(request)).usage.cached_tokens

    assert await cached(with_prefix_cache=False) == 0
    assert await cached() == 0
    assert await cached() > 0
    assert await cached(with_cache_salt="a") == 0
    assert await cached(with_cache_salt="a") > 0
    assert await cached(with_cache_salt="b") == 0
    assert await cached(with_prefix_cache=False) == 0
    await model.clear_prefix_cache()
    assert await cached() == 0


async def test_a_shared_prefix_is_computed_once(model):
    """Sixteen requests at once behind one long prefix: each computes little but its own end."""
    shared = prompt(300, seed=77)
    prompts = [[*shared, *prompt(4, seed=300 + i)] for i in range(16)]
    before = (await model.stats()).computed_tokens
    await asyncio.gather(*(continue_ids(model, ids, 1) for ids in prompts))
    stats = await model.stats()
    assert stats.computed_tokens - before < 304 + 15 * (4 + 8)
    assert stats.prefix_hits == 15


async def test_the_second_request_with_a_prefix_computes_less_than_a_fifth(model):
    """What decides the time to its first token."""
    shared = prompt(300, seed=78)
    counts = []
    for i in range(2):
        before = (await model.stats()).computed_tokens
        await continue_ids(model, [*shared, *prompt(10, seed=i)], 1)
        counts.append((await model.stats()).computed_tokens - before)
    assert counts[1] < counts[0] / 5


async def test_requests_that_come_at_once_cannot_overfill_the_queue():
    """Fifty in one gather, three allowed: forty-seven are refused."""
    builder = tiny_builder().with_max_num_seqs(1).with_max_queue(2)
    async with await builder.build() as model:
        request = endless().set_sampler_max_len(4)
        calls = (model.send_chat_request(request) for _ in range(50))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, QueueFullError) for outcome in outcomes) == 47
        assert (await model.metrics()).rejected == {"over_total_capacity": 0, "queue_full": 47}
