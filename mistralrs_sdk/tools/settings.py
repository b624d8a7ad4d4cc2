"""`ToolSettings`: what a builder says about tools and sessions, and the methods that say it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs

from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.tools.callbacks import CallbackFunction, ToolCallback
from mistralrs_sdk.tools.execution_config import CodeExecutionConfig, ShellConfig
from mistralrs_sdk.tools.mcp_config import McpClientConfig
from mistralrs_sdk.tools.sessions import MAX_SESSIONS, SESSION_IDLE_SECONDS

_ExecutionConfig = TypeVar("_ExecutionConfig", CodeExecutionConfig, ShellConfig)

TOOL_TIMEOUT = 60.0
"""Seconds a call may take if the builder does not say otherwise."""


@attrs.frozen(kw_only=True)
class ToolSettings:
    """What is executed for a model, and which conversations it keeps."""

    callbacks: tuple[ToolCallback, ...] = ()
    mcp: McpClientConfig | None = None
    code: CodeExecutionConfig | None = None
    """How the model's Python is run, for requests that opt in; None: not at all."""
    shell: ShellConfig | None = None
    """How its commands are run, likewise."""
    timeout: float | None = TOOL_TIMEOUT
    """Seconds for each call; None: no limit."""
    max_sessions: int = MAX_SESSIONS
    session_idle_seconds: float = SESSION_IDLE_SECONDS


class ToolMethods:
    """The methods of a builder that concern tools and sessions."""

    __slots__ = ()

    tools: ToolSettings

    def with_tool(self, function: Callable[..., Any]) -> Self:
        """Let the model call this Python function, plain or async.

        Its name, signature and docstring become the tool; it is called with the arguments as
        keywords, and what it returns is what the model reads (anything but text as JSON). Plain
        functions run on worker threads.

        Raises:
            ConfigError: another callback has that name.
            RequestError: no schema can be made of the signature.
        """
        callback = function_callback(function)
        return self._with_callback("with_tool", callback)

    def with_tool_callback(self, name: str, callback: CallbackFunction) -> Self:
        """Execute calls of the tool `name` here: `callback(call, context)` returns the result.

        `call` is a `CalledFunction`, `context` a `ToolCallContext`. Requests offer the tool with
        any arguments, or as they describe it themselves if they have a tool of that name. The
        answer then comes after as many rounds of calls as it takes (`with_max_tool_rounds`). A
        callback that raises costs no request: the model reads `Error: ...`.

        Raises:
            ConfigError: another callback has that name.
        """
        return self._with_callback("with_tool_callback", _callback(name, callback, None))

    def with_tool_callback_and_tool(
        self, name: str, callback: CallbackFunction, tool: Tool
    ) -> Self:
        """As `with_tool_callback`, offered as `tool`, whose name must be `name`.

        Raises:
            ConfigError: it is another name, or another callback has it.
        """
        if not isinstance(tool, Tool) or tool.name != name:
            raise ConfigError(
                f"with_tool_callback_and_tool({name!r}): tool must be a Tool of that name, "
                f"not {tool!r:.80}"
            )
        return self._with_callback("with_tool_callback_and_tool", _callback(name, callback, tool))

    def with_mcp_client(self, config: McpClientConfig) -> Self:
        """Offer the tools of these MCP servers in every request, and call them there.

        `build()` connects, and fails if a server cannot be reached. Needs the extra `mcp`.

        Raises:
            ConfigError: it is no `McpClientConfig`.
        """
        if not isinstance(config, McpClientConfig):
            raise ConfigError(f"with_mcp_client({config!r}): must be a McpClientConfig")
        return self._set_tools(mcp=config)

    def with_code_execution(self, config: CodeExecutionConfig | None = None) -> Self:
        """Let requests opt in to running Python that the model writes. Default: they cannot.

        Each conversation has a process and a folder of its own, both ended with it. Without a
        `sandbox_policy` in the config that process has all rights of this one; `build()` warns.

        Raises:
            ConfigError: there is no such interpreter.
            UnsupportedError: this is not Linux.
        """
        config = _execution_config("with_code_execution", config, CodeExecutionConfig)
        return self._set_tools(code=config)

    def with_shell_execution(self, config: ShellConfig | None = None) -> Self:
        """Let requests opt in to running shell commands of the model. Default: they cannot.

        As `with_code_execution`, with a process for each command.

        Raises:
            ConfigError: there is no such shell.
            UnsupportedError: this is not Linux.
        """
        return self._set_tools(shell=_execution_config("with_shell_execution", config, ShellConfig))

    def with_tool_timeout(self, seconds: float | None) -> Self:
        """Give up on a call after this long. Default 60 s; None: never.

        Tools of MCP servers, and running code and commands, have limits of their own.

        Raises:
            ConfigError: it is no number above 0.
        """
        if seconds is not None:
            _require_seconds("with_tool_timeout", seconds)
        return self._set_tools(timeout=seconds)

    def with_sessions(
        self, max_sessions: int = MAX_SESSIONS, *, idle_seconds: float = SESSION_IDLE_SECONDS
    ) -> Self:
        """Keep this many sessions, each for `idle_seconds` after its last use. Default 128, 30 min.

        Raises:
            ConfigError: a number is out of range.
        """
        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise ConfigError(
                f"with_sessions({max_sessions!r}): must be a whole number of at least 1"
            )
        _require_seconds("with_sessions: idle_seconds", idle_seconds)
        return self._set_tools(max_sessions=max_sessions, session_idle_seconds=float(idle_seconds))

    def _tool_calls(self) -> Iterable[str]:
        """The calls that lead here, for the repr."""
        tools, plain = self.tools, ToolSettings()
        for callback in tools.callbacks:
            if callback.by_keywords:
                yield f"with_tool({callback.name})"
            elif callback.tool is None:
                yield f"with_tool_callback({callback.name!r}, ...)"
            else:
                yield f"with_tool_callback_and_tool({callback.name!r}, ...)"
        if tools.mcp is not None:
            yield f"with_mcp_client({tools.mcp!r})"
        if tools.code is not None:
            yield f"with_code_execution({tools.code!r})"
        if tools.shell is not None:
            yield f"with_shell_execution({tools.shell!r})"
        if tools.timeout != plain.timeout:
            yield f"with_tool_timeout({tools.timeout!r})"
        kept = tools.max_sessions, tools.session_idle_seconds
        if kept != (plain.max_sessions, plain.session_idle_seconds):
            yield f"with_sessions({kept[0]}, idle_seconds={kept[1]!r})"

    def _with_callback(self, method: str, callback: ToolCallback) -> Self:
        if any(callback.name == other.name for other in self.tools.callbacks):
            raise ConfigError(
                f"{method}({callback.name!r}): there is a callback of that name; rename one"
            )
        return self._set_tools(callbacks=(*self.tools.callbacks, callback))

    def _set_tools(self, **changes: Any) -> Self:
        return self._replace(tools=attrs.evolve(self.tools, **changes))

    if TYPE_CHECKING:

        def _replace(self, **changes: Any) -> Self: ...  # the builder's own


