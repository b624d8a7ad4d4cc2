"""Constrained answers: what they may be, how they end, and what runs beside them."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import threading

import jsonschema
import pytest

from mistralrs_sdk import (
    ChatCompletionRequest,
    CompletionRequest,
    Constraint,
    InferenceError,
    Model,
    RequestBuilder,
    RequestError,
    Runner,
    StopTokens,
    Which,
)
from mistralrs_sdk.constraints import compiled as compiled_module
from mistralrs_sdk.constraints.compiled import compile_constraint, compile_in_time
from mistralrs_sdk.constraints.matcher import Matcher
from mistralrs_sdk.constraints.vocabulary import CACHE_SIZE, Vocabulary
from mistralrs_sdk.engine import sequence
from tests.model_helpers import assert_idle, tiny_builder, tiny_folder
from tests.test_json_schema import tokenizer, vocabulary

SCHEMA = {
    "type": "object",
    "properties": {
        "ville": {"$ref": "#/$defs/ville"},
        "n": {"const": 3},
        "autres": {"type": "array", "items": {"$ref": "#/$defs/autre"}},
    },
    "required": ["ville", "n"],
    "additionalProperties": False,
    "$defs": {
        "ville": {"enum": ["東京", "Zürich", "Порту"]},
        "autre": {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}},
                {"type": "null"},
            ]
        },
    },
}
NO_SPACES = {
    "grammars": [{"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]
}
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = rf"({BYTE}\.){{3}}{BYTE}"


def asked(constraint: Constraint | None, *, seed: int = 0, max_len: int = 160) -> RequestBuilder:
    """A request at temperature 1."""
    return (
        RequestBuilder()
        .add_message("user", "hello")
        .set_constraint(constraint)
        .set_sampler_temperature(1.0)
        .set_sampler_seed(seed)
        .set_sampler_max_len(max_len)
    )


async def answer(model: Model, request: RequestBuilder) -> tuple[str, str]:
    """The text, and why it ended."""
    choice = (await model.send_chat_request(request)).choices[0]
    return choice.message.content or "", choice.finish_reason


async def answers(model: Model, requests: list[RequestBuilder]) -> list[tuple[str, str]]:
    return await asyncio.gather(*[answer(model, request) for request in requests])


def check(text: str, schema=SCHEMA) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


async def test_every_answer_that_ended_is_valid():
    """Over 200 seeds of random weights, what ended by itself parses and validates."""
    constraint = Constraint.JsonSchema(SCHEMA)
    async with await tiny_builder().build() as model:
        found = await answers(model, [asked(constraint, seed=seed) for seed in range(200)])
        found.append(await answer(model, asked(constraint).set_deterministic_sampler()))
        await assert_idle(model)

    ended = [text for text, reason in found if reason == "stop"]
    for text in ended:
        check(text)
    assert len(ended) > 150
    assert "東京" in "".join(ended)  # characters of several bytes come whole and unescaped


async def test_any_object_is_an_object():
    """`{"type": "object"}` takes every JSON object and nothing else."""
    constraint = Constraint.JsonSchema({"type": "object"})
    async with await tiny_builder().build() as model:
        found = await answers(model, [asked(constraint, seed=seed) for seed in range(20)])

    ended = [json.loads(text) for text, reason in found if reason == "stop"]
    assert ended
    assert all(isinstance(value, dict) for value in ended)


@pytest.mark.parametrize("pattern", [IPV4, "(yes|no)", "a{3}", "[A-Za-z .,]+", r"[\x00-\u2e7f]+"])
async def test_an_answer_that_ended_matches_its_regex(pattern):
    """The end may come only where the whole text matches."""
    async with await tiny_builder().build() as model:
        requests = [asked(Constraint.Regex(pattern), seed=seed, max_len=80) for seed in range(20)]
        found = await answers(model, requests)

    ended = [text for text, reason in found if reason == "stop"]
    assert ended
    assert all(re.fullmatch(pattern, text) for text in ended)
    if pattern in ("(yes|no)", "a{3}"):  # nothing can follow: they end by themselves
        assert len(ended) == len(found)


async def test_an_answer_cut_by_its_length_can_still_be_completed():
    """With too few tokens the reason is "length", and the text begins a match."""
    async with await tiny_builder().build() as model:
        text, reason = await answer(model, asked(Constraint.Regex(IPV4), max_len=2))

    assert reason == "length"
    matcher = compile_constraint(Constraint.Regex(IPV4), vocabulary()).matcher()
    assert all(matcher.advance(token) for token in tokenizer().encode(text).ids)


async def test_an_answer_that_is_complete_at_its_length_has_ended():
    """The end needs no token of the length: what is complete stops, forced or drawn."""
    async with await tiny_builder().build() as model:
        exact = await answer(model, asked(Constraint.Regex("q{3}"), max_len=3))
        short = await answer(model, asked(Constraint.Regex("q{3}"), max_len=2))

    assert exact == ("qqq", "stop")
    assert short == ("qq", "length")


async def test_lark_and_llguidance_grammars_hold_an_answer():
    """Both of llguidance's own languages are taken."""
    async with await tiny_builder().build() as model:
        lark = await answer(model, asked(Constraint.Lark('start: "a" ("b" | "c") /[0-9]{2}/')))
        compact = await answer(model, asked(Constraint.Llguidance(NO_SPACES)))

    assert re.fullmatch("a[bc][0-9]{2}", lark[0])
    assert lark[1] == compact[1] == "stop"
    check(compact[0])
    assert re.search(r"\s", compact[0]) is None


