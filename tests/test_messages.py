"""Building requests: turns, content forms, and when an answer is sampled."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mistralrs_sdk.chat.messages import (
    MultimodalMessages,
    ReasoningEffort,
    TextMessageRole,
    TextMessages,
)
from mistralrs_sdk.chat.refused import RefusedMedia, RefusedSettings
from mistralrs_sdk.chat.requests import RequestBuilder, as_request
from mistralrs_sdk.chat.responses import ResponseMessage
from mistralrs_sdk.chat.tools import CalledFunction, ToolCallResponse, ToolChoice
from mistralrs_sdk.errors import RequestError, UnsupportedError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens

HELLO = TextMessages().add_message(TextMessageRole.USER, "Hello")


def test_messages_are_openai_shaped():
    """A turn is a plain mapping of role and content."""
    messages = HELLO.add_message(TextMessageRole.ASSISTANT, "Hi").add_message("critic", "Hm")

    assert messages.messages == (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "critic", "content": "Hm"},
    )
    assert all(type(message["role"]) is str for message in messages.messages)


def test_builders_never_change_in_place():
    """Every method returns a new value."""
    request = RequestBuilder.from_messages(HELLO)
    request.add_message("user", "more").set_sampler_temperature(0.5).enable_thinking(True)
    HELLO.add_message("user", "more").clear()

    assert request == RequestBuilder.from_messages(HELLO)
    assert len(HELLO.messages) == 1


def test_equal_builders_are_equal_hashable_and_picklable():
    """Requests are values."""
    one = as_request("Hello").set_sampler_seed(3).with_chat_template_kwargs(style="short")
    other = as_request("Hello").set_sampler_seed(3).with_chat_template_kwargs(style="short")

    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != other.add_message("user", "x")


def test_clear_drops_turns_and_keeps_the_rest():
    """clear() forgets what was said, not how to answer."""
    assert HELLO.enable_thinking(False).clear() == TextMessages(thinking=False)


def test_thinking_survives_the_conversion():
    """A request made from text messages keeps their thinking switch."""
    assert as_request(HELLO.enable_thinking(True)).thinking is True
    assert as_request(HELLO).thinking is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}], "Hello world"),
        ([], ""),
        (None, ""),
        ("", ""),
    ],
)
def test_content_becomes_one_string(content: Any, text: str):
    """Text parts are joined without a separator; null counts as empty."""
    assert RequestBuilder().add_message("user", content).messages[0]["content"] == text
    assert as_request([{"role": "user", "content": content}]).messages[0]["content"] == text


def test_missing_content_is_empty_and_other_keys_stay():
    """An assistant turn that only calls tools has no content; its calls reach the template."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    request = as_request([{"role": "assistant", "tool_calls": calls}])

    assert request.messages == ({"role": "assistant", "tool_calls": calls, "content": ""},)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "text"}], "text"),
        (["loose"], "str"),
        ({"type": "text", "text": "x"}, "dict"),
        (5, "int"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, words: str):
    """The refusal names the kind of part."""
    with pytest.raises(RequestError, match=words):
        RequestBuilder().add_message("user", content)


@pytest.mark.parametrize("role", ["", None, 3])
def test_role_must_be_a_word(role: Any):
    """A role is a TextMessageRole or a non-empty str."""
    with pytest.raises(RequestError, match="role"):
        TextMessages().add_message(role, "x")


def test_every_accepted_form_gives_the_same_request():
    """A str, text messages, a request and a list of message dicts mean the same."""
    forms = ["Hello", HELLO, as_request(HELLO), [{"role": "user", "content": "Hello"}]]

    assert [as_request(form) for form in forms] == [RequestBuilder.from_messages(HELLO)] * 4


@pytest.mark.parametrize("source", [{"role": "user"}, None, 5, b"Hello"])
def test_other_forms_are_refused_with_the_accepted_ones(source: Any):
    """The refusal says what can be given."""
    with pytest.raises(RequestError, match="list of message dicts"):
        as_request(source)


@pytest.mark.parametrize("message", ["Hello", {"content": "Hello"}])
def test_message_without_a_role_is_refused(message: Any):
    """A list holds dicts with a role."""
    with pytest.raises(RequestError, match="role"):
        as_request([message])


def test_untouched_request_is_greedy():
    """Without a sampler choice the most likely token is taken, whatever else is set."""
    request = as_request("Hello").set_sampler_max_len(5).set_sampler_frequency_penalty(0.5)

    assert request.sampling_params == SamplingParams(top_k=1, max_len=5, frequency_penalty=0.5)


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("set_sampler_temperature", "temperature", 0.7),
        ("set_sampler_topk", "top_k", 40),
        ("set_sampler_topp", "top_p", 0.9),
        ("set_sampler_minp", "min_p", 0.05),
    ],
)
def test_first_sampler_choice_switches_to_sampling(method: str, field: str, value: float):
    """One sampler setting is enough; the others stay with the model's defaults."""
    request = getattr(as_request("Hello"), method)(value)

    assert request.sampling_params == SamplingParams(**{field: value})
    assert not request.sampling_params.is_greedy


def test_deterministic_sampler_goes_back_to_greedy():
    """The sampler choices are forgotten, limits are kept."""
    request = as_request("Hello").set_sampler_temperature(0.7).set_sampler_max_len(5)

    assert request.set_deterministic_sampler() == as_request("Hello").set_sampler_max_len(5)


