"""Which web pages may have a browser send requests here, and under which names it may be called."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mistralrs_sdk.server.errors import HttpError, error_response

_READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: of their answers a page of another site reads nothing."""

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class RefuseForeignPages:
    """Answers 403 to what a page of another site has a browser send; see `refused_page`."""

    def __init__(self, app: ASGIApp, *, cors_origins: Collection[str]) -> None:
        self._app = app
        self._cors_origins = cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READING:
            page = refused_page(Headers(scope=scope), self._cors_origins)
            if page is not None:
                refusal = HttpError(
                    403,
                    f"{page} may not send requests here: let its origin in with cors_origins "
                    "(--cors-origin), or set an API key",
                    code="cross_site_request",
                )
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RefuseForeignNames:
    """Answers 403 where the `Host` header is a name this server does not have.

    A page whose own name was made to lead to this machine is no other site for the browser, but it
    cannot do without that name. Starlette's `TrustedHostMiddleware` knows no IPv6 addresses.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not is_own_name(host, self._allowed_hosts):
                refusal = HttpError(
                    403,
                    f"this server is not called {host!r:.100}: name it in allowed_hosts "
                    "(--allowed-host)",
                    code="host_not_allowed",
                )
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refused_page(headers: Headers, cors_origins: Collection[str]) -> str | None:
    """Return which page must not send this request; None: none, or one that may.

    What no browser sends, with neither `Origin` nor `Sec-Fetch-Site`, is let through. Where a
    browser says that page and server are of one origin, that counts: no page can make it say so,
    and a proxy between may have changed `Host`.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "").lower()
    if "*" in cors_origins or (origin is not None and origin.lower() in cors_origins):
        return None
    if site == "same-origin":
        return None
    if origin is not None and not _is_of(origin.lower(), headers.get("host", "").lower()):
        return f"a page of {origin!r:.100}"
    return "a page of another site" if site in ("cross-site", "same-site") else None


def is_own_name(host: str, allowed_hosts: Collection[str]) -> bool:
    """Whether a `Host` header is an address, localhost, one of these names, or missing.

    Nobody else can have an address or localhost lead here, and browsers send the header always.
    """
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    if name in ("", "localhost") or name.endswith(".localhost") or name in allowed_hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_of(origin: str, host: str) -> bool:
    """Whether an origin is that of a server called so; behind a proxy its scheme may differ."""
    scheme, _, place = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return place != "" and place == (host.removesuffix(port) if port else host)
