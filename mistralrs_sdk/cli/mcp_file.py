"""The file of `serve --mcp-config`: mistral.rs' JSON of MCP servers, as a `McpClientConfig`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mistralrs_sdk import ConfigError, McpClientConfig, McpServerConfig, McpServerSource

_SOURCES: Mapping[str, tuple[Callable[..., McpServerSource], str, Collection[str]]] = {
    "Http": (McpServerSource.Http, "url", ("timeout_secs", "headers")),
    "Process": (McpServerSource.Process, "command", ("args", "work_dir", "env")),
    "WebSocket": (McpServerSource.WebSocket, "url", ("timeout_secs", "headers")),
}
"""The types of a source: what makes it, the key it must have, and those it may."""

_LIMITS = ("auto_register_tools", "tool_timeout_secs", "max_concurrent_calls")
_SERVER = ("bearer_token", "enabled", "id", "resources", "tool_prefix")


def read_mcp_config(file: Path) -> McpClientConfig:
    """Read which MCP servers to connect to; null is unset.

    Raises:
        ConfigError: it cannot be read, a key is unknown, or a value is wrong; names the file.
        UnsupportedError: it asks for what this client does not do.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--mcp-config {file} cannot be read: {error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"--mcp-config {file} is no JSON: {error}") from error
    try:
        return _client(data)
    except ConfigError as error:
        raise ConfigError(f"--mcp-config {file}: {error}") from error


def _client(data: Any) -> McpClientConfig:
    given = _object("the file", data, required=("servers",), optional=_LIMITS)
    servers = given.pop("servers")
    if not isinstance(servers, list):
        raise ConfigError(f"servers ({servers!r:.80}) must be a list")
    _check_types("the file", given, auto_register_tools=bool, max_concurrent_calls=int)
    return McpClientConfig(
        servers=[_server(f"servers[{place}]", each) for place, each in enumerate(servers)], **given
    )


def _server(where: str, data: Any) -> McpServerConfig:
    given = _object(where, data, required=("name", "source"), optional=_SERVER)
    source = _source(f"{where}.source", given.pop("source"))
    _check_types(where, given, bearer_token=str, enabled=bool, id=str, resources=list)
    _check_types(where, given, tool_prefix=str)
    return McpServerConfig(source=source, **given)


def _source(where: str, data: Any) -> McpServerSource:
    kind = data.get("type") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise ConfigError(f"type of {where} ({kind!r:.80}) must be one of {', '.join(_SOURCES)}")
    make, key, optional = _SOURCES[kind]
    given = _object(where, data, required=("type", key), optional=optional)
    del given["type"]
    _check_types(where, given, args=list, env=dict, headers=dict, work_dir=str)
    for name in ("args", "env", "headers"):
        values = given.get(name, [])
        values = values.values() if isinstance(values, dict) else values
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{name} of {where} must hold texts only")  # it may be a secret
    return make(**given)


def _object(
    where: str, data: Any, *, required: Collection[str], optional: Collection[str]
) -> dict[str, Any]:
    """What an object sets, if it has what it must and nothing unknown."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} ({data!r:.80}) must be an object")
    given = {key: value for key, value in data.items() if value is not None}
    for key in required:
        if key not in given:
            raise ConfigError(f"{where} has no {key!r}: add it")
    unknown = sorted(given.keys() - {*required, *optional})
    if unknown:
        known = ", ".join(sorted((*required, *optional)))
        raise ConfigError(f"{where} has {unknown[0]!r}, which is unknown: there are {known}")
    return given


def _check_types(where: str, given: Mapping[str, Any], **kinds: type) -> None:
    names = {str: "a text", bool: "true or false", int: "a whole number", list: "a list"}
    for key, kind in kinds.items():
        value = given.get(key)
        if value is not None and type(value) is not kind:
            wanted = names.get(kind, "an object")
            raise ConfigError(f"{key} of {where} must be {wanted}, not {type(value).__name__}")
