"""MCP servers: how their tools are found, named and called, and what happens when one is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from mistralrs_sdk import (
    CalledFunction,
    ConfigError,
    ModelLoadError,
    RequestBuilder,
    ToolCallContext,
    UnsupportedError,
)
from mistralrs_sdk.tools import mcp_client
from mistralrs_sdk.tools.callbacks import ToolError
from mistralrs_sdk.tools.loop import open_stream
from mistralrs_sdk.tools.mcp_client import McpClient
from mistralrs_sdk.tools.mcp_config import McpClientConfig, McpServerConfig, McpServerSource
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say

SERVER = '''
import asyncio, os
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("test server")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool(name="env.of")
def environment(name: str) -> str:
    return os.environ.get(name, "unset")

@server.tool()
def broken() -> str:
    raise ValueError("bad luck")

@server.tool()
async def slow() -> str:
    await asyncio.sleep(60)
    return "late"

@server.tool()
def leave() -> str:
    os._exit(3)

@server.tool()
def pid() -> str:
    return str(os.getpid())

@server.tool(annotations=ToolAnnotations(idempotentHint=True))
def falters() -> str:
    """Dies when it is called for the first time."""
    mark = os.environ["MARK"]
    if os.path.exists(mark):
        return "done"
    open(mark, "w").close()
    os._exit(3)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER, encoding="utf-8")
    return path


def config(
    script: Path,
    *,
    name: str = "calc",
    prefix: str | None = None,
    mark: str = "from here",
    **settings,
):
    source = McpServerSource.Process(sys.executable, [str(script)], env={"MARK": mark})
    server = McpServerConfig(name=name, source=source, tool_prefix=prefix)
    return McpClientConfig(servers=[server], **settings)


async def results(box: Toolbox, *calls: tuple[str, str]) -> list[str]:
    """What the model reads for these calls."""
    rounds = Rounds(Say(calls=calls), Say("done"))
    async with await open_stream(rounds, RequestBuilder().add_message("user", "?"), box) as stream:
        response = await stream.collect()
    return [record.result_content for record in response.agentic_tool_calls]


async def test_tools_of_a_server_are_listed_offered_and_called(script):
    """Named with the server's name before them, called over its pipes, gone with the model."""
    box = Toolbox(ToolSettings(mcp=config(script)))
    await box.start()
    try:
        listed = {tool.name: tool for tool in box.list_mcp_tools()}
        asked = box.offer(RequestBuilder().add_message("user", "?"))
        read = await results(
            box,
            ("calc_add", '{"a": 2, "b": 3}'),
            ("calc_env_of", '{"name": "MARK"}'),
            ("calc_env_of", '{"name": "PYTEST_CURRENT_TEST"}'),
            ("calc_broken", "{}"),
            ("calc_add", '{"a": "x"}'),
            ("calc_pid", "{}"),
        )
    finally:
        await box.aclose()

    assert listed["calc_add"].description == "Adds two numbers."
    assert listed["calc_add"].server == "calc"
    add = next(tool for tool in asked.tools if tool.name == "calc_add")
    assert set(add.function.parameters["properties"]) == {"a", "b"}
    assert read[:3] == ["5", "from here", "unset"]
    assert read[3].startswith("Error: ")
    assert "broken" in read[3]
    assert read[4].startswith("Error: ")
    with pytest.raises(ProcessLookupError):
        os.kill(int(read[5]), 0)


async def test_calls_wait_for_a_place_and_are_given_up_in_time(script):
    """One place: the second slow call waits for the first; the server stays usable."""
    limits = {"tool_timeout_secs": 0.3, "max_concurrent_calls": 1}
    box = Toolbox(ToolSettings(mcp=config(script, prefix="", **limits)))
    await box.start()
    try:
        begun = asyncio.get_running_loop().time()
        slow = await results(box, ("slow", "{}"), ("slow", "{}"))
        took = asyncio.get_running_loop().time() - begun
        sum_ = await results(box, ("add", '{"a": 1, "b": 1}'))
    finally:
        await box.aclose()

    assert slow == ["Error: MCP server 'calc' gave no result within 0.3 s"] * 2
    assert took >= 0.6
    assert sum_ == ["2"]


