"""Tools a model may call, which of them it must call, and the calls it makes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, ClassVar, Literal

import attrs

from mistralrs_sdk.errors import RequestError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@attrs.frozen
class Function:
    """A function as the model is told of it.

    Raises:
        RequestError: the name has other characters than letters, digits, _ and -, or over 64;
            `parameters` is not the JSON schema of an object.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = attrs.field(default=None, hash=False)
    """JSON schema of the arguments object; None takes no arguments."""
    strict: bool = False
    """Hold the arguments to the schema while they are generated."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise RequestError(
                f"tool name {self.name!r} must be 1 to 64 letters, digits, underscores or hyphens"
            )
        if self.parameters is not None and not (
            isinstance(self.parameters, Mapping)
            and self.parameters.get("type", "object") == "object"
        ):
            raise RequestError(
                f"parameters of tool {self.name!r} must be the JSON schema of an object, "
                f"not {self.parameters!r:.80}"
            )


@attrs.frozen
class Tool:
    """A tool offered to the model: `Tool(Function("now", "The time."))`."""

    function: Function
    type: Literal["function"] = "function"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    @classmethod
    def from_dict(cls, data: Any) -> Tool:
        """Read OpenAI's tool object, `{"type": "function", "function": {...}}`.

        Raises:
            RequestError: it is none, or of a type that is not supported.
        """
        function = data.get("function") if isinstance(data, Mapping) else None
        if not isinstance(function, Mapping) or data.get("type", "function") != "function":
            raise RequestError(
                f'tool {data!r:.80} must be {{"type": "function", "function": {{"name": ...}}}}'
            )
        known = {field.name for field in attrs.fields(Function)}
        given = {key: value for key, value in function.items() if key in known}
        if given.get("strict") is None:
            given.pop("strict", None)
        return cls(Function(**{"name": None, **given}))

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's tool object, as chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        if self.function.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


@attrs.frozen
class ToolChoice:
    """Which tools may or must be called: `ToolChoice.AUTO`, `.NONE`, `.REQUIRED`, `.named("x")`."""

    mode: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all that the request offers."""

    NONE: ClassVar[ToolChoice]
    AUTO: ClassVar[ToolChoice]
    REQUIRED: ClassVar[ToolChoice]
    Auto: ClassVar[ToolChoice]
    """mistral.rs' names; its `None` is no name in Python: write `NONE`."""
    Required: ClassVar[ToolChoice]

    @classmethod
    def named(cls, tool: Tool | str) -> ToolChoice:
        """This tool must be called."""
        return cls("required", (tool.name if isinstance(tool, Tool) else tool,))

    @classmethod
    def allowed_tools(
        cls, tools: Iterable[Tool | str], mode: Literal["auto", "required"] = "auto"
    ) -> ToolChoice:
        """Only these tools may (or, required, one of them must) be called."""
        return cls(mode, tuple(t.name if isinstance(t, Tool) else t for t in tools))

    @classmethod
    def from_dict(cls, data: Any) -> ToolChoice:
        """Read OpenAI's `tool_choice`, of chat completions or of responses.

        "none", "auto" or "required"; `{"type": "function", "function": {"name": ...}}`;
        `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`. What is inside
        the inner object may as well stand beside `type`.

        Raises:
            RequestError: it is none of these.
        """
        if isinstance(data, ToolChoice):
            return data
        if data in ("none", "auto", "required"):
            return cls(data)
        kind = data.get("type") if isinstance(data, Mapping) else None
        if kind == "function":
            return cls.named(_name_in(data))
        if kind == "allowed_tools":
            inner = data.get("allowed_tools", data)
            inner = inner if isinstance(inner, Mapping) else {}
            mode, tools = inner.get("mode", "auto"), inner.get("tools")
            if mode in ("auto", "required") and isinstance(tools, list) and tools:
                return cls.allowed_tools([_name_in(tool) for tool in tools], mode)
        raise RequestError(
            f'tool_choice {data!r:.120} must be "none", "auto", "required", '
            '{"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        )


def _name_in(data: Any) -> str:
    inner = data.get("function", data) if isinstance(data, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f'{data!r:.80} in tool_choice must be {{"type": "function", '
            '"function": {"name": ...}}'
        )
    return name


ToolChoice.NONE = ToolChoice("none")
ToolChoice.AUTO = ToolChoice.Auto = ToolChoice("auto")
ToolChoice.REQUIRED = ToolChoice.Required = ToolChoice("required")


@attrs.frozen
class CalledFunction:
    """A call as the model wrote it."""

    name: str
    arguments: str
    """JSON text of the arguments object."""


@attrs.frozen(kw_only=True)
class ToolCallResponse:
    """One tool call of an answer."""

    index: int
    """Its place among the calls of the answer."""
    id: str
    """Unique; the tool's message names it as `tool_call_id`."""
    function: CalledFunction
    type: Literal["function"] = "function"
    continues: bool = False
    """In a stream: `arguments` go on with those of earlier chunks, whose call this is."""

    @classmethod
    def from_dict(cls, data: Any, *, index: int = 0) -> ToolCallResponse:
        """Read OpenAI's entry of `tool_calls`; `index` counts if it holds none.

        Raises:
            RequestError: it has no id, name or arguments.
        """
        function = data.get("function") if isinstance(data, Mapping) else None
        if isinstance(function, Mapping):
            id, name, arguments = data.get("id"), function.get("name"), function.get("arguments")
            if isinstance(id, str) and isinstance(name, str) and isinstance(arguments, str):
                place = data.get("index", index)
                return cls(index=place, id=id, function=CalledFunction(name, arguments))
        raise RequestError(
            f'tool call {data!r:.80} must be {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": "..."}}'
        )

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's entry of `tool_calls`, the index beside it as in a delta.

        A piece that continues a call is only that, as clients join all texts of one index.
        """
        if self.continues:
            return {"index": self.index, "function": {"arguments": self.function.arguments}}
        return {
            "index": self.index,
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": self.function.arguments},
        }


def joined_calls(
    pieces: Iterable[ToolCallResponse], withdrawn: Container[int] = ()
) -> tuple[ToolCallResponse, ...]:
    """The calls that the pieces of one or more chunks make, without those that were withdrawn."""
    calls: dict[int, tuple[ToolCallResponse, list[str]]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, (piece, []))[1].append(piece.function.arguments)
    return tuple(
        attrs.evolve(first, function=attrs.evolve(first.function, arguments="".join(arguments)))
        for index, (first, arguments) in calls.items()
        if index not in withdrawn
    )
