"""`Toolbox`: what one model can execute, and the sessions it keeps."""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

import anyio.to_thread
import attrs

from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.tools import Tool
from mistralrs_sdk.errors import RequestError
from mistralrs_sdk.tools.callbacks import ToolExecutor
from mistralrs_sdk.tools.code_tools import BuiltInTool, built_in_tools, what_it_means
from mistralrs_sdk.tools.dispatch import DispatchedTool
from mistralrs_sdk.tools.execution import Approvals
from mistralrs_sdk.tools.mcp_client import McpClient, McpToolInfo
from mistralrs_sdk.tools.sessions import SessionStore
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.workspaces import Workspaces

logger = logging.getLogger(__name__)


class AbortableLoop(Protocol):
    """A running loop, as far as ending it from outside needs it."""

    def abort(self) -> str:
        """End it; returns the id of its current round, to be aborted in the engine."""
        ...

    def cancel_tools(self) -> None:
        """Stop running tools, and fail if there are any."""
        ...


class Toolbox:
    """The registered callbacks, the tools of MCP servers, and the sessions of one model."""

    def __init__(self, settings: ToolSettings | None = None) -> None:
        self.settings = ToolSettings() if settings is None else settings
        self.workspaces = Workspaces(idle_seconds=self.settings.session_idle_seconds)
        self.sessions = SessionStore(
            max_sessions=self.settings.max_sessions,
            idle_seconds=self.settings.session_idle_seconds,
        )
        self.running: weakref.WeakValueDictionary[str, AbortableLoop] = (
            weakref.WeakValueDictionary()
        )
        self._executors: dict[str, ToolExecutor] = {}
        self._offered: dict[str, Tool] = {}
        for callback in self.settings.callbacks:
            self._executors[callback.name] = callback
            self._offered[callback.name] = callback.offered
        config = self.settings.mcp
        self._mcp = None if config is None else McpClient(config)

    @property
    def sessions(self) -> SessionStore:
        """The sessions; what runs in one ends with it."""
        return self._sessions

    @sessions.setter
    def sessions(self, sessions: SessionStore) -> None:
        sessions.on_forgotten = self.workspaces.end_session
        self._sessions = sessions

    async def start(self) -> None:
        """Connect to the MCP servers and learn their tools; warn of what runs code.

        Raises:
            ModelLoadError: a server cannot be reached, or the `mcp` package is missing.
            ConfigError: a tool has the name of another one, or a strict sandbox policy cannot be
                kept here.
        """
        given = {
            "with_code_execution": self.settings.code,
            "with_shell_execution": self.settings.shell,
        }
        runs = [(name, config) for name, config in given.items() if config is not None]
        if runs:
            for warning in await anyio.to_thread.run_sync(what_it_means, runs):
                logger.warning("%s", warning)
        if self._mcp is None:
            return
        await self._mcp.start()
        for tool, executor in self._mcp.tools(taken=self._offered):
            self._executors[tool.name] = executor
            self._offered[tool.name] = tool

    async def aclose(self) -> None:
        """Cancel running tools, end processes, and disconnect from the MCP servers."""
        for loop in list(self.running.values()):
            loop.cancel_tools()
        await self.workspaces.aclose()
        if self._mcp is not None:
            await self._mcp.aclose()

    def list_mcp_tools(self) -> list[McpToolInfo]:
        """The tools of the MCP servers, under the names the model knows them by."""
        return [] if self._mcp is None else self._mcp.list_tools()

    def offer(self, asked: RequestBuilder) -> RequestBuilder:
        """Add the registered tools to a request, and what it opts in to; its own description wins.

        A request with a constraint gets none: what it must match is no call.

        Raises:
            RequestError: it opts in to what the model was not built for, or beside a constraint.
        """
        built_in = self._built_in(asked)
        if built_in and asked.constraint:
            raise RequestError(
                f"a constrained answer cannot call {', '.join(built_in)}: leave the constraint "
                "out, or with_code_execution and with_shell_execution"
            )
        offers = self._offered | {name: tool.offered() for name, tool in built_in.items()}
        if asked.tool_choice.mode == "none" or asked.constraint or not offers:
            return asked
        named = {tool.name for tool in asked.tools}
        more = [tool for name, tool in offers.items() if name not in named]
        return attrs.evolve(asked, tools=(*asked.tools, *more))

    def executes(self, asked: RequestBuilder) -> bool:
        """Whether calls of this request are executed here."""
        if asked.tool_choice.mode == "none" or not asked.tools or asked.max_tool_rounds == 0:
            return False
        asks = asked.max_tool_rounds is not None or asked.tool_dispatch_url is not None
        return asks or bool(self._executors) or bool(self._built_in(asked))

    def require_somebody_to_ask(self, asked: RequestBuilder) -> None:
        """Refuse a request whose calls need an approval that nobody can give.

        Raises:
            RequestError: it is one.
        """
        if asked.agent_permission == "ask" and asked.agent_approval_callback is None:
            raise RequestError(
                'agent_permission "ask" needs somebody to ask: add with_agent_approval_callback'
            )
        approvals = approvals_of(asked)
        for name, tool in self._built_in(asked).items():
            permission, callback = approvals.of(tool)
            if permission == "ask" and callback is None:
                raise RequestError(
                    f"calls of {name} need an approval, and there is nobody to ask: add "
                    'with_agent_approval_callback, over HTTP "agent_permission": "ask"'
                )

    def find(self, name: str, asked: RequestBuilder) -> ToolExecutor | str | None:
        """What executes calls of this tool; None: the caller, or a reason why nothing does."""
        offered = [tool.name for tool in asked.tools]
        allowed = asked.tool_choice.allowed
        if allowed is not None:
            offered = [name for name in offered if name in allowed]
        if name not in offered:
            return f"there is no tool {name!r} to call; there are: {', '.join(offered)}"
        if name in asked.left_to_caller:
            return None
        executor = self._built_in(asked).get(name) or self._executors.get(name)
        if executor is None and asked.tool_dispatch_url is not None:
            return DispatchedTool(asked.tool_dispatch_url, self.settings.timeout)
        return executor

    def running_id(self, id: str) -> str:
        """End the loop with this id; returns the id under which it runs in the engine."""
        loop = self.running.get(id)
        return id if loop is None else loop.abort()

    def _built_in(self, asked: RequestBuilder) -> dict[str, BuiltInTool]:
        settings = self.settings
        return built_in_tools(asked.execution, settings.code, settings.shell, self.workspaces)


def approvals_of(asked: RequestBuilder) -> Approvals:
    """Who decides about the calls of a request."""
    return Approvals(
        asked.agent_permission, asked.agent_approval_callback, asked.execution.code_permission
    )
