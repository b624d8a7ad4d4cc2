"""The web page at `/`: its files, the headers that fence it in, and the numbers of its panel."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import EngineClosedError, Model, RequestError
from mistralrs_sdk.server.errors import HttpError, known_model

PAGE = "index.html"
ASSETS = {
    "api.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "live.js": "text/javascript",
    "markdown.js": "text/javascript",
    "messages.js": "text/javascript",
    "page.css": "text/css",
    "page.js": "text/javascript",
}
"""What the page consists of, and the types its parts are sent as."""

PUBLIC_PATHS = frozenset({"/", "/ui", *(f"/ui/{name}" for name in ASSETS)})
"""Paths that need no API key: a person must see the page to be asked for one."""

STATS_PATH = "/v1/system/stats"
"""What the page's panel asks for every second; it needs the API key, if there is one."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("connect", "img", "script", "style")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
        # text of a model cannot become markup, not even by a mistake in the scripts
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only this server's own files run or load; nothing inline, nothing from elsewhere, no frames."""

_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-cache",  # asked for every time, and answered with 304 by the tag
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[Route]:
    """Return the routes of the page: `/` and `/ui`, its files, and the numbers of a model.

    All addresses in the page are relative, so it works where the app is mounted, too.
    """
    page = _read(PAGE, "text/html")
    assets = {name: _read(name, type) for name, type in ASSETS.items()}

    async def show_page(request: Request) -> Response:
        return page.response(request)

    async def show_asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            raise HttpError(404, f"the page has no file {name!r}")
        return assets[name].response(request)

    return [
        Route("/", show_page),
        Route("/ui", show_page),
        Route("/ui/{name}", show_asset),
        Route(STATS_PATH, show_stats),
    ]


async def show_stats(request: Request) -> Response:
    """Answer what the model `?model=` is doing right now; without a name, the default one."""
    model: Model = request.app.state.model
    name = known_model(model, request.query_params.get("model") or None)
    return JSONResponse(await _stats(model, name or model.get_default_model_id()))


@attrs.frozen
class _File:
    """A part of the page, as it is sent."""

    content: bytes
    type: str
    tag: str

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.type, headers=headers)


def _read(name: str, type: str) -> _File:
    content = files("mistralrs_sdk.server").joinpath("web", name).read_bytes()
    return _File(content, type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def _adapters(model: Model, id: str) -> list[str]:
    try:
        return [info.alias for info in await model.list_lora_adapters(model_id=id)]
    except RequestError:
        return []  # it embeds


async def _stats(model: Model, id: str) -> dict[str, Any]:
    try:
        metrics = await model.metrics(model_id=id)
        context = model.max_sequence_length(model_id=id)
        adapters = await _adapters(model, id)
    except EngineClosedError:
        return {"model": id, "loaded": False}  # the next request for it loads it
    return {
        "model": id,
        "loaded": True,
        "context": context,
        "adapters": adapters,
        "running": metrics.running,
        "waiting": metrics.waiting,
        "capacity": metrics.capacity,
        "blocks_used": metrics.blocks_used,
        "blocks_total": metrics.blocks_total,
        "prefix_lookups": metrics.prefix_lookups,
        "prefix_hits": metrics.prefix_hits,
        "preemptions": metrics.preemptions,
        "tokens_processed": metrics.tokens_processed,
    }
