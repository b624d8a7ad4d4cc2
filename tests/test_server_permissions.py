"""The server's `agent_permission`: what holds for every call it executes, whatever clients say."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mistralrs_sdk import (
    CalledFunction,
    CodeExecutionConfig,
    ConfigError,
    McpClientConfig,
    McpServerConfig,
    McpServerSource,
    ModelBuilder,
    ToolCallContext,
    tool_from_function,
)
from mistralrs_sdk.server import ServerSettings
from tests.test_model_tool_loop import builder, switch
from tests.test_serve_mcp import SERVER
from tests.test_server_approvals import named_events
from tests.test_tool_dispatch import ToolServer
from tests.translated_apis import serving

CHAT = "/v1/chat/completions"
OFFERED = tool_from_function(switch).to_dict()
ASKED: dict[str, Any] = {
    "messages": "light?",
    "temperature": 0,
    "max_tokens": 100,
    "tool_choice": {"type": "function", "function": {"name": "switch"}},
}
RESET = {"type": "function", "function": {"name": "mistralrs_reset_python_session"}}


@contextlib.asynccontextmanager
async def client(built: ModelBuilder, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    found = ServerSettings(**{"access_log": None, **settings})
    async with (
        await built.build() as model,
        serving(model, found) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


async def happened(http: httpx2.AsyncClient, body: dict[str, Any], decision: str) -> list[str]:
    """What comes of the calls of a stream; each that is asked about gets this decision."""
    found: list[str] = []
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        async for name, data in named_events(answer):
            if name == "agentic_tool_approval_required":
                place = f"/v1/agent/approvals/{data['approval_id']}"
                await http.post(place, json={"decision": decision})
                found.append("asked")
            elif name == "agentic_tool_call_progress" and data["phase"] == "complete":
                found.append(data.get("error") or "ran")
    return found


DENIED = "the call of switch was denied: this request may execute no tools"
OUTCOMES = {
    "auto": (["ran"], ["ran"]),
    "ask": (["asked", "ran"], ["asked", "the call of switch was denied by the user"]),
    "deny": ([DENIED], [DENIED]),
}
"""What an approval comes to, and a denial."""


@pytest.mark.parametrize("asked", [None, "auto", "ask", "deny"])
@pytest.mark.parametrize("ours", ["auto", "ask", "deny"])
async def test_the_stricter_of_server_and_request_holds(ours, asked):
    """A request that says less gets the server's, one that says more its own."""
    body = ASKED if asked is None else {**ASKED, "agent_permission": asked}
    async with client(builder().with_tool(switch), agent_permission=ours) as http:
        found = tuple([await happened(http, body, what) for what in ("approve", "deny")])

    assert found == OUTCOMES[max(ours, asked or "auto", key=list(OUTCOMES).index)]


@contextlib.contextmanager
def tool_server() -> Iterator[ToolServer]:
    with ToolServer() as server:
        server.answer = (200, b"bright")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def lights(folder: Path) -> McpClientConfig:
    """The client of an MCP server with the tool `switch`."""
    script = folder / "server.py"
    script.write_text(SERVER, encoding="utf-8")
    source = McpServerSource.Process(sys.executable, [str(script)])
    return McpClientConfig(servers=[McpServerConfig(name="x", source=source, tool_prefix="")])


@pytest.mark.parametrize(
    "kind",
    [
        "mcp",
        "dispatch",
        pytest.param(
            "code", marks=pytest.mark.skipif(sys.platform != "linux", reason="runs on Linux only")
        ),
    ],
)
async def test_it_holds_for_every_kind_of_tool(tmp_path, kind):
    """Of MCP servers, of the dispatch URL, and for code; a request cannot go around it."""
    with tool_server() as far:
        built, settings, body = builder(), {}, {**ASKED, "agent_permission": "auto"}
        if kind == "mcp":
            built, body["tools"] = built.with_mcp_client(lights(tmp_path)), [OFFERED]
        elif kind == "dispatch":
            settings, body["tools"] = {"tool_dispatch_url": far.url}, [OFFERED]
        else:
            built = built.with_code_execution(CodeExecutionConfig())
            body |= {"enable_code_execution": True, "tool_choice": RESET, "max_tokens": 150}
            body["code_execution_permission"] = "auto"
        found = []
        for ours in ("auto", "ask", "deny"):
            async with client(built, agent_permission=ours, **settings) as http:
                found.append(await happened(http, body, "deny"))

    name = body["tool_choice"]["function"]["name"]
    denied = f"the call of {name} was denied"
    assert found == [
        ["ran"],
        ["asked", f"{denied} by the user"],
        [f"{denied}: this request may execute no tools"],
    ]
    assert len(far.received) == (kind == "dispatch")


MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASKED),
        (CHAT, {**ASKED, "agent_permission": "auto"}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2, "stream": True}),
        ("/v1/messages", MESSAGES),
        ("/v1/messages", {**MESSAGES, "stream": True}),
    ],
)
async def test_where_nobody_can_be_asked_nothing_may_run(path, body):
    """Only a streamed chat can be: the rest is 400, unless the client runs its calls itself."""
    async with client(builder().with_tool(switch), agent_permission="ask") as http:
        refused = await http.post(path, json=body)
        own = await http.post(path, json={**body, "max_tool_rounds": 0})

    assert (refused.status_code, own.status_code) == (400, 200)
    assert "somebody to ask" in refused.json()["error"]["message"]


async def test_asking_without_a_stream_is_for_who_would_be_asked():
    """Where the server denies anyhow, there is no question; else it is refused, tools or none."""
    body = {**ASKED, "agent_permission": "ask"}
    found = []
    for ours in ("auto", "ask", "deny"):
        async with client(builder().with_tool(switch), agent_permission=ours) as http:
            found.append(await http.post(CHAT, json=body))

    assert [answer.status_code for answer in found] == [400, 400, 200]
    assert '"stream": true' in found[0].json()["error"]["message"]
    assert found[2].json()["agentic_tool_calls"][0]["result_content"] == f"Error: {DENIED}"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_other_apis_execute_nothing_either(path):
    """The call is made and refused: the model reads why."""
    called: list[str] = []

    def note(call: CalledFunction, context: ToolCallContext) -> str:
        called.append(call.name)
        return "done"

    built = builder().with_tool_callback_and_tool("switch", note, tool_from_function(switch))
    body: dict[str, Any] = {"max_tool_rounds": 1, "temperature": 0}
    if path == "/v1/messages":
        body |= {**MESSAGES, "max_tokens": 100, "tool_choice": {"type": "tool", "name": "switch"}}
    else:
        body |= {"input": "x", "max_output_tokens": 100}
        body["tool_choice"] = {"type": "function", "name": "switch"}
    counts = []
    for ours in ("auto", "deny"):
        async with client(built, agent_permission=ours) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        counts.append(len(called))

    assert counts == [1, 1]


async def test_a_permission_that_is_none_stays_an_error():
    """Of a request a 400, of the settings a ConfigError."""
    async with client(builder().with_tool(switch), agent_permission="deny") as http:
        answers = [
            await http.post(CHAT, json={**ASKED, "agent_permission": wrong})
            for wrong in ("never", 3, ["deny"], {})
        ]

    assert [answer.status_code for answer in answers] == [400] * 4
    with pytest.raises(ConfigError, match=r"agent_permission \('never'\) must be one of auto"):
        ServerSettings(agent_permission="never")  # type: ignore[arg-type]
