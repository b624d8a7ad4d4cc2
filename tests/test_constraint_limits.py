"""Constraints that are deep, long, no JSON, or wanted by many at once."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from mistralrs_sdk import Constraint, RequestError
from mistralrs_sdk.constraints import compiled as compiled_module
from mistralrs_sdk.constraints import json_schema
from mistralrs_sdk.constraints.compiled import MAX_CHARS, compile_constraint, compile_in_time
from mistralrs_sdk.constraints.vocabulary import Vocabulary
from tests.test_json_schema import tokenizer, vocabulary


def chained(length: int) -> dict[str, Any]:
    """A schema whose definitions refer each to the next."""
    chain = {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}},
            "required": ["a"],
        }
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{length}": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def rules(length: int, letter: str) -> str:
    """A Lark grammar whose rules (r) or terminals (R) consist each of the next."""
    chain = [f"{letter}{i}: {letter}{i + 1}" for i in range(length)]
    return "\n".join((f"start: {letter}0", *chain, f'{letter}{length}: "a"'))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.JsonSchema(chained(1500)),
        Constraint.Lark(rules(14_000, "r")),
        Constraint.Lark(rules(14_000, "R")),
        Constraint.Lark(f"start: %json {json.dumps(chained(2000))}"),
    ],
    ids=["schema", "rules", "terminals", "schema in a grammar"],
)
def test_thousands_of_levels_do_not_overflow_the_stack(constraint):
    """Whatever fits in the length is compiled, or refused; it never ends the process."""
    matcher = compile_constraint(
        constraint, Vocabulary(tokenizer(), size=512, eos_ids=[2])
    ).matcher()

    assert matcher.error is None


@pytest.mark.parametrize("depth", [100, 400, 5000])
def test_a_schema_nested_too_deeply_is_refused(depth):
    """JSON that no parser here can follow is a RequestError, when it is made or when it is sent."""
    with pytest.raises(RequestError, match=r"nested too deeply|recursion limit"):
        compile_constraint(Constraint.JsonSchema(nested(depth)), vocabulary())


@pytest.mark.parametrize(
    "schema", [{"maximum": float("nan")}, {"enum": [float("inf")]}, {"const": "\ud800"}], ids=str
)
def test_what_json_cannot_say_is_refused(schema):
    """Python takes numbers and strings for JSON that are none: a RequestError, no other error."""
    with pytest.raises(RequestError, match="cannot be enforced"):
        compile_constraint(Constraint.JsonSchema(schema), vocabulary())


def test_a_constraint_has_a_greatest_length():
    """The refusal says how long it is and how long it may be."""
    with pytest.raises(RequestError, match=f"has {MAX_CHARS + 1} characters, and {MAX_CHARS} are"):
        compile_constraint(Constraint.Regex("a" * (MAX_CHARS + 1)), vocabulary())


def test_references_are_followed_in_linear_time(monkeypatch):
    """A chain of definitions is looked through a few times, not once for each of them."""
    looks = []
    ends = json_schema._ends
    monkeypatch.setattr(
        json_schema, "_ends", lambda place, *rest: looks.append(place) or ends(place, *rest)
    )

    json_schema.enforceable(chained(300))

    assert len(looks) < 5 * 2 * 300


async def test_many_who_want_one_constraint_have_it_compiled_once(monkeypatch):
    """A burst of requests with a new schema costs one compilation, and none of them its time."""
    count = threading.Semaphore(0)
    compile = compiled_module._compile

    def counting(*args: Any) -> Any:
        count.release()
        return compile(*args)

    monkeypatch.setattr(compiled_module, "_compile", counting)
    own = Vocabulary(tokenizer(), size=512, eos_ids=[2])
    constraint = {"type": "array", "items": {"enum": [f"number {i}" for i in range(50)]}}

    found = await asyncio.gather(
        *(compile_in_time(Constraint.JsonSchema(constraint), own) for _ in range(30))
    )

    assert len(set(map(id, found))) == 1
    assert count.acquire(blocking=False)
    assert not count.acquire(blocking=False)
