"""`serve --mcp-config`: a file of MCP servers becomes a client of every model that chats."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx2
import pytest

from mistralrs_sdk import (
    ConfigError,
    McpClientConfig,
    McpServerConfig,
    McpServerSource,
    ModelBuilder,
    MultiModelBuilder,
    UnsupportedError,
    tool_from_function,
)
from mistralrs_sdk.cli import serve
from mistralrs_sdk.cli.mcp_file import read_mcp_config
from mistralrs_sdk.cli.serve_models import builder_of
from tests.test_model_tool_loop import builder, switch
from tests.test_serve_command import parse
from tests.translated_apis import serving

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("lights")

@server.tool()
def switch(on: bool) -> str:
    '''Switches the light.'''
    return "bright" if on else "dark"

server.run("stdio")
"""

MCP = {
    "servers": [
        {
            "id": "files",
            "name": "Files",
            "source": {
                "type": "Process",
                "command": "mcp-files",
                "args": ["/srv"],
                "env": {"A": "b"},
            },
            "tool_prefix": "fs",
        },
        {
            "id": "web",
            "name": "Web",
            "source": {"type": "Http", "url": "https://x/mcp", "timeout_secs": 5, "headers": None},
            "bearer_token": "secret",
            "enabled": False,
        },
    ],
    "auto_register_tools": True,
    "tool_timeout_secs": 10,
    "max_concurrent_calls": 3,
}
"""A file as mistral.rs takes it."""


def mcp_file(folder: Path, content: object) -> Path:
    file = folder / "mcp.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_a_file_of_mcp_servers_is_read(tmp_path):
    """Each key of mistral.rs' format is a setting of the client; null is unset."""
    read = read_mcp_config(mcp_file(tmp_path, MCP))

    files = McpServerSource.Process("mcp-files", ["/srv"], env={"A": "b"})
    web = McpServerSource.Http("https://x/mcp", timeout_secs=5)
    assert read == McpClientConfig(
        servers=[
            McpServerConfig(id="files", name="Files", source=files, tool_prefix="fs"),
            McpServerConfig(id="web", name="Web", source=web, bearer_token="secret", enabled=False),
        ],
        tool_timeout_secs=10,
        max_concurrent_calls=3,
    )


def test_models_that_chat_get_the_tools_of_mcp_servers(tmp_path):
    """Those that embed call nothing."""
    mcp = read_mcp_config(mcp_file(tmp_path, MCP))
    args = parse("-m", "a", "-m", "b", "--embedding-model-id", "e")

    found = builder_of(args, mcp=mcp)

    assert isinstance(found, MultiModelBuilder)
    plain = builder_of(args)
    assert isinstance(plain, MultiModelBuilder)
    for (_, one), (_, other) in zip(found.models, plain.models, strict=True):
        chats = isinstance(other, ModelBuilder)
        assert one == (other.with_mcp_client(mcp) if chats else other)


def test_mcp_servers_that_no_model_would_use_are_refused(tmp_path):
    """Where all models embed nobody would ever call the tools."""
    mcp = read_mcp_config(mcp_file(tmp_path, MCP))

    with pytest.raises(ConfigError, match=r"--mcp-config, or MCP_CONFIG_PATH, has no effect"):
        builder_of(parse("--embedding-model-id", "e"), mcp=mcp)


def test_the_flag_wins_over_the_variable_for_mcp(tmp_path):
    """Without either there is no client."""
    file = str(mcp_file(tmp_path, MCP))
    environ = {"MCP_CONFIG_PATH": file}
    other = {"MCP_CONFIG_PATH": "no-such-file"}

    found = [
        serve.mcp_config_from(parse("-m", "x"), environ),
        serve.mcp_config_from(parse("-m", "x", "--mcp-config", file), other),
        serve.mcp_config_from(parse("-m", "x"), {}),
    ]

    assert found == [read_mcp_config(Path(file)), read_mcp_config(Path(file)), None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ({}, "has no 'servers'"),
        ({"servers": {}}, "must be a list"),
        ({"mcpServers": {}}, "has no 'servers'"),
        ({**MCP, "colour": 1}, "'colour'"),
        ({**MCP, "tool_timeout_secs": -1}, "tool_timeout_secs"),
        ({**MCP, "auto_register_tools": "yes"}, "auto_register_tools"),
        ({"servers": [{"name": "x"}]}, "has no 'source'"),
        ({"servers": [{"name": "x", "source": {"type": "Pipe"}}]}, "Http, Process, WebSocket"),
        ({"servers": [{"name": "x", "source": {"type": "Http"}}]}, "has no 'url'"),
        ({"servers": [{"name": "x", "source": {"type": "Http", "url": "x"}}]}, "must start with"),
        (
            {
                "servers": [
                    {"name": "x", "source": {"type": "Process", "command": "x", "args": "y"}}
                ]
            },
            "args of servers\\[0\\].source must be a list",
        ),
        (
            {
                "servers": [
                    {"name": "x", "source": {"type": "Process", "command": "x", "env": {"A": 1}}}
                ]
            },
            "env of servers\\[0\\].source must hold texts",
        ),
    ],
)
def test_a_wrong_file_of_mcp_servers_is_refused(tmp_path, content, message):
    """The error names the file and what is wrong in it."""
    with pytest.raises(ConfigError, match=message) as caught:
        read_mcp_config(mcp_file(tmp_path, content))

    assert "mcp.json" in str(caught.value)


def test_a_web_socket_of_an_mcp_server_is_not_supported(tmp_path):
    """MCP's own client speaks none: the error says so before a model is loaded."""
    source = {"type": "WebSocket", "url": "wss://x"}

    with pytest.raises(UnsupportedError, match="WebSocket"):
        read_mcp_config(mcp_file(tmp_path, {"servers": [{"name": "x", "source": source}]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mcp_config(tmp_path / "nothing.json")


async def test_a_tool_of_an_mcp_server_is_listed_and_called_over_http(tmp_path):
    """From the file to the answer; the tool is described so that a tiny model can call it."""
    script = tmp_path / "server.py"
    script.write_text(SERVER, encoding="utf-8")
    source = {"type": "Process", "command": sys.executable, "args": [str(script)]}
    servers = [{"name": "lights", "source": source, "tool_prefix": ""}]
    client = read_mcp_config(mcp_file(tmp_path, {"servers": servers}))
    asked = {
        "messages": "light?",
        "temperature": 0,
        "max_tokens": 100,
        "tool_choice": {"type": "function", "function": {"name": "switch"}},
        "tools": [tool_from_function(switch).to_dict()],
    }
    async with (
        await builder().with_mcp_client(client).build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        info = (await http.get("/v1/system/info")).json()
        answer = (await http.post("/v1/chat/completions", json=asked)).json()

    assert info["models"][0]["mcp_tools"] == [
        {"name": "switch", "description": "Switches the light.", "server": "lights"}
    ]
    (call,) = answer["agentic_tool_calls"]
    assert call["name"] == "switch"
    assert call["result_content"] in ("bright", "dark")