async def test_with_ignore_eos_an_answer_ends_only_where_nothing_can_follow():
    """The model's end tokens are not drawn; a finite language still ends."""
    async with await tiny_builder().build() as model:
        endless = asked(Constraint.Regex("[ab]*"), max_len=40).set_sampler_ignore_eos(True)
        finite = asked(Constraint.Regex("[ab]{1,3}")).set_sampler_ignore_eos(True)
        found = await answers(model, [endless, finite])

    assert found[0][1] == "length"
    assert len(found[0][0]) >= 40
    assert found[1][1] == "stop"
    assert len(found[1][0]) == 3


@pytest.mark.parametrize("stop", [StopTokens.Seqs(["el"]), StopTokens.Ids([80])])
async def test_stop_tokens_that_could_cut_an_answer_are_refused(stop):
    """A constrained answer ends by itself: other ends would leave what does not match."""
    async with await tiny_builder().build() as model:
        request = asked(Constraint.Regex("[a-z]+")).set_sampler_stop_toks(stop)
        with pytest.raises(RequestError, match=r"stop tokens \[.*leave them out"):
            await model.send_chat_request(request)
        own_end = asked(Constraint.Regex("a")).set_sampler_stop_toks(StopTokens.Ids([2]))
        assert await answer(model, own_end) == ("a", "stop")


async def test_what_runs_beside_constrained_answers_is_not_changed():
    """Free answers in a mixed batch are those they give alone."""
    free = [asked(None, seed=seed, max_len=24) for seed in range(4)]
    held = [asked(Constraint.JsonSchema(SCHEMA), seed=seed) for seed in range(4)]
    async with await tiny_builder().build() as model:
        alone = [await answer(model, request) for request in free]
        held_alone = [await answer(model, request) for request in held]
        mixed = await answers(model, [r for pair in zip(free, held, strict=True) for r in pair])

    assert mixed[::2] == alone
    assert mixed[1::2] == held_alone


async def test_constrained_answers_survive_preemption():
    """A pool too small for all of them changes nothing in any answer."""
    requests = [asked(Constraint.JsonSchema(SCHEMA), seed=seed) for seed in range(8)]
    async with await tiny_builder().build() as model:
        expected = await answers(model, requests)
    async with await tiny_builder(kv_tokens=264).build() as model:
        found = await answers(model, requests)
        assert (await model.stats()).preemptions > 0
        await assert_idle(model)

    assert found == expected


