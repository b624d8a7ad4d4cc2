"""Sessions over HTTP: export, import and delete the turns that a server keeps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import Model, RequestError
from mistralrs_sdk.server.errors import HttpError, known_model, read_json
from mistralrs_sdk.server.targets import label_model

MAX_SESSION_BYTES = 4 * 2**20
"""The longest session that can be imported: more text than a context holds, and many are kept."""


def routes() -> list[Route]:
    """The routes of this module."""
    path = "/v1/sessions/{session_id}"
    return [
        Route(path, export_session, methods=["GET"]),
        Route(path, import_session, methods=["PUT"]),
        Route(path, delete_session, methods=["DELETE"]),
    ]


async def export_session(request: Request) -> JSONResponse:
    """Return the complete turns of a session."""
    session_id, model_id = _named(request)
    try:
        session = _model(request).export_session(session_id, model_id=model_id)
    except RequestError as error:
        raise HttpError(404, str(error), code="session_not_found") from None
    return JSONResponse(session.to_dict())


async def import_session(request: Request) -> JSONResponse:
    """Keep turns under an id, in place of what was there."""
    session_id, model_id = _named(request)
    limit = min(MAX_SESSION_BYTES, request.app.state.settings.max_body_bytes)
    session = await read_json(request, limit)
    _model(request).import_session(session_id, session, model_id=model_id)
    return JSONResponse({"session_id": session_id, "imported": True})


async def delete_session(request: Request) -> JSONResponse:
    """Forget a session."""
    session_id, model_id = _named(request)
    if not _model(request).delete_session(session_id, model_id=model_id):
        raise HttpError(404, f"there is no session {session_id!r}", code="session_not_found")
    return JSONResponse({"session_id": session_id, "deleted": True})


def _model(request: Request) -> Model:
    return request.app.state.model


def _named(request: Request) -> tuple[str, str | None]:
    model_id = known_model(_model(request), request.query_params.get("model"))
    label_model(request, model_id)
    return request.path_params["session_id"], model_id
