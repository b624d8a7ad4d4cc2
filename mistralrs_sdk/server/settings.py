"""`ServerSettings`: how the HTTP server listens, whom it lets in, and what it tells."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Literal

import attrs

from mistralrs_sdk import AgentPermission, ConfigError

MIB = 2**20

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.ASCII)
_HOST = re.compile(r"[^/?#@:*\s]+")


def _lower(values: Any) -> Any:
    """A tuple of what browsers send in lower case."""
    if not isinstance(values, list | tuple):
        return values
    return tuple(each.lower() if isinstance(each, str) else each for each in values)


def _permission(value: Any) -> Any:
    known = isinstance(value, str) and value in list(AgentPermission)
    return AgentPermission(value) if known else value


@attrs.frozen(kw_only=True)
class ServerSettings:
    """The settings of `create_app` and `mistralrs-sdk serve`; checked when made.

    Raises:
        ConfigError: one is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 1234
    """0 lets the system choose a free one."""
    api_key: str | None = attrs.field(default=None, repr=False)
    """What clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; None: nothing."""
    cors_origins: tuple[str, ...] = attrs.field(default=(), converter=_lower)
    """Origins whose pages may call from a browser, beside the server's own; "*" is any."""
    allowed_hosts: tuple[str, ...] | None = attrs.field(default=None, converter=_lower)
    """Names by which it may be called, beside addresses and localhost; None: any.

    What a browser is told to be this machine under a name of somebody else's is refused then.
    `serve` sets it where it listens on loopback without a key."""
    max_body_bytes: int = 50 * MIB
    keep_alive_seconds: float = 10
    """After this long without an event a stream gets a comment, so that nothing closes it."""
    drain_seconds: float = 30
    """How long answers that run may take to end once the server is told to stop."""
    access_log: Literal["text", "json"] | None = "text"
    access_log_health: bool = False
    """Whether /health, /metrics and the page's panel are in the access log."""
    request_id_header: bool = True
    """Whether answers carry `x-request-id`: the client's, or a new one."""
    metrics: bool = True
    """Whether /metrics answers."""
    docs: bool = True
    """Whether /docs and the OpenAPI description are there."""
    web_page: bool = True
    """Whether / is a page for people."""
    allow_runtime_adapters: bool = False
    """Whether clients may load and unload LoRA adapters."""
    allow_diagnostics: bool = False
    """Whether clients may run `doctor` and `tune`: they take a core for seconds, and `tune` reads
    any model that is named."""
    max_tool_rounds: int | None = None
    """Rounds of calls executed here, for requests that do not say; None: 256."""
    tool_dispatch_url: str | None = None
    """Where calls of tools that nothing here executes are sent; None: they end the answer."""
    agent_permission: AgentPermission = attrs.field(
        default=AgentPermission.AUTO, converter=_permission
    )
    """What holds for every call that is executed here: auto, ask or deny; a request may only be
    stricter."""

    def __attrs_post_init__(self) -> None:
        _require(isinstance(self.host, str) and self.host != "", "host", self.host, "an address")
        _whole("port", self.port, 0, 65535)
        _whole("max_body_bytes", self.max_body_bytes, 1, None)
        _seconds("keep_alive_seconds", self.keep_alive_seconds, above=0)
        _seconds("drain_seconds", self.drain_seconds, above=-1)
        if self.api_key is not None:
            usable = isinstance(self.api_key, str) and self.api_key.isascii()
            usable = usable and self.api_key.isprintable() and bool(self.api_key.strip())
            # the value is a secret: it is not shown
            _require(
                usable, "api_key", "...", "printable ASCII and not empty: headers hold no more"
            )
        origins = self.cors_origins
        # "null" is what any page can call itself, in a frame
        listed = isinstance(origins, tuple) and all(map(_is_origin, origins))
        wanted = 'a list of origins such as "https://example.org", without a path, or "*"'
        _require(listed, "cors_origins", origins, wanted)
        hosts = self.allowed_hosts
        listed = isinstance(hosts, tuple) and all(map(_is_host, hosts))
        wanted = 'None, or a list of names such as "chat.example.org", without a port'
        _require(hosts is None or listed, "allowed_hosts", hosts, wanted)
        _require(
            self.access_log in ("text", "json", None),
            "access_log",
            self.access_log,
            '"text", "json" or None',
        )
        if self.max_tool_rounds is not None:
            _whole("max_tool_rounds", self.max_tool_rounds, 0, None)
        url = self.tool_dispatch_url
        valid = isinstance(url, str) and url.startswith(("http://", "https://"))
        _require(url is None or valid, "tool_dispatch_url", url, "an http:// or https:// address")
        known = isinstance(self.agent_permission, AgentPermission)
        wanted = f"one of {', '.join(AgentPermission)}"
        _require(known, "agent_permission", self.agent_permission, wanted)
        for name in _SWITCHES:
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can reach it, without a key."""
        return self.api_key is None and not self.on_loopback

    @property
    def on_loopback(self) -> bool:
        """Whether only programs of this machine can reach it, a browser among them."""
        return _is_loopback(self.host)


_SWITCHES = (
    "access_log_health",
    "allow_diagnostics",
    "allow_runtime_adapters",
    "docs",
    "metrics",
    "request_id_header",
    "web_page",
)


def _is_origin(value: object) -> bool:
    return isinstance(value, str) and (value == "*" or _ORIGIN.fullmatch(value) is not None)


def _is_host(value: object) -> bool:
    return isinstance(value, str) and _HOST.fullmatch(value) is not None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require(valid: bool, name: str, value: object, wanted: str) -> None:
    if not valid:
        raise ConfigError(f"{name} ({value!r}) must be {wanted}")


def _whole(name: str, value: Any, least: int, most: int | None) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
    valid = valid and (most is None or value <= most)
    range_text = f"at least {least}" if most is None else f"from {least} to {most}"
    _require(valid, name, value, f"a whole number, {range_text}")


def _seconds(name: str, value: Any, *, above: float) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    wanted = "a number of seconds above 0" if above == 0 else "a number of seconds, 0 or more"
    _require(valid and above < value < 1e9, name, value, wanted)
