"""What builders say about tools and sessions."""

from __future__ import annotations

import pickle

import pytest

from mistralrs_sdk import ConfigError, Function, ModelBuilder, RequestError, Tool
from mistralrs_sdk.tools.mcp_config import McpClientConfig, McpServerConfig, McpServerSource

NOW = Tool(Function("now", "The time."))


def now(call) -> str:
    return "12:00"


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def full() -> ModelBuilder:
    source = McpServerSource.Process("server")
    servers = [McpServerConfig(name="files", id="1", source=source)]
    return (
        ModelBuilder("model")
        .with_tool(weather)
        .with_tool_callback("log", now)
        .with_tool_callback_and_tool("now", now, NOW)
        .with_mcp_client(McpClientConfig(servers=servers))
        .with_tool_timeout(5)
        .with_sessions(3, idle_seconds=60)
    )


def test_builder_with_tools_stays_a_value():
    """Equal if made alike, hashable, and pickled if its functions can be."""
    assert full() == full()
    assert hash(full()) == hash(full())
    assert pickle.loads(pickle.dumps(full())) == full()
    assert full() != full().with_tool_timeout(6)
    assert ModelBuilder("model").tools.callbacks == ()


def test_repr_shows_tools_by_name():
    """As they were said, without the functions' addresses."""
    shown = repr(full())

    assert ".with_tool(weather).with_tool_callback('log', ...)" in shown
    assert ".with_tool_callback_and_tool('now', ...)" in shown
    assert ".with_tool_timeout(5).with_sessions(3, idle_seconds=60.0)" in shown
    assert "with_mcp_client(McpClientConfig(" in shown
    assert "0x" not in shown


def test_function_becomes_a_tool():
    """Name, description and schema come from the function."""
    (callback,) = ModelBuilder("model").with_tool(weather).tools.callbacks

    assert callback.by_keywords
    assert callback.offered.function.description == "The weather in a city."
    assert callback.offered.function.parameters["required"] == ["city"]


def test_two_callbacks_of_one_name_are_refused():
    """The message names the method and the tool."""
    with pytest.raises(ConfigError, match=r"with_tool_callback\('weather'\): there is a callback"):
        ModelBuilder("model").with_tool(weather).with_tool_callback("weather", now)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("with_tool_callback", ("now", "not callable")),
        ("with_tool_callback_and_tool", ("later", now, NOW)),
        ("with_mcp_client", ("server",)),
        ("with_tool_timeout", (0,)),
        ("with_sessions", (0,)),
    ],
)
def test_bad_setting_is_refused_where_it_is_said(method, arguments):
    """A ConfigError with the value in it."""
    with pytest.raises(ConfigError):
        getattr(ModelBuilder("model"), method)(*arguments)


def test_bad_tool_name_is_refused_where_it_is_said():
    """The same rule as for tools of requests."""
    with pytest.raises(RequestError, match="tool name 'no spaces'"):
        ModelBuilder("model").with_tool_callback("no spaces", now)


def test_idle_time_of_sessions_must_be_a_time():
    """The message says which number is wrong."""
    with pytest.raises(ConfigError, match="idle_seconds"):
        ModelBuilder("model").with_sessions(idle_seconds=-1)
