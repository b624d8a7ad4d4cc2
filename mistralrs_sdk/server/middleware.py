"""What wraps every request: its id, the access log, counting, the API key, and a net for errors."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection

import attrs
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mistralrs_sdk.server.errors import HttpError, error_response, route_path
from mistralrs_sdk.server.settings import ServerSettings
from mistralrs_sdk.server.web_page import STATS_PATH

access_log = logging.getLogger("mistralrs_sdk.server.access")

HOUSEKEEPING = ("/health", "/metrics", STATS_PATH)

MAX_REQUEST_ID = 128

_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))


@attrs.define(eq=False)
class Exchange:
    """A request while it is answered, for counting and for the log."""

    scope: Scope
    request_id: str
    started: float
    status: int = 0
    """0 until the answer starts."""
    received: int = 0
    sent: int = 0

    @property
    def method(self) -> str:
        """As a label: a client may call its method anything, and each would make one."""
        method = self.scope["method"]
        return method if method in _METHODS else "other"

    @property
    def housekeeping(self) -> bool:
        """Whether it is of those that come every few seconds, and say nothing about traffic."""
        return route_path(self.scope) in HOUSEKEEPING

    @property
    def route(self) -> str:
        """The pattern of its route; the path itself would make a label for every id."""
        return getattr(self.scope.get("route"), "path", None) or "<unmatched>"

    @property
    def model(self) -> str:
        """The model it is for, as far as that is known."""
        return self.scope["state"].get("model", "none")


class Observe:
    """Gives every request an id, logs it, and reports it to `begun` and `ended`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        begun: Callable[[Exchange], None],
        ended: Callable[[Exchange, float], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._begun = begun
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # a copy: what a request notes there must not be seen by others
        scope["state"] = dict(scope.get("state") or {})
        exchange = Exchange(scope, _request_id(scope), time.perf_counter())
        scope["state"]["request_id"] = exchange.request_id

        async def receive_counting() -> Message:
            message = await receive()
            exchange.received += len(message.get("body", b""))
            return message

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if self._settings.request_id_header:
                    MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
            else:
                exchange.sent += len(message.get("body", b""))
            await send(message)

        self._begun(exchange)
        try:
            await self._app(scope, receive_counting, send_noting)
        finally:
            seconds = time.perf_counter() - exchange.started
            self._ended(exchange, seconds)
            self._log(exchange, seconds)

    def _log(self, exchange: Exchange, seconds: float) -> None:
        form, path = self._settings.access_log, exchange.scope["path"]
        if form is None or not access_log.isEnabledFor(logging.INFO):
            return
        if exchange.housekeeping and not self._settings.access_log_health:
            return
        client = (exchange.scope.get("client") or ("-",))[0]
        if form == "json":
            record = {
                "client": client,
                "method": exchange.scope["method"],
                "path": path,
                "status": exchange.status,
                "seconds": round(seconds, 6),
                "bytes_received": exchange.received,
                "bytes_sent": exchange.sent,
                "model": exchange.model,
                "request_id": exchange.request_id,
            }
            access_log.info("%s", json.dumps(record))
            return
        access_log.info(
            "%s %s %s %d %d bytes %.3f s model=%s id=%s",
            client,
            exchange.scope["method"],
            json.dumps(path)[1:-1],  # a line break in a path must not make a line of its own
            exchange.status,
            exchange.sent,
            seconds,
            exchange.model,
            exchange.request_id,
        )


class RequireKey:
    """Lets only those in that know the key, but for `open_paths`, which are for everybody."""

    def __init__(self, app: ASGIApp, *, key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            refusal = HttpError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(refusal, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if route_path(scope) in self._open_paths:
            return True
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = headers.get("x-api-key", "")
        return hmac.compare_digest(given.strip().encode(), self._key)


class CatchErrors:
    """Turns what no handler foresaw into a 500 in the API's shape; innermost: it must be seen."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await error_response(error, scope)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """The client's id if it is fit for headers and logs, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    if 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