def function_callback(function: Callable[..., Any]) -> ToolCallback:
    """A Python function as a callback that takes the arguments as keywords.

    Raises:
        RequestError: no schema can be made of the signature.
    """
    from mistralrs_sdk.chat.function_tools import tool_from_function

    tool = tool_from_function(function)
    return ToolCallback(tool.name, function, tool, by_keywords=True)


def _execution_config(
    method: str, config: _ExecutionConfig | None, kind: type[_ExecutionConfig]
) -> _ExecutionConfig:
    config = kind() if config is None else config
    if not isinstance(config, kind):
        raise ConfigError(f"{method}({config!r:.80}): must be a {kind.__name__}")
    if sys.platform != "linux":
        raise UnsupportedError(
            f"{method}() needs Linux, which ends what a process has started with it: on "
            f"{sys.platform} offer a sandbox of your own with with_tool_callback"
        )
    config.program()
    return config


def _callback(name: str, callback: CallbackFunction, tool: Tool | None) -> ToolCallback:
    if not callable(callback):
        raise ConfigError(f"callback of tool {name!r} ({callback!r}) must be callable")
    made = ToolCallback(name, callback, tool)
    _ = made.offered  # a bad name fails here
    return made


def _require_seconds(name: str, value: Any) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not 0 < value < math.inf:
        raise ConfigError(f"{name} ({value!r}) must be a number of seconds above 0")
