"""`create_app`: the Starlette application that serves a `Model`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mistralrs_sdk import MistralRsError, Model
from mistralrs_sdk.server import (
    adapters,
    anthropic_api,
    approvals,
    chat,
    completions,
    embeddings,
    metrics,
    models,
    openapi,
    responses_api,
    sessions,
    system,
    tokens,
    web_page,
)
from mistralrs_sdk.server.errors import HttpError, error_response, route_path
from mistralrs_sdk.server.middleware import CatchErrors, Observe, RequireKey
from mistralrs_sdk.server.origins import RefuseForeignNames, RefuseForeignPages
from mistralrs_sdk.server.responses_store import ResponsesStore
from mistralrs_sdk.server.settings import ServerSettings

_OPEN_PATHS = frozenset({"/", "/health", "/docs", "/openapi.json", "/api-doc/openapi.json"})
"""What needs no key: nothing there is secret, and probes and browsers cannot send one."""


def create_app(model: Model, *, settings: ServerSettings | None = None) -> Starlette:
    """Return an ASGI app that serves a model over HTTP, as OpenAI's and Anthropic's APIs.

    Run it with any ASGI server in the event loop the model was built in, or mount it in another
    app. It does not close the model. `settings` defaults to `ServerSettings()`; what concerns
    listening (host, port, draining) is for who runs it. A mounted app has no lifespan: call
    `await app.state.responses.aclose()` at the end if responses were made in the background.
    """
    settings = settings or ServerSettings()
    counted = metrics.ServerMetrics()
    responses = ResponsesStore()
    waiting = approvals.WaitingCalls()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await responses.aclose()

    app = Starlette(
        routes=_routes(settings, responses, waiting),
        lifespan=lifespan,
        middleware=_middleware(settings, counted),
        exception_handlers={
            kind: _answer_error
            for kind in (HttpError, HTTPException, MistralRsError, ClientDisconnect)
        },
    )
    app.state.model = model
    app.state.settings = settings
    app.state.metrics = counted
    app.state.responses = responses
    app.state.approvals = waiting
    app.state.started = models.now()
    return app


def _routes(
    settings: ServerSettings, responses: ResponsesStore, waiting: approvals.WaitingCalls
) -> list[Route]:
    page = web_page.routes() if settings.web_page else [Route("/", _say_ok, methods=["GET"])]
    return [
        *page,
        *chat.routes(),
        *completions.routes(),
        *responses_api.routes(responses),
        *anthropic_api.routes(),
        *embeddings.routes(),
        *tokens.routes(),
        *adapters.routes(may_change=settings.allow_runtime_adapters),
        *sessions.routes(),
        *approvals.routes(waiting),
        *system.routes(may_diagnose=settings.allow_diagnostics),
        *models.routes(),
        *metrics.routes(metrics=settings.metrics),
        *(openapi.routes() if settings.docs else []),
    ]


def _middleware(settings: ServerSettings, counted: metrics.ServerMetrics) -> list[Middleware]:
    """From the outermost to the innermost."""
    layers = [Middleware(Observe, settings=settings, begun=counted.begun, ended=counted.ended)]
    if settings.cors_origins:  # before the key: a browser asks for permission without one
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["retry-after", "x-request-id", "x-should-retry"],
                allow_private_network=True,
            )
        )
    layers.append(Middleware(CatchErrors))
    if settings.allowed_hosts is not None:
        layers.append(Middleware(RefuseForeignNames, allowed_hosts=settings.allowed_hosts))
    if settings.api_key is None:
        # no browser adds a key by itself, as it does cookies: who sends one means it
        layers.append(Middleware(RefuseForeignPages, cors_origins=settings.cors_origins))
    else:
        open_paths = _OPEN_PATHS | (web_page.PUBLIC_PATHS if settings.web_page else frozenset())
        layers.append(Middleware(RequireKey, key=settings.api_key, open_paths=open_paths))
    return layers


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # Starlette's own: no such path, or not this method
        what = f"{request.method} {request.url.path}"
        hint = "/docs lists what there is" if request.app.state.settings.docs else "check the path"
        headers = {"allow": _allowed(request)} if error.status_code == 405 else error.headers
        error = HttpError(error.status_code, f"{error.detail}: {what}; {hint}", headers=headers)
    return error_response(error, request.scope)


def _allowed(request: Request) -> str:
    """The methods of a path; Starlette tells those of its first route only."""
    path = route_path(request.scope)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    first = next(route for route in routes if route.path_regex.match(path))
    found = [route.methods or () for route in routes if route.path == first.path]
    return ", ".join(sorted(set().union(*found)))


async def _say_ok(request: Request) -> Response:
    return PlainTextResponse("OK")