async def test_server_that_dies_costs_only_the_call_that_killed_it(script):
    """That one may have been executed, so it is no second time; the next ones connect again."""
    box = Toolbox(ToolSettings(mcp=config(script, prefix="")))
    await box.start()
    listed = box.list_mcp_tools()
    try:
        (first,) = await results(box, ("leave", "{}"))
        added = await results(box, ("add", '{"a": 1, "b": 1}'), ("add", '{"a": 2, "b": 2}'))
        pids = await results(box, ("pid", "{}"), ("pid", "{}"))
    finally:
        await box.aclose()

    assert first.startswith("Error: MCP server 'calc' was lost during the call")
    assert added == ["2", "4"]
    assert len(set(pids)) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids[0]), 0)
    assert box.list_mcp_tools() == []
    assert len(listed) == len({tool.name for tool in listed})


async def test_server_that_died_between_calls_costs_none(script):
    """Its end is seen when it comes, so the next call goes to a new one."""
    client = McpClient(config(script, prefix=""))
    await client.start()
    try:
        tools = {tool.name: executor for tool, executor in client.tools(taken=())}
        context = ToolCallContext(round=0, tool_name="pid")
        pid = int(await tools["pid"].run(CalledFunction("pid", "{}"), context))
        connection = client._connections[0]
        os.kill(pid, signal.SIGKILL)
        while connection._client is not None:
            await asyncio.sleep(0.01)
        again = int(await tools["pid"].run(CalledFunction("pid", "{}"), context))
    finally:
        await client.aclose()

    assert again != pid
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_call_that_fails_late_leaves_the_next_connection_alone(script):
    """Another call may have connected again before this one hears that its server is gone."""
    failing = asyncio.Event()

    class Lost:
        async def call_tool(self, name, arguments):
            await failing.wait()
            raise ConnectionResetError

    connection = mcp_client._Connection(config(script).servers[0], 30, asyncio.Semaphore(1))
    connection._client = Lost()
    call = asyncio.create_task(connection.call("add", {}))
    await asyncio.sleep(0)
    connection._client, connection._ended = Lost(), asyncio.Event()
    failing.set()

    with pytest.raises(ToolError, match="lost during the call"):
        await call
    assert not connection._ended.is_set()


async def test_call_that_may_be_repeated_is_repeated_over_a_new_connection(script, tmp_path):
    """The server says which tools do no more when they are called twice."""
    box = Toolbox(ToolSettings(mcp=config(script, prefix="", mark=str(tmp_path / "mark"))))
    await box.start()
    try:
        assert await results(box, ("falters", "{}")) == ["done"]
    finally:
        await box.aclose()


async def test_server_that_does_not_come_back_is_an_error_for_the_model(script, tmp_path):
    """Each call tries once, and says what happened."""
    own = tmp_path / "server.py"
    own.write_bytes(script.read_bytes())
    box = Toolbox(ToolSettings(mcp=config(own, prefix="")))
    await box.start()
    try:
        own.unlink()
        await results(box, ("leave", "{}"))
        (read,) = await results(box, ("add", '{"a": 1, "b": 1}'))
    finally:
        await box.aclose()

    assert read.startswith("Error: MCP server 'calc' cannot be used: ")
    assert read.endswith("it was lost, and connecting again failed")


@pytest.mark.parametrize(
    ("command", "args"),
    [("/nowhere/server", []), (sys.executable, ["-c", "print('no server')"])],
)
async def test_server_that_does_not_answer_is_named(command, args):
    """Loading fails, and says which server it was."""
    source = McpServerSource.Process(command, args)
    server = McpServerConfig(name="gone", source=source)
    client = McpClient(McpClientConfig(servers=[server]))

    with pytest.raises(ModelLoadError, match="MCP server 'gone' cannot be used"):
        await client.start()


async def test_server_that_says_nothing_is_given_up(monkeypatch):
    """Connecting takes at most 30 s; here less."""
    monkeypatch.setattr(mcp_client, "MCP_TIMEOUT", 0.2)
    source = McpServerSource.Process(sys.executable, ["-c", "input(); input(); input()"])
    client = McpClient(McpClientConfig(servers=[McpServerConfig(name="mute", source=source)]))

    with pytest.raises(ModelLoadError, match=r"'mute' cannot be used: no answer within 0\.2 s"):
        await client.start()