async def test_each_choice_has_a_matcher_of_its_own():
    """The choices of one request match independently."""
    async with await tiny_builder().build() as model:
        response = await model.send_chat_request(
            asked(Constraint.JsonSchema(SCHEMA)).set_sampler_n_choices(4)
        )

    texts = [choice.message.content for choice in response.choices]
    assert len(set(texts)) > 1
    for choice in response.choices:
        if choice.finish_reason == "stop":
            check(choice.message.content)


@pytest.mark.parametrize("paged", [True, False])
async def test_answers_are_valid_with_and_without_forced_tokens(paged, monkeypatch):
    """Known tokens are computed together, which spares draws and keeps answers valid."""
    requests = [asked(Constraint.Llguidance(NO_SPACES), seed=seed) for seed in range(10)]
    drawn = []
    for least in (sequence.LEAST_FORCED, 1000):
        monkeypatch.setattr(sequence, "LEAST_FORCED", least)
        builder = tiny_builder() if paged else tiny_builder().with_paged_attn(None)
        async with await builder.build() as model:
            for text, reason in await answers(model, requests):
                if reason == "stop":
                    check(text)
            drawn.append((await model.metrics()).tokens_generated)

    if paged:
        assert drawn[0] < 0.7 * drawn[1]
    else:
        assert drawn[0] == drawn[1]


async def test_every_token_has_its_log_probability():
    """Where log probabilities are wanted each token is drawn, and they are of the raw logits."""
    request = asked(Constraint.Llguidance(NO_SPACES)).return_logprobs(True)
    async with await tiny_builder().build() as model:
        response = await model.send_chat_request(request)
        entries = response.choices[0].logprobs.content
        first = await model.send_chat_request(
            asked(None, max_len=1).return_logprobs(True).set_sampler_topn_logprobs(20)
        )

    text = b"".join(entry.bytes for entry in entries).decode()
    assert text == response.choices[0].message.content
    tops = {top.token: top.logprob for top in first.choices[0].logprobs.content[0].top_logprobs}
    assert entries[0].token not in tops or tops[entries[0].token] == pytest.approx(
        entries[0].logprob
    )
    assert entries[0].logprob < 0  # `{` is all that is allowed, and yet not certain


async def test_a_matcher_in_error_ends_its_request_and_no_other(monkeypatch):
    """A limit of the parser is an InferenceError with what there was."""
    original = Matcher.write_mask
    calls = []

    def write_mask(self, address, num_bytes):
        calls.append(self)
        if self is calls[0] and calls.count(self) > 2:
            self._matcher.consume_token(2)  # not allowed here
        return original(self, address, num_bytes)

    monkeypatch.setattr(Matcher, "write_mask", write_mask)
    async with await tiny_builder().build() as model:
        found = await asyncio.gather(
            *[answer(model, asked(Constraint.JsonSchema(SCHEMA), seed=seed)) for seed in range(3)],
            return_exceptions=True,
        )

    failed = [error for error in found if isinstance(error, InferenceError)]
    assert len(failed) == 1
    assert "its constraint cannot go on" in str(failed[0])
    assert failed[0].partial_response is not None
    for text, reason in (item for item in found if not isinstance(item, InferenceError)):
        if reason == "stop":
            check(text)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.JsonSchema({"type": "string", "pattern": "a\\q"}),
        Constraint.JsonSchema({"not": {}}),
        Constraint.Regex("(?=a)a"),
        Constraint.Regex("[a&&b]"),
        Constraint.Lark("start: missing"),
        Constraint.Llguidance({"nothing": 1}),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_anything_runs(constraint):
    """Nothing goes on without its constraint: it is a RequestError."""
    async with await tiny_builder().build() as model:
        with pytest.raises(RequestError, match="cannot be enforced"):
            await model.send_chat_request(asked(constraint))
        assert (await model.metrics()).tokens_processed == 0


