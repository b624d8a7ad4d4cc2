"""Python functions as tools of a model."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import inspect
from typing import Annotated, Any, Literal

import pytest

from mistralrs_sdk.chat.function_tools import keyword_arguments, tool, tool_from_function
from mistralrs_sdk.errors import RequestError


class Unit(enum.Enum):
    """A unit of temperature."""

    CELSIUS = "C"
    KELVIN = "K"


@dataclasses.dataclass
class Place:
    """Where."""

    city: str
    zip: int | None = None


def properties(function: Any) -> dict[str, Any]:
    return dict(tool_from_function(function).function.parameters or {})["properties"]


def google(a: int, b: str = "x") -> str:
    """Does a thing.

    At length.

    Args:
        a: The first,
            on two lines.
        b (str): The second.

    Returns:
        Nothing that matters.

    Raises:
        ValueError: never.
    """
    return f"{a}{b}"


def numpy(a: int, b: str = "x") -> str:
    """Does a thing.

    At length.

    Parameters
    ----------
    a : int
        The first,
        on two lines.
    b : str, optional
        The second.
    """
    return f"{a}{b}"


def rest(a: int, b: str = "x") -> str:
    """Does a thing.

    At length.

    :param a: The first,
        on two lines.
    :param str b: The second.
    :returns: Nothing that matters.
    """
    return f"{a}{b}"


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_descriptions_come_from_the_docstring(function):
    """Google, NumPy and reST docstrings say what a function and its parameters are."""
    described = tool_from_function(function).function

    assert described.name == function.__name__
    assert described.description == "Does a thing.\n\nAt length."
    assert described.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first,\non two lines."},
            "b": {"type": "string", "description": "The second.", "default": "x"},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert not described.strict


def test_annotations_become_schemas():
    """Literals, unions, containers, enums, classes and dates have schemas; nothing is anything."""

    def function(
        plain,
        mode: Literal["a", "b"],
        maybe: float | None,
        many: list[dict[str, int]],
        unit: Unit,
        place: Place,
        day: Annotated[datetime.date, "which day"],
    ) -> None: ...

    schema = dict(tool_from_function(function).function.parameters or {})

    assert schema["properties"] == {
        "plain": {},
        "mode": {"enum": ["a", "b"]},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "many": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "unit": {"$ref": "#/$defs/Unit"},
        "place": {"$ref": "#/$defs/Place"},
        "day": {"type": "string", "format": "date", "description": "which day"},
    }
    assert schema["$defs"]["Unit"] == {"enum": ["C", "K"]}
    assert schema["$defs"]["Place"]["required"] == ["city"]
    assert schema["required"] == [*schema["properties"]]


def test_a_function_without_words_is_a_tool():
    """No docstring, no annotation, no parameter: still a tool."""

    def now() -> str:
        return "12:00"

    assert tool_from_function(now).to_dict()["function"] == {
        "name": "now",
        "parameters": {
            "type": "object",
            "properties": {},
            "required": [],
            "additionalProperties": False,
        },
    }


def test_a_marked_function_stays_what_it_was():
    """`@tool` leaves a function callable, sync or async, and offers `.tool`."""

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool(name="wait_for_it", description="Wait.", strict=True)
    async def wait(seconds: float) -> None: ...

    assert add(1, 2) == 3
    assert inspect.iscoroutinefunction(wait)
    assert (add.tool.name, add.tool.function.description) == ("add", "Add.")
    assert (wait.tool.name, wait.tool.function.description) == ("wait_for_it", "Wait.")
    assert wait.tool.function.strict
    assert tool_from_function(wait) is wait.tool


def test_a_method_is_described_without_its_object():
    """Neither a bound method nor one marked in its class tells the model of `self`."""

    class Clock:
        @tool
        def marked(self, zone: str) -> str:
            return zone

        def plain(self, zone: str) -> str:
            return zone

    assert list(properties(Clock().marked)) == ["zone"]
    assert list(properties(Clock().plain)) == ["zone"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *values: values, r"parameter \*values"),
        (lambda **values: values, r"parameter \*\*values"),
        (len, "'len'|len"),
    ],
)
def test_parameters_that_cannot_be_named_are_refused(function, words):
    """Calls give arguments by name; the error says which parameter has none."""
    with pytest.raises(RequestError, match=words):
        tool_from_function(function)


def test_an_annotation_without_a_schema_is_refused():
    """The error names the function and the type."""

    def function(thing: complex) -> None: ...

    with pytest.raises(RequestError, match=r"function cannot be a tool.*complex"):
        tool_from_function(function)


def test_an_annotation_that_cannot_be_read_is_refused():
    """A type that is not there when the function is read is named."""

    def function(thing: Missing) -> None: ...  # noqa: F821

    with pytest.raises(RequestError, match="Missing"):
        tool_from_function(function)


def test_arguments_become_what_the_annotations_say():
    """JSON values turn into enum members, instances and dates; what is left out stays out."""

    def function(unit: Unit, place: Place, day: datetime.date, n: int = 3) -> None: ...

    given = {"unit": "K", "place": {"city": "Bern"}, "day": "2026-02-03"}

    assert keyword_arguments(function, given) == {
        "unit": Unit.KELVIN,
        "place": Place("Bern"),
        "day": datetime.date(2026, 2, 3),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'a' is missing"),
        ({"a": 1, "c": 2}, "unknown 'c'"),
        ({"a": "one"}, "argument a of google"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, words):
    """What the model got wrong is said in words it can act on."""
    with pytest.raises(ValueError, match=words):
        keyword_arguments(google, arguments)
