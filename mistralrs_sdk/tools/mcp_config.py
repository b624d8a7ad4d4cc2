"""Which MCP servers a model's tools come from: values that check themselves."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

import attrs

from mistralrs_sdk.errors import ConfigError, UnsupportedError

MCP_TIMEOUT = 30.0
"""Seconds for connecting and for each call, if not said otherwise."""
MCP_MAX_CONCURRENT_CALLS = 10

_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,32}")


def _seconds(name: str, value: Any) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (valid and 0 < value < math.inf):
        raise ConfigError(f"{name} ({value!r}) must be a number of seconds above 0, or None")


@attrs.frozen(kw_only=True)
class McpServerSource:
    """How a server is reached: made by `Http`, `Process` or `WebSocket`.

    Values of headers and of the environment are never shown. `timeout_secs` are the seconds that
    connecting may take; None: 30.

    Raises:
        ConfigError: the URL is none, the command is empty, or the time is no number above 0.
    """

    kind: Literal["http", "process"]
    url: str | None = None
    timeout_secs: float | None = None
    headers: Mapping[str, str] | None = attrs.field(default=None, repr=False, hash=False)
    command: str | None = None
    args: tuple[str, ...] = ()
    work_dir: str | None = None
    env: Mapping[str, str] | None = attrs.field(default=None, repr=False, hash=False)

    @classmethod
    def Http(  # noqa: N802 (mistral.rs' name)
        cls,
        url: str,
        timeout_secs: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> McpServerSource:
        """A server at this URL, over streamable HTTP; `timeout_secs` None is 30 s."""
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"url of an MCP server ({url!r}) must start with http:// or https://")
        _seconds("timeout_secs of an MCP server", timeout_secs)
        return cls(kind="http", url=url, timeout_secs=timeout_secs, headers=headers)

    @classmethod
    def Process(  # noqa: N802 (mistral.rs' name)
        cls,
        command: str,
        args: Iterable[str] = (),
        work_dir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> McpServerSource:
        """A server that is started here and spoken to over its standard input and output.

        It sees `env` and of this process' environment only what is harmless (PATH, HOME ...).
        """
        if not isinstance(command, str) or not command:
            raise ConfigError(f"command of an MCP server ({command!r}) must be a non-empty str")
        args = (args,) if isinstance(args, str) else tuple(args)
        return cls(kind="process", command=command, args=args, work_dir=work_dir, env=env)

    @classmethod
    def WebSocket(  # noqa: N802 (mistral.rs' name)
        cls,
        url: str,
        timeout_secs: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> NoReturn:
        """Not done: `UnsupportedError`. MCP has no WebSocket transport, nor has its client."""
        raise UnsupportedError(
            f"McpServerSource.WebSocket({url!r}) is not supported: the official mcp package speaks "
            "no WebSocket; use McpServerSource.Http"
        )


@attrs.frozen(kw_only=True)
class McpServerConfig:
    """One server.

    Raises:
        ConfigError: the name is empty, or the prefix is too long or has strange characters.
        UnsupportedError: `resources` are given.
    """

    name: str
    source: McpServerSource
    id: str = attrs.field(factory=lambda: str(uuid.uuid4()))
    enabled: bool = True
    tool_prefix: str | None = None
    """Tools are called `<prefix>_<tool>`; None: the server's name, "": no prefix at all."""
    resources: tuple[str, ...] | None = None
    bearer_token: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name of an MCP server ({self.name!r}) must be a non-empty str")
        if not isinstance(self.source, McpServerSource):
            raise ConfigError(f"source of MCP server {self.name!r} must be a McpServerSource")
        if self.tool_prefix is not None and not _PREFIX.fullmatch(self.tool_prefix):
            raise ConfigError(
                f"tool_prefix ({self.tool_prefix!r}) of MCP server {self.name!r} must be at most "
                "32 letters, digits, underscores or hyphens"
            )
        if self.resources:
            raise UnsupportedError(
                f"resources of MCP server {self.name!r} are not supported: only its tools are used"
            )

    @property
    def prefix(self) -> str:
        """What comes before a tool's name, the underscore included."""
        prefix = self.tool_prefix
        if prefix is None:
            prefix = re.sub(r"[^A-Za-z0-9_-]+", "_", self.name)[:32]
        return f"{prefix}_" if prefix else ""


@attrs.frozen(kw_only=True)
class McpClientConfig:
    """The servers to connect to, for `ModelBuilder.with_mcp_client`.

    Raises:
        ConfigError: a limit is out of range, or two servers have the same id.
    """

    servers: tuple[McpServerConfig, ...] = attrs.field(default=(), converter=tuple)
    auto_register_tools: bool = True
    """Whether requests offer the tools; else they are only listed."""
    tool_timeout_secs: float | None = None
    """Seconds for each call; None: 30."""
    max_concurrent_calls: int | None = None
    """Calls that run at once, all servers together; None: 10."""

    def __attrs_post_init__(self) -> None:
        _seconds("tool_timeout_secs", self.tool_timeout_secs)
        limit = self.max_concurrent_calls
        if limit is not None and (isinstance(limit, bool) or limit < 1):
            raise ConfigError(f"max_concurrent_calls ({limit!r}) must be at least 1, or None")
        ids = [server.id for server in self.servers]
        for id in ids:
            if ids.count(id) > 1:
                raise ConfigError(f"two MCP servers have the id {id!r}: change one")
