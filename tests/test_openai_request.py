"""OpenAI's chat completion bodies as requests: what each key comes to, and what is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import attrs
import pytest

from mistralrs_sdk.chat import openai_request
from mistralrs_sdk.chat.messages import ReasoningEffort
from mistralrs_sdk.chat.openai_request import model_named
from mistralrs_sdk.chat.requests import RequestBuilder, as_request
from mistralrs_sdk.chat.responses import ResponseMessage
from mistralrs_sdk.chat.tool_events import AgentPermission
from mistralrs_sdk.chat.tools import ToolChoice
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.errors import RequestError, UnsupportedError
from mistralrs_sdk.sampling_params import DrySamplingParams, SamplingParams, StopTokens
from tests.model_helpers import tiny_builder

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**keys) -> RequestBuilder:
    return as_request({"messages": HI, **keys})


def test_a_bare_body_samples_with_the_models_defaults():
    """As in OpenAI's API an unset temperature is not 0: nothing is set, and the answer is drawn."""
    request = asked()

    assert request.messages == ({"role": "user", "content": "Hi"},)
    assert request.samples
    assert request.sampling_params == SamplingParams.neutral()


@pytest.mark.parametrize(
    ("key", "value", "setting", "found"),
    [
        ("temperature", 0, "temperature", 0),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", 5, "top_k", 5),
        ("min_p", 0.1, "min_p", 0.1),
        ("max_tokens", 7, "max_len", 7),
        ("max_completion_tokens", 7, "max_len", 7),
        ("stop", "\n", "stop_toks", StopTokens.Seqs(["\n"])),
        ("stop", ["a", "b"], "stop_toks", StopTokens.Seqs(["a", "b"])),
        ("n", 3, "n_choices", 3),
        ("seed", 11, "seed", 11),
        ("logprobs", True, "return_logprobs", True),
        ("top_logprobs", 4, "top_n_logprobs", 4),
        ("frequency_penalty", -1.5, "frequency_penalty", -1.5),
        ("presence_penalty", 0.5, "presence_penalty", 0.5),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("logit_bias", {"12": -100, 13: 1}, "logits_bias", {12: -100, 13: 1}),
        ("ignore_eos", True, "ignore_eos", True),
    ],
)
def test_sampling_keys_become_sampling_settings(key, value, setting, found):
    """Each sampling key sets its setting and no other."""
    expected = attrs.evolve(SamplingParams(), **{setting: found})

    assert asked(**{key: value}).sampling_params == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"tools": [WEATHER]}, RequestBuilder().set_tools([WEATHER])),
        ({"tool_choice": "none"}, RequestBuilder().set_tool_choice(ToolChoice.NONE)),
        ({"enable_thinking": False}, RequestBuilder().enable_thinking(False)),
        ({"reasoning_effort": "high"}, RequestBuilder().with_reasoning_effort("high")),
        ({"reasoning_effort": "none"}, RequestBuilder().with_reasoning_effort("off")),
        ({"chat_template_kwargs": {"a": 1}}, RequestBuilder().with_chat_template_kwargs(a=1)),
        ({"truncate_sequence": True}, RequestBuilder().with_truncate_sequence(True)),
        ({"adapter": "sql"}, RequestBuilder().set_adapter("sql")),
        ({"session_id": "s"}, RequestBuilder().with_session_id("s")),
        ({"max_tool_rounds": 2}, RequestBuilder().with_max_tool_rounds(2)),
        ({"tool_dispatch_url": "http://x"}, RequestBuilder().with_tool_dispatch_url("http://x")),
        (
            {"agent_permission": "deny"},
            RequestBuilder().with_agent_permission(AgentPermission.DENY),
        ),
        ({"priority": -1}, RequestBuilder().with_priority(-1)),
        ({"deadline": 2}, RequestBuilder().with_deadline(2)),
        ({"cache_salt": "t"}, RequestBuilder().with_cache_salt("t")),
        ({"response_format": {"type": "text"}}, RequestBuilder()),
        (
            {"response_format": {"type": "json_object"}},
            RequestBuilder().set_constraint(Constraint.JsonSchema({"type": "object"})),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            RequestBuilder().set_constraint(Constraint.JsonSchema(SCHEMA)),
        ),
        (
            {"grammar": {"type": "regex", "value": "a+"}},
            RequestBuilder().set_constraint(Constraint.Regex("a+")),
        ),
        (
            {"grammar": {"type": "lark", "value": 'start: "a"'}},
            RequestBuilder().set_constraint(Constraint.Lark('start: "a"')),
        ),
    ],
    ids=str,
)
def test_other_keys_become_what_their_setter_sets(keys, expected):
    """Each key does what the builder's method does."""
    request = asked(**keys)

    assert attrs.evolve(request, messages=(), samples=False) == expected
    assert request.messages == tuple(HI)


def test_dry_keys_become_dry_params():
    """The four dry_* keys are one setting."""
    request = asked(dry_multiplier=0.8, dry_allowed_length=3, dry_sequence_breakers=["x"])

    assert request.sampling.dry_params == DrySamplingParams(
        multiplier=0.8, allowed_length=3, sequence_breakers=["x"]
    )


def test_null_means_unset():
    """Clients send null for what they leave open: it changes nothing, even for refused keys."""
    keys = {*openai_request._SAMPLING, *openai_request._SETTERS, *openai_request._READ_HERE}
    nothing = dict.fromkeys(keys - {"messages"} | openai_request._REFUSED.keys())

    assert asked(**nothing) == asked()


def test_a_str_for_messages_is_one_user_turn():
    """mistral.rs' short form."""
    assert as_request({"messages": "Hi"}) == asked()


