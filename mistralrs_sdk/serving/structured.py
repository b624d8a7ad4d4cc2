"""Answers as instances of a type: the type's schema holds the answer, which is then read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

from mistralrs_sdk.chat.requests import RequestBuilder, RequestLike, as_request
from mistralrs_sdk.chat.responses import ChatCompletionResponse
from mistralrs_sdk.constraints.constraint import Constraint
from mistralrs_sdk.constraints.python_types import build, schema_for
from mistralrs_sdk.errors import InferenceError, RequestError

T = TypeVar("T")
Send = Callable[[RequestBuilder], Awaitable[ChatCompletionResponse]]


@overload
async def generate_structured(send: Send, type: type[T], request: RequestLike) -> T: ...
@overload
async def generate_structured(send: Send, type: Mapping[str, Any], request: RequestLike) -> Any: ...
async def generate_structured(send: Send, type: Any, request: RequestLike) -> Any:
    """Ask with the answer held to `type`'s JSON schema, and return the answer as an instance of it.

    `type` is a pydantic model, a dataclass, an attrs class, a TypedDict, an enum, a union or
    container of these, or a JSON schema as a dict, for which the parsed JSON is returned. The model
    sees nothing of the schema: the messages should say what is wanted.

    Raises:
        RequestError: the type has no schema that can be enforced, or the request has a constraint
            of its own or asks for several answers.
        InferenceError: the answer was cut short, or the type refuses it; `partial_response` is it.
    """
    asked = as_request(request)
    if asked.constraint is not None:
        raise RequestError(
            "generate_structured sets the constraint itself: leave set_constraint out"
        )
    if asked.sampling.n_choices != 1:
        raise RequestError(
            f"n_choices ({asked.sampling.n_choices}) must be 1: one value is returned"
        )
    is_schema = isinstance(type, Mapping)
    schema = type if is_schema else schema_for(type)
    response = await send(asked.set_constraint(Constraint.JsonSchema(schema)))
    choice = response.choices[0]
    if choice.finish_reason != "stop" or choice.message.content is None:
        raise InferenceError(
            f"the structured answer was cut short (finish_reason {choice.finish_reason!r}): allow "
            "more tokens with set_sampler_max_len",
            partial_response=response,
        )
    try:
        value = json.loads(choice.message.content)
        return value if is_schema else build(type, value)
    except ValueError as error:
        raise InferenceError(
            f"the answer fits the schema, but not {getattr(type, '__name__', type)!s}: {error}",
            partial_response=response,
        ) from error
