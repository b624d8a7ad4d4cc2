"""Python functions as tools: the schema from the signature, the words from the docstring."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import docstring_parser

from mistralrs_sdk.chat.tools import Function, Tool
from mistralrs_sdk.constraints.python_types import build, schema_for
from mistralrs_sdk.errors import RequestError

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_ROOT = "Arguments"


class ToolFunction(Protocol[P, R_co]):
    """A function that also says how it is offered to a model."""

    tool: Tool

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


@overload
def tool(function: Callable[P, R_co], /) -> ToolFunction[P, R_co]: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, strict: bool = False
) -> Callable[[Callable[P, R_co]], ToolFunction[P, R_co]]: ...
def tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool = False,
) -> Any:
    """Mark a function, plain or async, as a tool: `@tool` or `@tool(name=..., description=...)`.

    It stays the function it was, with the tool under `.tool`; see `tool_from_function`.

    Raises:
        RequestError: no tool can be made of it.
    """

    def mark(function: Any) -> Any:
        function.tool = _make_tool(function, name=name, description=description, strict=strict)
        return function

    return mark if function is None else mark(function)


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """Describe a function, plain or async, for a model; what `@tool` said of it holds.

    The name is the function's, the description its docstring without the parts on parameters,
    results and errors. Each parameter gets the schema of its annotation (without one it takes
    anything), its default, and what the docstring (Google, NumPy or reST style) or a text in
    `Annotated` says of it. A parameter without a default is required.

    Raises:
        RequestError: an annotation has no schema, or parameters cannot be given by name.
    """
    marked = getattr(function, "tool", None)
    if isinstance(marked, Tool):
        return marked
    return _make_tool(function, name=None, description=None, strict=False)


def keyword_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the JSON values of a call into what the function's annotations say.

    Enum members, dataclasses, pydantic models, dates and the like are made of their JSON forms.

    Raises:
        ValueError: a value does not fit, one is missing, or one is not a parameter.
    """
    parameters = _parameters(function)
    unknown = sorted(arguments.keys() - parameters.keys())
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in arguments
    ]
    if unknown or missing:
        what = f"unknown {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
        raise ValueError(f"arguments of {_name(function)}: {what}")
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        try:
            values[name] = build(_annotation(parameters[name]), value)
        except ValueError as error:
            raise ValueError(f"argument {name} of {_name(function)}: {error}") from error
    return values


def _make_tool(
    function: Callable[..., Any], *, name: str | None, description: str | None, strict: bool
) -> Tool:
    parameters = _parameters(function)
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    told = {part.arg_name: (part.description or "").strip() for part in doc.params}
    schema = _schema(function, parameters)
    properties: dict[str, Any] = {}
    for key, inner in schema["properties"].items():
        words = _annotated_text(parameters[key]) or told.get(key)
        extras: dict[str, Any] = {"description": words} if words else {}
        default = parameters[key].default
        if default is not inspect.Parameter.empty and _is_json(default):
            extras["default"] = default
        properties[key] = {**inner, **extras}
    return Tool(
        Function(
            name or _name(function),
            description=description or (doc.description or "").strip() or None,
            parameters={**schema, "properties": properties},
            strict=strict,
        )
    )


def _schema(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """The schema of all arguments; definitions of the types they use beside them."""
    hints = {
        name: _annotation(parameter)
        if parameter.default is parameter.empty
        else typing.NotRequired[_annotation(parameter)]
        for name, parameter in parameters.items()
    }
    try:
        whole = schema_for(typing.TypedDict(_ROOT, hints))  # pyright: ignore[reportArgumentType]
    except RequestError as error:
        raise RequestError(f"function {_name(function)} cannot be a tool: {error}") from error
    definitions = dict(whole["$defs"])
    root = definitions.pop(_ROOT)
    return {**root, "$defs": definitions} if definitions else root


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (TypeError, ValueError, NameError) as error:
        raise RequestError(
            f"the signature of {_name(function)} cannot be read: {error}; define the types it "
            "names at the top of a module"
        ) from error
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if not found and name in ("self", "cls") and parameter.annotation is parameter.empty:
            continue  # a method that was marked inside its class
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(
                f"function {_name(function)} cannot be a tool: its parameter {parameter} cannot "
                "be given by name"
            )
        found[name] = parameter
    return found


def _annotation(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _annotated_text(parameter: inspect.Parameter) -> str | None:
    """The text in `Annotated[type, "text"]`."""
    notes = getattr(parameter.annotation, "__metadata__", ())
    return next((note for note in notes if isinstance(note, str)), None)


def _is_json(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
