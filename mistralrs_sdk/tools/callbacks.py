"""Functions that answer the calls of a tool, and how they are called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol

import anyio
import anyio.to_thread
import attrs

from mistralrs_sdk.chat.function_tools import keyword_arguments
from mistralrs_sdk.chat.tool_events import (
    AgentPermission,
    ApprovalCallback,
    ToolCallContext,
    ToolKind,
    ToolSource,
)
from mistralrs_sdk.chat.tools import CalledFunction, Function, Tool
from mistralrs_sdk.errors import MistralRsError

CallbackFunction = (
    Callable[[CalledFunction, ToolCallContext], Any | Awaitable[Any]]
    | Callable[[CalledFunction], Any | Awaitable[Any]]
)
"""Gets a call and, if it wants it, its context; returns text, or data that JSON can hold."""


class ToolError(MistralRsError):
    """A tool gave no result; the text is what the model is told."""


@attrs.frozen
class ToolGuard:
    """What a tool's own settings say about asking before its calls, beside the request's."""

    permission: AgentPermission = AgentPermission.AUTO
    callback: ApprovalCallback | None = None
    """Who is asked where the request names nobody."""


NO_GUARD = ToolGuard()


class ToolExecutor(Protocol):
    """What answers the calls of one tool."""

    source: ClassVar[ToolSource]
    kind: ClassVar[ToolKind]

    @property
    def guard(self) -> ToolGuard:
        """Whether its calls need an approval whatever the request says."""
        ...

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Return the result as the model is to read it."""
        ...


@attrs.frozen
class ToolCallback:
    """A function registered for the calls of one tool."""

    source: ClassVar[ToolSource] = "user"
    kind: ClassVar[ToolKind] = "custom"

    name: str
    function: Callable[..., Any]
    """Plain, and run on a worker thread, or a coroutine function."""
    tool: Tool | None = None
    """How it is offered; None: with this name and any arguments."""
    by_keywords: bool = False
    """Whether it takes the arguments as keywords, instead of a call and its context."""
    guard: ToolGuard = NO_GUARD

    @property
    def offered(self) -> Tool:
        """The tool that requests offer for it."""
        if self.tool is not None:
            return self.tool
        return Tool(Function(self.name, parameters={"type": "object"}))

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Call the function and return its result as text.

        Raises:
            ToolError: the arguments do not fit a function that takes keywords.
        """
        if self.by_keywords:
            try:
                arguments = keyword_arguments(self.function, arguments_of(call))
            except ValueError as error:
                raise ToolError(str(error)) from None
            result = await call_here_or_in_thread(self.function, **arguments)
        else:
            taken = (call, context) if _takes_two(self.function) else (call,)
            result = await call_here_or_in_thread(self.function, *taken)
        return result_text(result)


async def call_here_or_in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a coroutine function; run any other one on a worker thread.

    Cancelling leaves a thread to itself: it runs on, and nobody waits for it.
    """
    if is_async(function):
        return await function(*args, **kwargs)
    result = await anyio.to_thread.run_sync(
        functools.partial(function, *args, **kwargs),
        abandon_on_cancel=True,
        limiter=anyio.CapacityLimiter(1),  # hung callbacks take no place from others
    )
    return await result if inspect.isawaitable(result) else result


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not tell
        pass
    return True


def arguments_of(call: CalledFunction) -> dict[str, Any]:
    """The arguments of a call; no text at all is no arguments.

    Raises:
        ToolError: they are no JSON object.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except json.JSONDecodeError as error:
        raise ToolError(f"the arguments of {call.name} are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments of {call.name} must be a JSON object")
    return arguments


def result_text(result: Any) -> str:
    """A result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if attrs.has(type(value)):
        return attrs.asdict(value)
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, set | frozenset) else str(value)
