"""Failures reported of other engines: structured output, with a real model and with random ones."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import jsonschema
import pytest

from mistralrs_sdk import Constraint, ModelBuilder, RequestBuilder, RequestError
from tests.model_helpers import tiny_builder
from tests.test_constraints import IPV4, SCHEMA, answer, answers, asked, check


@pytest.mark.real_model
@pytest.mark.timeout(300)  # a busy machine decodes a few tokens a second
async def test_a_real_model_keeps_to_schema_and_regex(demo_model: Path):
    """Enums of other scripts behind references; a regex of another script than the prompt's."""
    chinese = RequestBuilder().add_message("user", "请用中文回答 你是谁")
    letters = Constraint.Regex("[A-Za-z .,]{1,20}")
    builder = ModelBuilder(demo_model).with_force_cpu().with_num_threads(1)
    async with await builder.build() as model:
        warm = [asked(Constraint.JsonSchema(SCHEMA), seed=s, max_len=64) for s in range(4)]
        greedy = warm[0].set_deterministic_sampler()
        foreign = chinese.set_constraint(letters).set_sampler_max_len(24)
        numbers = asked(Constraint.Regex(IPV4), max_len=24)
        *schema, text, address = await answers(model, [*warm, greedy, foreign, numbers])

    assert any(reason == "stop" for _, reason in schema)
    for found, reason in schema:
        if reason == "stop":
            check(found)
    assert text[1] == address[1] == "stop"
    assert re.fullmatch("[A-Za-z .,]{1,20}", text[0])
    assert re.fullmatch(IPV4, address[0])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "a\\q"}, "#/pattern"),
        ({"not": {}}, "#/not"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "#/properties/a/$ref"),
        ({"$ref": "#"}, "#/$ref"),
        ({"$ref": "https://example.com/schema.json"}, "#/$ref"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_while_others_go_on(schema, place):
    """The refusal names pointer and keyword; a request that runs meanwhile does not notice."""
    async with await tiny_builder().build() as model:
        alone = await answer(model, asked(None, max_len=20))
        running = asyncio.create_task(answer(model, asked(None, max_len=20)))
        with pytest.raises(RequestError, match=re.escape(f"the JSON schema's {place}:")):
            await model.send_chat_request(asked(Constraint.JsonSchema(schema)))
        assert await running == alone


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -3, "maximum": 1000},
        {"enum": [f"value {i}" for i in range(5000)]},
        {"type": "string", "maxLength": 100_000},
    ],
)
async def test_wide_schemas_are_enforced_in_time(schema):
    """Ranges, thousands of values and long strings compile at once and hold."""
    async with await tiny_builder().build() as model:
        await answer(model, asked(Constraint.Regex("a")))  # loads the vocabulary
        started = time.thread_time()
        text, reason = await answer(model, asked(Constraint.JsonSchema(schema), max_len=40))

    assert time.thread_time() - started < 5
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema)


async def test_an_address_has_four_numbers():
    """A bounded repetition ends with its last part: no fifth number, no loose end."""
    async with await tiny_builder().build() as model:
        requests = [asked(Constraint.Regex(IPV4), seed=seed, max_len=40) for seed in range(20)]
        found = await answers(model, requests)

    assert all(reason == "stop" for _, reason in found)
    assert all(text.count(".") == 3 and re.fullmatch(IPV4, text) for text, _ in found)