def test_developer_is_the_system_role():
    """Chat templates know no role "developer"."""
    request = as_request({"messages": [{"role": "developer", "content": "Be brief."}]})

    assert request.messages[0]["role"] == "system"


def test_messages_of_answers_are_taken_as_they_came():
    """What a response holds goes into the next request, ours and pydantic's alike."""

    class Theirs:
        def model_dump(self, *, exclude_none):
            assert exclude_none
            return {"role": "assistant", "content": "Yes."}

    request = as_request({"messages": [*HI, ResponseMessage(content="Yes."), Theirs()]})

    assert [m["content"] for m in request.messages] == ["Hi", "Yes.", "Yes."]


def test_unknown_keys_are_named():
    """A misspelt key is not a setting that does nothing."""
    with pytest.raises(RequestError, match=r"'temprature'.*known are.*temperature"):
        asked(temprature=1.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n_choices"),
        ({"stop": 5}, '"stop"'),
        ({"tools": WEATHER}, '"tools"'),
        ({"logit_bias": {"x": 1}}, "logits_bias token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logits_bias token id"),
        ({"logit_bias": [1]}, '"logit_bias"'),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": "off", "enable_thinking": True}, "contradicts"),
        ({"logprobs": False, "top_logprobs": 2}, "contradicts"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "two names of one limit"),
        ({"dry_base": 2.0}, "without"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
        ({"response_format": "json"}, "must be a dict"),
        ({"grammar": {"type": "bnf", "value": ""}}, "grammar"),
        ({"grammar": {"type": ["regex"], "value": ""}}, "grammar"),
        (
            {
                "grammar": {"type": "regex", "value": "a"},
                "response_format": {"type": "json_object"},
            },
            "give one",
        ),
    ],
    ids=str,
)
def test_bad_values_are_request_errors(keys, message):
    """The error names the key or the setting."""
    with pytest.raises(RequestError, match=message):
        asked(**keys)


@pytest.mark.parametrize("messages", [None, 5, {"role": "user"}])
def test_messages_must_be_a_list(messages):
    """Nothing else is guessed at."""
    with pytest.raises(RequestError, match='"messages"'):
        as_request({"messages": messages})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"functions": [{}]}, 'write "tools"'),
        ({"web_search_options": {"search_context_size": "low"}}, "searches the web"),
        ({"shell_skills": [{"name": "a"}]}, "may name no folders"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_by_name(keys, message):
    """Nothing that was asked for is left out in silence."""
    with pytest.raises(UnsupportedError, match=message):
        asked(**keys)


def test_what_asks_for_nothing_is_let_pass():
    """False, and the value a key has anyway, ask for nothing."""
    assert asked(shell_skills=[], parallel_tool_calls=True, modalities=["text"]) == asked()


def test_bookkeeping_is_logged_once(caplog, monkeypatch):
    """What only a service could use changes nothing, and is said once."""
    monkeypatch.setattr(openai_request, "_mentioned", set())
    with caplog.at_level(logging.WARNING, logger="mistralrs_sdk.chat"):
        assert asked(user="me") == asked(user="you") == asked()

    assert [record.getMessage() for record in caplog.records] == [
        "'user' of an OpenAI-shaped request has no effect here"
    ]


def test_the_named_model_is_returned_beside_the_request():
    """Only OpenAI-shaped requests name a model."""
    assert model_named({"messages": HI, "model": "small"}) == "small"
    assert model_named({"messages": HI}) is None
    assert model_named("small") is None
    assert model_named(HI) is None
    with pytest.raises(RequestError, match="model"):
        model_named({"messages": HI, "model": 5})


@pytest.mark.parametrize("wanted", [True, False])
def test_stream_must_be_what_the_method_does(wanted):
    """A body that wants a stream is not answered whole, nor the other way round."""
    body = {"messages": HI, "stream": wanted, "stream_options": {"include_usage": True}}

    assert as_request(body) == as_request(body, streams=wanted) == asked()
    with pytest.raises(RequestError, match='"stream" is'):
        as_request(body, streams=not wanted)


def test_efforts_of_openai_have_a_counterpart():
    """OpenAI's lowest levels are the lowest there are here."""
    assert asked(reasoning_effort="minimal").reasoning_effort is ReasoningEffort.LOW


def test_the_page_lists_every_key():
    """docs/openai_requests.md names what is taken and what is refused, and nothing else."""
    page = (Path(__file__).parent.parent / "docs" / "openai_requests.md").read_text()
    known = {
        *openai_request._SAMPLING,
        *openai_request._SETTERS,
        *openai_request._READ_HERE,
        *openai_request._BOOKKEEPING,
    }
    listed = {
        key
        for line in page.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    refused = set(re.findall(r"`(\w+)`", page.split("`UnsupportedError`:")[1]))

    assert listed == known
    assert refused >= openai_request._REFUSED.keys()


async def test_a_model_answers_an_openai_request():
    """The body is answered as the builder with the same settings is, streamed too."""
    body = {"messages": HI, "model": "default", "max_tokens": 6, "temperature": 0}
    built = RequestBuilder().add_message("user", "Hi").set_sampler_max_len(6)
    async with await tiny_builder().build() as model:
        expected = await model.send_chat_request(built)
        whole = await model.send_chat_request(body)
        async with await model.stream_chat_request({**body, "stream": True}) as stream:
            streamed = await stream.collect()
        with pytest.raises(RequestError, match="stream_chat_request"):
            await model.send_chat_request({**body, "stream": True})

    texts = [each.choices[0].message.content for each in (expected, whole, streamed)]
    assert texts == [texts[0]] * 3
    assert whole.to_dict()["object"] == "chat.completion"