async def test_one_bad_server_closes_the_others(script):
    """No process stays behind when loading fails."""
    good = config(script).servers[0]
    bad = McpServerConfig(name="gone", source=McpServerSource.Process("/nowhere/server"))
    client = McpClient(McpClientConfig(servers=[good, bad]))

    with pytest.raises(ModelLoadError, match="gone"):
        await client.start()

    assert client.list_tools() == []
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_tools_are_refused_under_a_name_that_is_taken_and_can_be_only_listed(script):
    """The message says what to change; auto_register_tools False offers nothing."""
    client = McpClient(config(script, prefix=""))
    listing = McpClient(config(script, prefix="", auto_register_tools=False))
    await asyncio.gather(client.start(), listing.start())
    try:
        with pytest.raises(ConfigError, match=r"'add' of MCP server 'calc'.*another tool_prefix"):
            client.tools(taken={"add"})
        assert listing.tools(taken={"add"}) == []
        assert listing.list_tools() == client.list_tools() != []
    finally:
        await asyncio.gather(client.aclose(), listing.aclose())


async def test_disabled_server_is_not_started():
    """It may even not exist."""
    source = McpServerSource.Process("/nowhere/server")
    server = McpServerConfig(name="off", source=source, enabled=False)
    client = McpClient(McpClientConfig(servers=[server]))

    await client.start()

    assert client.list_tools() == []
    await client.aclose()


async def test_missing_package_names_the_extra(monkeypatch):
    """What to install is in the message."""
    monkeypatch.setitem(sys.modules, "mcp", None)

    with pytest.raises(ModelLoadError, match=r"pip install 'mistralrs_sdk\[mcp\]'"):
        await McpClient(McpClientConfig()).start()


async def test_http_server_is_called_with_its_token():
    """Streamable HTTP, with the bearer token in every request."""
    import socket

    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("over http")
    server.tool(name="ping")(lambda: "pong")
    inner = server.streamable_http_app()
    tokens = set()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            tokens.add(dict(scope["headers"]).get(b"authorization"))
        await inner(scope, receive, send)

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    task = asyncio.create_task(running.serve(sockets=[listening]))
    source = McpServerSource.Http(f"http://127.0.0.1:{port}/mcp")
    http = McpServerConfig(name="http", source=source, bearer_token="secret")
    box = Toolbox(ToolSettings(mcp=McpClientConfig(servers=[http])))
    try:
        await box.start()
        assert await results(box, ("http_ping", "{}")) == ["pong"]
    finally:
        await box.aclose()
        running.should_exit = True
        await task
        listening.close()

    assert tokens == {b"Bearer secret"}
    assert "secret" not in repr(http)


def test_websocket_is_unsupported():
    """The message names the way out."""
    with pytest.raises(UnsupportedError, match=r"use McpServerSource\.Http"):
        McpServerSource.WebSocket("ws://localhost")


def test_values_of_headers_and_environment_are_never_shown():
    """They are where secrets are."""
    http = McpServerSource.Http("http://host/mcp", headers={"X-Key": "secret"})
    process = McpServerSource.Process("server", env={"KEY": "secret"})

    assert "secret" not in repr(http) + repr(process)


@pytest.mark.parametrize(
    "make",
    [
        lambda: McpServerSource.Http("localhost:80"),
        lambda: McpServerSource.Http("http://host", timeout_secs=0),
        lambda: McpServerSource.Process(""),
        lambda: McpServerConfig(name="", source=McpServerSource.Process("x")),
        lambda: McpServerConfig(name="x", source="npx server"),
        lambda: McpServerConfig(
            name="x", source=McpServerSource.Process("x"), tool_prefix="has space"
        ),
        lambda: McpClientConfig(tool_timeout_secs=0),
        lambda: McpClientConfig(max_concurrent_calls=0),
    ],
)
def test_bad_settings_are_refused_where_they_are_written(make):
    """Each names the value."""
    with pytest.raises(ConfigError):
        make()
