"""Tool calls and reasoning of a whole model: prompt, stream, response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mistralrs_sdk import (
    Constraint,
    Function,
    Model,
    ModelBuilder,
    RequestBuilder,
    RequestError,
    StopTokens,
    Tool,
    ToolChoice,
)
from mistralrs_sdk.chat.tools import joined_calls
from tests.checkpoint_files import change_json
from tests.model_helpers import tiny_builder
from tests.script_model import EOS, START, script_folder

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking }}"
    "{{ '<think>' if opened is defined }}{{ '\n' }}"
)
NOW = Tool(Function("now", "The time.", {"type": "object", "properties": {}}))
LATER = Tool(Function("later"))
ANSWER = [
    "<think>",
    "\nwhat ",
    "time?",
    "\n</think>",
    "\n\nLet me",
    " look.",
    "\n<tool_call>",
    '\n{"name": "now", ',
    '"arguments": {"zo',
    'ne": "UTC"}}',
    "\n</tool_call>",
    "\n<tool_call>\n",
    '{"name": "later"}',
    "</tool_call>",
]
"""One token each."""


def pieces_tokenizer(pieces: list[str], special: tuple[str, ...]) -> Tokenizer:
    """Bytes, with the line feed at `START` and the end at `EOS`; then each piece as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = ["<pad>", "<bos>", "<|im_end|>", *alphabet]
    feed = order.index("Ċ")
    order[START], order[feed] = order[feed], order[START]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(order)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<|im_end|>"])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    words = [piece for piece in pieces if piece not in special]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    assert tokenizer.token_to_id("<|im_end|>") == EOS
    return tokenizer


async def scripted(
    folder: Any, pieces: list[str], special: tuple[str, ...] = (), **settings: Any
) -> Model:
    """A model that answers with these pieces, one token each."""
    tokenizer = pieces_tokenizer(pieces, special)
    script = [tokenizer.token_to_id(piece) for piece in pieces]
    path = script_folder(folder, script, tokenizer=tokenizer)
    change_json(path / "config.json", max_position_embeddings=512)
    change_json(path / "tokenizer_config.json", chat_template=TEMPLATE, **settings)
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("f32")
    return await builder.build()


@pytest.fixture
async def model(tmp_path) -> AsyncIterator[Model]:
    async with await scripted(tmp_path, ANSWER) as model:
        yield model


def asking(*tools: Tool) -> RequestBuilder:
    return RequestBuilder().add_message("user", "When?").set_tools(tools)


async def collected(model: Model, request: RequestBuilder) -> tuple[Any, list[Any]]:
    """The whole response, and the chunks of the same request."""
    whole = await model.send_chat_request(request)
    async with await model.stream_chat_request(request) as stream:
        chunks = [chunk async for chunk in stream]
    return whole, chunks