async def test_a_slow_grammar_is_refused_and_holds_nobody_up(monkeypatch):
    """Compiling is off the event loop, and limited in time."""
    release = threading.Event()
    monkeypatch.setattr(compiled_module, "_matcher", lambda *args: release.wait(30))
    try:
        with pytest.raises(RequestError, match=r"longer than 0\.05 s"):
            await compile_in_time(Constraint.Regex("slow"), vocabulary(), timeout=0.05)
    finally:
        release.set()


async def test_compiled_constraints_are_kept_those_used_last():
    """The second request with a constraint compiles nothing; the cache has an end."""
    fresh = Vocabulary(tokenizer(), size=512, eos_ids=[2])
    first = await compile_in_time(Constraint.Regex("a"), fresh)
    assert await compile_in_time(Constraint.Regex("a"), fresh) is first
    for i in range(CACHE_SIZE - 1):
        compile_constraint(Constraint.Regex(f"b{i}"), fresh)
    assert compile_constraint(Constraint.Regex("a"), fresh) is first
    compile_constraint(Constraint.Regex("c"), fresh)

    assert fresh.find(Constraint.Regex("b0")) is None
    assert fresh.find(Constraint.Regex("a")) is first


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        ("regex", Constraint.Regex("[ab]")),
        ("lark", Constraint.Lark("[ab]")),
        ("json_schema", Constraint.JsonSchema("{}")),
        ("llguidance", Constraint.Llguidance("{}")),
    ],
)
def test_a_runner_request_says_its_grammar_and_type(kind, constraint):
    """The four languages of the `mistralrs` package are those of `Constraint`."""
    for cls in (ChatCompletionRequest, CompletionRequest):
        request = cls("Hi", grammar=constraint.text, grammar_type=kind)
        assert request.constraint() == constraint


@pytest.mark.parametrize(
    "settings",
    [{"grammar": "a"}, {"grammar_type": "regex"}, {"grammar": "a", "grammar_type": "gbnf"}],
)
def test_a_runner_request_with_half_a_grammar_is_refused(settings):
    """grammar and grammar_type go together, and the type is one of four."""
    with pytest.raises(RequestError, match="grammar_type"):
        ChatCompletionRequest("Hi", **settings)


def test_a_runner_holds_answers_to_grammars():
    """Chats and completions of a Runner follow the request's grammar."""
    rules = {"grammar": "q(yes|no)", "grammar_type": "regex", "max_tokens": 20}
    with Runner(Which.Plain(str(tiny_folder()))) as runner:
        chat = runner.send_chat_completion_request(ChatCompletionRequest("Hi", **rules))
        text = runner.send_completion_request(CompletionRequest("Hi", **rules))

    assert chat.choices[0].message.content in ("qyes", "qno")
    assert text.choices[0].text in ("qyes", "qno")


def test_a_model_without_an_end_token_is_refused():
    """A constrained answer has to end somehow."""
    with pytest.raises(RequestError, match="eos_token_id"):
        compile_constraint(Constraint.Regex("a"), Vocabulary(tokenizer(), size=512, eos_ids=[]))


def test_tokens_beyond_the_tokenizer_are_never_allowed():
    """Logits wider than the tokenizer's vocabulary stay banned."""
    wide = Vocabulary(tokenizer(), size=600, eos_ids=[2])
    matcher = compile_constraint(Constraint.Regex(r"(?s:.*)"), wide).matcher()
    mask = bytearray(4 * 19)

    assert matcher.write_mask(_address(mask), len(mask))
    allowed = {i for i in range(600) if mask[i // 8] >> i % 8 & 1}
    assert max(allowed) < 512
    assert 2 in allowed
    assert not allowed & {0, 1}


def test_forced_tokens_are_as_the_tokenizer_writes_them():
    """What is known in advance is cut as the tokenizer cuts the text, but for its open end."""
    grammar = Constraint.Regex(r'\{"name":(true|false),"hello":1\}')
    matcher = compile_constraint(grammar, vocabulary()).matcher()
    ids = tokenizer().encode('{"name":true,"hello":1}').ids

    forced = matcher.forced()

    assert 0 < len(forced) <= len(ids)
    assert forced == ids[: len(forced)]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
