"""Python types as schemas, and answers as their instances."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import json
import typing
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict

import attrs
import jsonschema
import pydantic
import pytest

from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import ChatCompletionResponse, Choice, ResponseMessage, Usage
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.constraints.python_types import build, schema_for
from mistralrs_sdk.errors import InferenceError, RequestError
from mistralrs_sdk.serving.structured import generate_structured
from tests.model_helpers import tiny_builder
from tests.test_json_schema import compiled


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Address:
    street: str
    zip: int | None = None


@attrs.frozen
class Person:
    name: str
    colour: Colour = Colour.RED
    addresses: list[Address] = attrs.field(factory=list)
    _secret: int = attrs.field(default=3, alias="secret")
    parent: Optional[Person] = None  # noqa: UP045 (the older spelling)


class Point(TypedDict):
    x: float
    label: NotRequired[str]


class Item(pydantic.BaseModel):
    sku: str = pydantic.Field(pattern="^[A-Z]{3}$")
    count: int = pydantic.Field(default=1, ge=1, le=9)


class Order(pydantic.BaseModel):
    items: list[Item]
    due: datetime.date


@dataclasses.dataclass
class Parcel:
    order: Order
    to: Address | Person


Metres = NewType("Metres", int)

CASES: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (float, 3, 3.0),
    (bool, True, True),
    (None, None, None),
    (Any, {"a": [1]}, {"a": [1]}),
    (Literal["a", 1, None], "a", "a"),
    (int | str, "x", "x"),
    (list[int], [1, 2], [1, 2]),
    (Sequence[int], [1], [1]),
    (set[int], [1, 1], {1}),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
    (tuple[()], [], ()),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (list, [1, "a"], [1, "a"]),
    (Annotated[int, "in metres"], 3, 3),
    (Metres, 3, 3),
    (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
    (
        datetime.datetime,
        "2024-02-29T01:02:03Z",
        datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC),
    ),
    (datetime.time, "01:02:03Z", datetime.time(1, 2, 3, tzinfo=datetime.UTC)),
    (decimal.Decimal, "1.50", decimal.Decimal("1.50")),
    (uuid.UUID, str(uuid.UUID(int=7)), uuid.UUID(int=7)),
    (Colour, "blue", Colour.BLUE),
    (Address, {"street": "a", "zip": None}, Address("a")),
    (
        Person,
        {"name": "n", "secret": 4, "addresses": [{"street": "s"}], "parent": {"name": "p"}},
        Person("n", secret=4, addresses=[Address("s")], parent=Person("p")),
    ),
    (Point, {"x": 1.5}, {"x": 1.5}),
    (
        Order,
        {"items": [{"sku": "ABC"}], "due": "2024-02-29"},
        Order(items=[Item(sku="ABC")], due=datetime.date(2024, 2, 29)),
    ),
    (
        Parcel,
        {"order": {"items": [], "due": "2024-01-01"}, "to": {"name": "n"}},
        Parcel(Order(items=[], due=datetime.date(2024, 1, 1)), Person("n")),
    ),
]


@pytest.mark.parametrize(("kind", "value", "instance"), CASES)
def test_a_value_of_the_schema_becomes_an_instance(kind, value, instance):
    """What fits a type's schema is built into the type, nested types too."""
    schema = schema_for(kind)

    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert build(kind, value) == instance
    assert type(build(kind, value)) is type(instance)


@pytest.mark.parametrize("kind", [kind for kind, _, _ in CASES])
def test_every_supported_type_can_be_enforced(kind):
    """No schema of a Python type holds a keyword that constraints refuse."""
    compiled(schema_for(kind))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Address, {"street": "a", "city": "b"}),
        (Item, {"sku": "abc"}),
        (Address, {"zip": 3}),
        (Colour, "green"),
        (tuple[int, str], [1]),
        (bool, 1),
        (int, True),
    ],
)
def test_the_schema_is_as_narrow_as_the_type(kind, value):
    """Unknown fields, missing ones and other values are not valid."""
    assert not jsonschema.Draft202012Validator(schema_for(kind)).is_valid(value)
    with pytest.raises(ValueError, match=r"."):
        build(kind, value)


def test_a_pydantic_model_is_closed_unless_it_says_it_is_open():
    """Properties a model does not know may not come, unless it allows extra ones."""

    class Open(pydantic.BaseModel, extra="allow"):
        a: int

    assert not jsonschema.Draft202012Validator(schema_for(Item)).is_valid({"sku": "ABC", "b": 1})
    assert jsonschema.Draft202012Validator(schema_for(Open)).is_valid({"a": 1, "b": 1})