async def test_calls_and_reasoning_are_parted_from_the_content(model):
    """The message holds each in its place, and the answer ends for the sake of the calls."""
    whole, chunks = await collected(model, asking(NOW, LATER))
    (choice,) = whole.choices
    deltas = [chunk.choices[0].delta for chunk in chunks]

    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.reasoning_content == "what time?"
    calls = [(c.index, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [(0, "now", '{"zone": "UTC"}'), (1, "later", "{}")]
    assert "".join(d.content or "" for d in deltas) == choice.message.content
    assert "".join(d.reasoning_content or "" for d in deltas) == choice.message.reasoning_content
    streamed = [call for d in deltas for call in d.tool_calls or ()]
    joined = joined_calls(streamed)
    assert [(c.index, c.function.name, c.function.arguments) for c in joined] == calls
    assert whole.usage.completion_tokens == len(ANSWER) + 1
    assert not choice.unparsed_tool_call


async def test_a_response_with_calls_has_openais_shape(model):
    """`to_dict` gives plain JSON, calls and reasoning included."""
    whole, chunks = await collected(model, asking(NOW, LATER))

    message = json.loads(json.dumps(whole.to_dict()))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": "UTC"}'}
    assert message["tool_calls"][0]["type"] == "function"
    assert message["reasoning_content"] == "what time?"
    first = next(c for c in chunks if c.choices[0].delta.tool_calls).to_dict()
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "now"


async def test_without_tools_call_text_is_text(model):
    """Calls are looked for only where tools are offered."""
    for request in (asking(), asking(NOW).set_tool_choice(ToolChoice.NONE)):
        (choice,) = (await model.send_chat_request(request)).choices

        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == "".join(ANSWER[4:]).lstrip()


async def test_markers_that_are_special_tokens_are_seen(tmp_path):
    """Special tokens that mean something here are read; the others stay left out."""
    pieces = ["<tool_call>", '{"name": "now"}', "</tool_call>", "<|odd|>"]
    special = ("<tool_call>", "</tool_call>", "<|odd|>")
    async with await scripted(tmp_path, pieces, special) as model:
        (choice,) = (await model.send_chat_request(asking(NOW))).choices
        (plain,) = (await model.send_chat_request(asking())).choices

    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.message.content is None
    assert plain.message.content == '{"name": "now"}'


async def test_a_call_cut_off_is_content_with_a_flag(model):
    """At the length limit what had come of a call is content, and the choice says so."""
    request = asking(NOW).set_sampler_max_len(9)
    whole, chunks = await collected(model, request)
    (choice,) = whole.choices

    assert choice.finish_reason == "length"
    assert choice.message.content == "".join(ANSWER[4:9]).lstrip()
    assert choice.message.tool_calls is None
    assert choice.unparsed_tool_call
    assert chunks[-1].choices[0].unparsed_tool_call
    assert choice.to_dict()["unparsed_tool_call"] is True


async def test_an_answer_cut_off_while_thinking_has_no_content(model):
    """Reasoning without its end stays reasoning."""
    (choice,) = (await model.send_chat_request(asking().set_sampler_max_len(3))).choices

    assert choice.message.content == ""
    assert choice.message.reasoning_content == "what time?"


async def test_reasoning_the_prompt_began_is_reasoning(tmp_path):
    """A template that writes the opening tag leaves only the end of the block to the model."""
    async with await scripted(tmp_path, ["hm", "</think>", "\nNoon"]) as model:
        request = asking().with_chat_template_kwargs(opened=True)
        (choice,) = (await model.send_chat_request(request)).choices
        (plain,) = (await model.send_chat_request(asking())).choices

    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Noon")
    assert (plain.message.reasoning_content, plain.message.content) == (None, "hm</think>\nNoon")


async def test_a_stop_string_ends_an_answer_with_calls(model):
    """A stop string matches in the text as generated; whole calls before it count."""
    stop = StopTokens(seqs=('{"name": "later',))
    (choice,) = (await model.send_chat_request(asking(NOW).set_sampler_stop_toks(stop))).choices

    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.finish_reason == "tool_calls"
    assert choice.stop_reason == '{"name": "later'


async def test_each_choice_has_calls_of_its_own(model):
    """Choices are parsed apart; no two calls share an id."""
    response = await model.send_chat_request(asking(NOW).set_sampler_n_choices(3))

    calls = [choice.message.tool_calls for choice in response.choices]
    assert [[c.index for c in each] for each in calls] == [[0, 1]] * 3
    assert len({call.id for each in calls for call in each}) == 6


async def test_the_prompt_shows_the_tools_that_may_be_called(model):
    """None shows none; a named tool or a choice among some shows only these."""
    request = asking(NOW, LATER)

    def shown(choice: ToolChoice) -> str:
        return model.render_chat(request.set_tool_choice(choice))[0].split("When")[0]

    assert shown(ToolChoice.AUTO) == "now;later;"
    assert shown(ToolChoice.NONE) == ""
    assert shown(ToolChoice.named("later")) == "later;"
    assert shown(ToolChoice.allowed_tools([NOW])) == "now;"
    assert await model.tokenize(request) == model.render_chat(request)[1]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asking(NOW).set_tool_choice(ToolChoice.named("then")), "names 'then'"),
        (asking().set_tool_choice(ToolChoice.REQUIRED), "no tools"),
        (asking().set_tool_choice(ToolChoice.named("now")), "names 'now'"),
    ],
)
async def test_a_choice_that_cannot_be_kept_is_refused(model, request_, words):
    """Tools that are not there cannot be called; the error names them."""
    with pytest.raises(RequestError, match=words):
        await model.send_chat_request(request_)


async def test_the_round_trip_of_a_call_is_rendered(model):
    """Calls of an answer, given back with their result, are what the template shows."""
    message = (await model.send_chat_request(asking(NOW))).choices[0].message
    request = asking(NOW).add_message_with_tool_call("assistant", "", message.tool_calls[:1])
    request = request.add_tool_message("12:00", message.tool_calls[0].id)

    assert (
        model.render_chat(request)[0]
        == 'now;When?<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>12:00\n'
    )


