"""`McpClient`: connections to MCP servers, and their tools as tools of a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import AsyncGenerator, Container
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs

from mistralrs_sdk.chat.tool_events import ToolCallContext, ToolKind, ToolSource
from mistralrs_sdk.chat.tools import CalledFunction, Function, Tool
from mistralrs_sdk.errors import ConfigError, ModelLoadError, RequestError
from mistralrs_sdk.tools.callbacks import NO_GUARD, ToolError, arguments_of
from mistralrs_sdk.tools.mcp_config import (
    MCP_MAX_CONCURRENT_CALLS,
    MCP_TIMEOUT,
    McpClientConfig,
    McpServerConfig,
)

if TYPE_CHECKING:
    import mcp

logger = logging.getLogger(__name__)

CLOSE_GRACE = 10.0
"""Seconds a server has to go before its connection is cut."""

_UNKNOWN_SESSION = "Session terminated"
"""What the `mcp` client makes of a server that does not know the session any more."""


@attrs.frozen
class McpToolInfo:
    """A tool of an MCP server."""

    name: str
    """As the model knows it, prefix included."""
    description: str | None
    server: str
    """The server's name."""


class McpClient:
    """Connections to the servers of a config, for one event loop.

    Each connection lives in a task of its own, so that what was entered is left by the same task.
    """

    def __init__(self, config: McpClientConfig) -> None:
        self._config = config
        limit = config.max_concurrent_calls
        self._places = asyncio.Semaphore(MCP_MAX_CONCURRENT_CALLS if limit is None else limit)
        self._connections: list[_Connection] = []

    async def start(self) -> None:
        """Connect to all enabled servers at once and ask for their tools.

        Raises:
            ModelLoadError: one cannot be reached or answers wrongly, or the `mcp` package is
                missing; nothing stays open.
        """
        _require_package()
        timeout = self._config.tool_timeout_secs or MCP_TIMEOUT
        self._connections = [
            _Connection(server, timeout, self._places)
            for server in self._config.servers
            if server.enabled
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for connection in self._connections:
                    group.create_task(connection.open())
        except BaseExceptionGroup as errors:
            await self.aclose()
            first = errors.exceptions[0]
            raise first from first.__cause__
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Leave all servers; processes that were started here end. Harmless when repeated."""
        connections, self._connections = self._connections, []
        await asyncio.gather(*(connection.close() for connection in connections))

    def list_tools(self) -> list[McpToolInfo]:
        """Every tool of every server."""
        return [
            McpToolInfo(tool.name, tool.function.description, connection.server.name)
            for connection in self._connections
            for tool, _ in connection.tools
        ]

    def tools(self, *, taken: Container[str]) -> list[tuple[Tool, McpTool]]:
        """The tools to offer, with what calls them; none if they are not to be registered.

        Raises:
            ConfigError: a name is in `taken`, or two servers give the same.
        """
        if not self._config.auto_register_tools:
            return []
        found: dict[str, tuple[Tool, McpTool]] = {}
        for connection in self._connections:
            for tool, executor in connection.tools:
                if tool.name in taken or tool.name in found:
                    raise ConfigError(
                        f"tool {tool.name!r} of MCP server {connection.server.name!r} has the name "
                        "of another tool: give the server another tool_prefix"
                    )
                found[tool.name] = (tool, executor)
        return list(found.values())


class McpTool:
    """Calls one tool of a server."""

    source: ClassVar[ToolSource] = "mcp"
    kind: ClassVar[ToolKind] = "custom"

    def __init__(self, connection: _Connection, name: str) -> None:
        self.guard = NO_GUARD
        self._connection = connection
        self._name = name

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Call the tool and return its text.

        Raises:
            ToolError: it failed, took too long, or the server is gone.
        """
        return await self._connection.call(self._name, arguments_of(call))


class _Connection:
    """One server: a task that holds the connection open, and what it learned."""

    def __init__(
        self, server: McpServerConfig, call_timeout: float, places: asyncio.Semaphore
    ) -> None:
        self.server = server
        self.tools: list[tuple[Tool, McpTool]] = []
        self._repeatable: set[str] = set()
        """The server's names of tools that may as well be called twice."""
        self._call_timeout = call_timeout
        self._places = places
        self._client: mcp.Client | None = None
        self._ended = asyncio.Event()
        """Of the connection that is open: the server is gone, or is to be left."""
        self._task: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._hold(ready, self._ended))
        timeout = self.server.source.timeout_secs or MCP_TIMEOUT
        try:
            async with asyncio.timeout(timeout):
                await ready
        except TimeoutError:
            raise self._load_error(f"no answer within {timeout:g} s") from None
        except (ModelLoadError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._load_error(_reason(error)) from error

    async def close(self) -> None:
        self._closed = True
        await self._leave()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        async with self._places:
            try:
                async with asyncio.timeout(self._call_timeout):
                    result = await self._call(name, arguments)
            except TimeoutError:
                raise ToolError(
                    f"MCP server {self.server.name!r} gave no result within "
                    f"{self._call_timeout:g} s"
                ) from None
        text = _result_text(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed without saying why")
        return text

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, over a new connection if the old one is lost; at most one is opened."""
        reopened = self._client is None
        client, ended = self._client or await self._reopen(), self._ended  # a later one has its own
        try:
            return await client.call_tool(name, arguments)
        except Exception as error:
            if not (_shows_loss(error) or ended.is_set()):
                raise ToolError(f"MCP server {self.server.name!r}: {_reason(error)}") from error
            ended.set()
            if self._client is client:
                self._client = None
            refused = _is_unknown_session(error)  # then nothing was executed
            if reopened or not (refused or name in self._repeatable):
                raise ToolError(
                    f"MCP server {self.server.name!r} was lost during the call, which may have "
                    f"been executed or not: {_reason(error)}"
                ) from error
        client = await self._reopen()
        try:
            return await client.call_tool(name, arguments)
        except Exception as error:
            raise ToolError(f"MCP server {self.server.name!r}: {_reason(error)}") from error

    async def _reopen(self) -> mcp.Client:
        """Connect again, once for all calls that wait for it.

        Raises:
            ToolError: the server cannot be reached, or is not wanted any more.
        """
        async with self._opening:
            if self._client is None and not self._closed:
                await self._leave()
                logger.warning("MCP server %r was lost: connecting again", self.server.name)
                try:
                    await self.open()
                except BaseException as error:
                    await self._leave()
                    if not isinstance(error, ModelLoadError):
                        raise
                    raise ToolError(f"{error}; it was lost, and connecting again failed") from error
            if self._client is None:
                raise ToolError(f"MCP server {self.server.name!r} is not connected")
            return self._client

    async def _leave(self) -> None:
        """End the task that holds the connection."""
        connected, self._client = self._client is not None, None
        task, self._task = self._task, None
        if task is None:
            return
        self._ended.set()
        if connected:
            _, late = await asyncio.wait([task], timeout=CLOSE_GRACE)
            if not late:
                return
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_GRACE)

    async def _hold(self, ready: asyncio.Future[None], ended: asyncio.Event) -> None:
        import mcp

        try:
            async with mcp.Client(_transport(self.server, ended)) as client:
                if not self.tools:  # what was offered once is not offered anew
                    await self._learn(client)
                if not ended.is_set():
                    self._client = client
                    if not ready.done():
                        ready.set_result(None)
                await ended.wait()
                if not ready.done():
                    ready.set_exception(ConnectionError("the connection was closed"))
        except Exception as error:
            if ready.done():
                logger.warning("leaving MCP server %r failed", self.server.name, exc_info=True)
            else:
                ready.set_exception(error)
        finally:
            if self._ended is ended:
                self._client = None

    async def _learn(self, client: mcp.Client) -> None:
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            self.tools += [self._tool(tool) for tool in page.tools]
            self._repeatable.update(tool.name for tool in page.tools if _is_repeatable(tool))
            cursor = page.next_cursor
            if not cursor:
                return

    def _tool(self, tool: Any) -> tuple[Tool, McpTool]:
        # MCP allows more characters and longer names than chat models are used to
        name = re.sub(r"[^A-Za-z0-9_-]", "_", self.server.prefix + tool.name)[:64]
        try:
            function = Function(name, tool.description, tool.input_schema)
        except RequestError as error:
            raise self._load_error(str(error)) from None
        return Tool(function), McpTool(self, tool.name)

    def _load_error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"MCP server {self.server.name!r} cannot be used: {reason}")


@asynccontextmanager
async def _transport(server: McpServerConfig, ended: asyncio.Event) -> AsyncGenerator[Any, None]:
    """What a client reads from and writes to; `ended` is set when the server is gone."""
    async with _streams(server) as (incoming, outgoing):
        send, receive = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            async with send:
                with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async for message in incoming:
                        await send.send(message)
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(forward)
            yield receive, outgoing
            group.cancel_scope.cancel()


@asynccontextmanager
async def _streams(server: McpServerConfig) -> AsyncGenerator[Any, None]:
    source = server.source
    if source.kind == "process":
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=source.command or "",
            args=list(source.args),
            env=None if source.env is None else dict(source.env),
            cwd=source.work_dir,
        )
        # notebooks replace sys.stderr by something that has no file behind it
        async with stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr) as streams:
            yield streams
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = dict(source.headers or {})
    if server.bearer_token is not None:
        headers["Authorization"] = f"Bearer {server.bearer_token}"
    timeout = httpx2.Timeout(MCP_TIMEOUT, read=None)  # a stream of events may be silent for long
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
        streamable_http_client(source.url or "", http_client=http) as streams,
    ):
        yield streams


def _shows_loss(error: BaseException) -> bool:
    """Whether the connection failed, and not the call."""
    import mcp
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error, mcp.MCPError):
        return error.code == CONNECTION_CLOSED or _is_unknown_session(error)
    return isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | OSError)


def _is_unknown_session(error: Exception) -> bool:
    return getattr(error, "message", None) == _UNKNOWN_SESSION


def _is_repeatable(tool: Any) -> bool:
    """Whether the server says that calling twice does no more than calling once."""
    hints = tool.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


def _result_text(result: Any) -> str:
    texts = [_block_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return block.resource.text
    return f"[{block.type} that cannot be shown as text]"


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # what task groups make of one failure
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _require_package() -> None:
    try:
        import mcp
    except ImportError as error:
        raise ModelLoadError(
            "MCP servers need the official client: pip install 'mistralrs_sdk[mcp]'"
        ) from error
    if not hasattr(mcp, "Client"):
        raise ModelLoadError("MCP servers need mcp 2 or later: pip install 'mistralrs_sdk[mcp]'")