def test_set_sampling_says_it_all():
    """Sampling settings given as a whole replace everything and are taken as they are."""
    request = as_request("Hello").set_sampler_max_len(5).set_sampling(SamplingParams.neutral())

    assert request.sampling_params == SamplingParams()


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("set_sampler_topn_logprobs", "top_n_logprobs", 3),
        ("set_sampler_frequency_penalty", "frequency_penalty", 0.1),
        ("set_sampler_presence_penalty", "presence_penalty", 0.2),
        ("set_sampler_repetition_penalty", "repetition_penalty", 1.1),
        ("set_sampler_stop_toks", "stop_toks", StopTokens.Seqs(["\n"])),
        ("set_sampler_max_len", "max_len", 7),
        ("set_sampler_ignore_eos", "ignore_eos", True),
        ("set_sampler_logits_bias", "logits_bias", {3: -1.0}),
        ("set_sampler_n_choices", "n_choices", 2),
        ("set_sampler_dry_params", "dry_params", DrySamplingParams(multiplier=0.8)),
        ("set_sampler_seed", "seed", 42),
        ("return_logprobs", "return_logprobs", True),
    ],
)
def test_setting_arrives_in_the_sampling_params(method: str, field: str, value: Any):
    """Each setter sets its own field and nothing else."""
    request = getattr(as_request("Hello"), method)(value)

    assert request.sampling_params == SamplingParams(**{field: value, "top_k": 1})


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("set_sampler_temperature", -1),
        ("set_sampler_topp", 1.5),
        ("set_sampler_max_len", 0),
        ("set_sampler_n_choices", 0),
        ("set_sampler_stop_toks", ["\n"]),
        ("set_sampler_dry_params", {"multiplier": 1}),
        ("set_sampler_logits_bias", [1]),
        ("set_sampler_ignore_eos", "yes"),
        ("set_sampling", {"temperature": 1}),
        ("enable_thinking", "no"),
        ("return_logprobs", 1),
        ("with_truncate_sequence", None),
    ],
)
def test_bad_value_is_refused_where_it_is_set(method: str, value: Any):
    """A setter checks its value at once."""
    with pytest.raises(RequestError):
        getattr(as_request("Hello"), method)(value)


def test_later_template_kwargs_replace_earlier_ones():
    """Template variables add up."""
    request = as_request("Hello").with_chat_template_kwargs(a=1, b=1)

    assert request.with_chat_template_kwargs(b=2).chat_template_kwargs == {"a": 1, "b": 2}


def test_truncation_is_off_until_asked_for():
    """A too long prompt is refused by default."""
    request = as_request("Hello")

    assert not request.truncate_sequence
    assert request.with_truncate_sequence(True).truncate_sequence


def test_multimodal_messages_take_text_and_become_requests():
    """mistral.rs' name works for text, keeps its type, and converts like TextMessages."""
    messages = MultimodalMessages().add_message("user", "Hello").enable_thinking(False)

    assert type(messages) is MultimodalMessages
    assert as_request(messages) == as_request(HELLO.enable_thinking(False))


@pytest.mark.parametrize(
    ("builder", "setter"),
    [
        (builder(), name)
        for builder, refused in (
            (MultimodalMessages, RefusedMedia),
            (RequestBuilder, RefusedMedia),
            (RequestBuilder, RefusedSettings),
        )
        for name in vars(refused)
        if not name.startswith("_")
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_done_is_refused_by_the_setters_name(builder, setter):
    """Setters of mistral.rs that this package has no use for exist and say so."""
    with pytest.raises(UnsupportedError, match=rf"^{setter} is not supported: \w+"):
        getattr(builder, setter)("anything", at="all")


def test_answers_can_be_appended_to_a_list_of_messages():
    """The message of a response is a turn; its calls go along."""
    answer = ResponseMessage(content="Hi.", reasoning_content="Hm.")
    request = as_request([{"role": "user", "content": "Hello"}, answer])

    assert request.messages[1] == {
        "role": "assistant",
        "content": "Hi.",
        "reasoning_content": "Hm.",
    }


def test_null_fields_of_a_message_are_left_out():
    """Templates ask whether `tool_calls` is there at all; clients write null, or an empty list."""
    dumped = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None}
    empty = {"role": "assistant", "content": "Hi", "tool_calls": []}

    for message in (dumped, empty):
        assert as_request([message]).messages == ({"role": "assistant", "content": "Hi"},)


def test_calls_of_an_answer_may_stand_in_a_message_as_they_are():
    """Objects become the dicts that templates read."""
    call = ToolCallResponse(index=0, id="1", function=CalledFunction("now", "{}"))

    asked = as_request([{"role": "assistant", "content": None, "tool_calls": (call,)}])

    assert asked.messages[0]["tool_calls"] == [call.to_dict()]


@pytest.mark.parametrize("calls", ["now", 5, [None], {"id": "1"}])
def test_calls_that_are_none_are_refused(calls: Any):
    """The error shows them, before a template stumbles over them."""
    with pytest.raises(RequestError, match=r"tool.call"):
        as_request([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_members_have_the_names_of_mistral_rs_too():
    """`TextMessageRole.User` is `TextMessageRole.USER`, and so for efforts and tool choices."""
    assert TextMessageRole.User is TextMessageRole.USER
    assert ReasoningEffort.XHigh is ReasoningEffort.XHIGH
    assert ToolChoice.Required is ToolChoice.REQUIRED