CHOOSE = Tool(
    Function(
        "choose",
        parameters={
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "way": {"enum": ["北", "south"]}},
            "required": ["on", "way"],
            "additionalProperties": False,
        },
    )
)


@pytest.fixture(scope="module")
def tool_builder() -> ModelBuilder:
    """A model with random weights and a template that takes tools, which does not think."""
    return tiny_builder().with_chat_template(TEMPLATE.replace("think", "other"))


async def test_a_required_call_is_made_by_any_model(tool_builder):
    """Random weights, any seed: the answer is a call whose arguments fit the schema."""
    request = asking(CHOOSE, NOW).set_tool_choice(ToolChoice.named(CHOOSE)).set_sampler_topk(50)
    async with await tool_builder.build() as model:
        answers = await asyncio.gather(
            *(model.send_chat_request(request.set_sampler_seed(seed)) for seed in range(20))
        )

    for answer in answers:
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert call.function.name == "choose"
        assert set(json.loads(call.function.arguments)) == {"on", "way"}


async def test_required_without_a_name_takes_any_of_the_tools(tool_builder):
    """The answer begins with a call of one of them, and has no words beside calls."""
    request = asking(CHOOSE, LATER).set_tool_choice(ToolChoice.REQUIRED).set_sampler_topk(50)
    async with await tool_builder.build() as model:
        answers = await asyncio.gather(
            *(
                model.send_chat_request(request.set_sampler_seed(seed).set_sampler_max_len(250))
                for seed in range(8)
            )
        )

    messages = [answer.choices[0].message for answer in answers]
    called = {call.function.name for message in messages for call in message.tool_calls}
    assert called == {"choose", "later"}
    # where the length ends a call, what there is of it is content
    assert all((message.content or "<tool_call>").startswith("<") for message in messages)


async def test_a_constraint_beside_a_required_call_is_refused(model):
    """An answer cannot be held to two things."""
    request = asking(NOW).set_constraint(Constraint.Regex("yes|no"))

    with pytest.raises(RequestError, match="a required tool call"):
        await model.send_chat_request(request.set_tool_choice(ToolChoice.REQUIRED))
    strict = Tool(Function("now", strict=True))
    with pytest.raises(RequestError, match="strict tools"):
        await model.send_chat_request(request.set_tools([strict]))


async def test_a_constraint_goes_with_tools_that_may_be_called(tool_builder):
    """Tools that bind nothing leave the request's own constraint alone."""
    request = asking(NOW).set_constraint(Constraint.Regex("yes|no"))
    async with await tool_builder.build() as model:
        (choice,) = (await model.send_chat_request(request)).choices

    assert choice.message.content in ("yes", "no")


async def test_a_strict_schema_that_cannot_be_enforced_is_refused(model):
    """The refusal comes before anything runs, and names the tool."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = Tool(Function("odd", parameters=schema, strict=True))

    with pytest.raises(RequestError, match="tool 'odd' is strict"):
        await model.send_chat_request(asking(tool))


CHANNELS = {
    "start_anchor": "never in the prompt",
    "fields": {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
    },
}
CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|call|>")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (
            ["<|channel|>", "analysis", "<|message|>", " hm", "m ", "<|end|>"],
            ("", "hmm", None, "stop"),
        ),
        (
            ["<|channel|>", "commentary to=functions.", "now ", "<|message|>", '{"a": ', "1}"],
            (None, None, [("now", '{"a": 1}')], "tool_calls"),
        ),
        (
            ["oh ", "<|channel|>", "final", "<|message|>", "It is", " noon."],
            ("It is noon.", None, None, "stop"),
        ),
    ],
)
async def test_a_response_template_with_channels_is_followed(tmp_path, pieces, expected):
    """Its marks are special tokens; whole and streamed answers say the same."""
    settings = {"response_template": CHANNELS}
    async with await scripted(tmp_path, pieces, CHANNEL_MARKS, **settings) as model:
        whole, chunks = await collected(model, asking(NOW))
        described = model.describe()

    (choice,) = whole.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert (message.content, message.reasoning_content, calls or None, choice.finish_reason) == (
        expected
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    streamed = joined_calls(call for delta in deltas for call in delta.tool_calls or ())
    assert [(call.function.name, call.function.arguments) for call in streamed] == calls
    assert "as the response template says" in described