@pytest.mark.parametrize(
    "kind",
    [
        complex,
        bytes,
        datetime.timedelta,
        dict[int, str],
        Annotated[int, pydantic.Field(ge=1)],
        Literal[b"a"],
        typing.Callable[[], int],
        [1],
        3,
    ],
)
def test_a_type_without_a_schema_is_refused_by_name(kind):
    """What cannot be said in a schema is a RequestError before anything is sent."""
    with pytest.raises(RequestError):
        schema_for(kind)


def test_classes_of_one_name_are_kept_apart():
    """Two classes with the same name have two definitions."""
    one = dataclasses.make_dataclass("Thing", [("a", int)])
    two = dataclasses.make_dataclass("Thing", [("b", str)])

    schema = schema_for(tuple[one, two, one])

    assert list(schema["$defs"]) == ["Thing", "Thing2"]
    assert build(tuple[one, two, one], [{"a": 1}, {"b": "x"}, {"a": 2}]) == (
        one(1),
        two("x"),
        one(2),
    )


def answering(text: str | None, finish_reason: str = "stop"):
    """A `send` that always answers so, and the requests it got."""
    asked: list[RequestBuilder] = []

    async def send(request: RequestBuilder) -> ChatCompletionResponse:
        asked.append(request)
        message = ResponseMessage(role="assistant", content=text)
        choice = Choice(index=0, message=message, finish_reason=finish_reason)
        usage = Usage.measure(
            prompt_tokens=1, completion_tokens=1, cached_tokens=0, prompt_time=1, completion_time=1
        )
        return ChatCompletionResponse(id="x", created=0, model="m", choices=(choice,), usage=usage)

    return send, asked


async def test_the_answer_is_an_instance_of_the_type():
    """The request goes out with the type's schema, and the answer comes back built."""
    send, asked = answering('{"street": "a"}')

    assert await generate_structured(send, Address, "Where?") == Address("a")
    assert asked[0].constraint == Constraint.JsonSchema(schema_for(Address))
    assert asked[0].messages == RequestBuilder().add_message("user", "Where?").messages


async def test_a_schema_gives_parsed_json():
    """With a JSON schema in place of a type, the answer is parsed, not built."""
    schema = {"type": "array", "items": {"type": "integer"}}
    send, asked = answering("[1, 2]")

    assert await generate_structured(send, schema, "Count.") == [1, 2]
    assert json.loads(asked[0].constraint.text) == schema


async def test_an_answer_cut_short_is_an_error_that_holds_it():
    """A truncated answer is never read; what there is comes with the error."""
    send, _ = answering('{"street": "a', "length")

    with pytest.raises(InferenceError, match="set_sampler_max_len") as caught:
        await generate_structured(send, Address, "Where?")
    assert caught.value.partial_response.choices[0].message.content == '{"street": "a'


async def test_what_the_type_itself_refuses_is_an_error_that_holds_the_answer():
    """A validator that no schema shows may refuse the answer."""

    class Even(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            if n % 2:
                raise ValueError("odd")
            return n

    send, _ = answering('{"n": 3}')

    with pytest.raises(InferenceError, match="odd") as caught:
        await generate_structured(send, Even, "Say a number.")
    assert caught.value.partial_response.choices[0].message.content == '{"n": 3}'


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (RequestBuilder().set_constraint(Constraint.Regex("a")), "set_constraint"),
        (RequestBuilder().set_sampler_n_choices(2), "n_choices"),
    ],
)
async def test_a_request_that_contradicts_is_refused(request_, name):
    """A constraint of its own, or several answers, is a RequestError and nothing is sent."""
    send, asked = answering("{}")

    with pytest.raises(RequestError, match=name):
        await generate_structured(send, Address, request_)
    assert not asked


async def test_a_model_answers_with_instances():
    """End to end, with random weights: what ended is an instance, whatever the seed."""
    request = RequestBuilder().add_message("user", "Who?").set_sampler_temperature(1.0)
    request = request.set_sampler_max_len(200)
    kind = tuple[Colour, Point, datetime.date]
    async with await tiny_builder().build() as model:
        found = await asyncio.gather(
            *[
                generate_structured(model.send_chat_request, kind, request.set_sampler_seed(seed))
                for seed in range(8)
            ],
            return_exceptions=True,
        )

    cut = [error for error in found if isinstance(error, InferenceError)]
    assert all(e.partial_response.choices[0].finish_reason == "length" for e in cut)
    found = [value for value in found if not isinstance(value, InferenceError)]
    assert found
    for colour, point, date in found:
        assert isinstance(colour, Colour)
        assert isinstance(point["x"], float)
        assert isinstance(date, datetime.date)
