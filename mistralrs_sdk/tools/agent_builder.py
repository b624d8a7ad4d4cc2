"""`AgentBuilder`: describe an agent step by step, then `build()` it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import attrs

from mistralrs_sdk.chat.messages import ReasoningEffort, reasoning_effort
from mistralrs_sdk.chat.tools import Tool, ToolChoice
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.tools.agent import Agent, ChatModel
from mistralrs_sdk.tools.agent_config import AgentConfig
from mistralrs_sdk.tools.callbacks import CallbackFunction, ToolCallback
from mistralrs_sdk.tools.settings import function_callback


@attrs.frozen
class AgentBuilder:
    """Describes an agent: `AgentBuilder(model).with_tool(function).build()`.

    A builder never changes: each method returns a new one.

    Raises:
        ConfigError: from each method, at once: a value is out of range.
        RequestError: likewise, where thinking and reasoning effort contradict each other.
    """

    model: ChatModel
    config: AgentConfig = attrs.field(factory=AgentConfig)

    def build(self) -> Agent:
        """Make the agent; nothing is asked yet."""
        return Agent(self.model, self.config)

    def with_tool(self, function: Callable[..., Any]) -> Self:
        """Let the model call this Python function, plain or async; see `ModelBuilder.with_tool`.

        Raises:
            ConfigError: another tool has that name.
            RequestError: no schema can be made of the signature.
        """
        return self._add(function_callback(function))

    def register_tool(self, tool: Tool, callback: CallbackFunction) -> Self:
        """Execute calls of `tool` with `callback(call)` or `callback(call, context)`.

        Plain callbacks run on worker threads. `call` is a `CalledFunction`, `context` a
        `ToolCallContext`.

        Raises:
            ConfigError: another tool has that name, or the callback cannot be called.
        """
        if not isinstance(tool, Tool):
            raise ConfigError(f"tool ({tool!r:.80}) must be a Tool; for functions use with_tool")
        if not callable(callback):
            raise ConfigError(f"callback of tool {tool.name!r} ({callback!r}) must be callable")
        return self._add(ToolCallback(tool.name, callback, tool))

    def with_sync_tool(self, tool: Tool, callback: CallbackFunction) -> Self:
        """As `register_tool`, under mistral.rs' name."""
        return self.register_tool(tool, callback)

    def with_async_tool(self, tool: Tool, callback: CallbackFunction) -> Self:
        """As `register_tool`, which takes coroutine functions too."""
        return self.register_tool(tool, callback)

    def with_max_iterations(self, iterations: int) -> Self:
        """End a run after this many answers. Default 10, at least 1."""
        return self._set(max_iterations=iterations)

    def with_system_prompt(self, prompt: str) -> Self:
        """Start each run with this system message. Default: none."""
        if not isinstance(prompt, str):
            raise ConfigError(f"system_prompt ({prompt!r}) must be a str")
        return self._set(system_prompt=prompt)

    def with_tool_choice(self, choice: ToolChoice) -> Self:
        """Say which tools the first answer may or must call. Default: the model decides."""
        if not isinstance(choice, ToolChoice):
            raise ConfigError(f"tool_choice ({choice!r}) must be a ToolChoice")
        return self._set(tool_choice=choice)

    def with_parallel_tool_execution(self, parallel: bool) -> Self:
        """Run the calls of one answer at once (True, the default), or one after the other."""
        return self._set(parallel_tool_execution=_flag("parallel_tool_execution", parallel))

    def with_enable_thinking(self, enable: bool) -> Self:
        """Ask for (or against) reasoning, if the template knows the switch. Default: neither."""
        return self._set(enable_thinking=_flag("enable_thinking", enable))

    def with_reasoning_effort(self, effort: ReasoningEffort | str) -> Self:
        """Ask for this much reasoning in each answer: off, low, medium, high or xhigh."""
        return self._set(reasoning_effort=reasoning_effort(effort))

    def with_tool_timeout(self, seconds: float | None) -> Self:
        """Give up on a call after this long. Default 60 s; None: never."""
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise ConfigError(f"tool_timeout ({seconds!r}) must be a number of seconds above 0")
        return self._set(tool_timeout=seconds)

    def _add(self, callback: ToolCallback) -> Self:
        if any(callback.name == other.name for other in self.config.tools):
            raise ConfigError(f"the agent has a tool {callback.name!r} already: rename one")
        return self._set(tools=(*self.config.tools, callback))

    def _set(self, **changes: Any) -> Self:
        return attrs.evolve(self, config=attrs.evolve(self.config, **changes))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be True or False")
    return value
