"""What a client is told when something is wrong: statuses, error shapes, checked bodies."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from mistralrs_sdk import (
    AdapterError,
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineDeadError,
    InferenceError,
    Model,
    ModelLoadError,
    QueueFullError,
    RequestError,
    UnsupportedError,
)

logger = logging.getLogger("mistralrs_sdk.server")

RETRY_AFTER_SECONDS = 1
"""What a client is told that found the queue full: places come free with every answer."""

CLIENT_GONE = 499
"""The status that the log shows for a client that left before its answer."""

_DISCARDED = 2**20
"""What is read of a body beyond the limit: many clients read the answer only when all is sent."""

_LONG_NUMBER = re.compile(rb"\d{300}")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"


class HttpError(Exception):
    """An answer other than 200 that the server itself gives.

    `code` is for programs ("model_not_found"), `param` names the field that is at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def as_http_error(exc: BaseException) -> HttpError:
    """Return what a client is told about an exception; one nobody foresaw is logged, and a 500."""
    if isinstance(exc, HttpError):
        return exc
    message = str(exc)
    if isinstance(exc, AdapterError):
        missing = exc.kind in ("not_found", "generation_not_found")
        return HttpError(404 if missing else 400, message, code=exc.kind, param="adapter")
    if isinstance(exc, RequestError | ConfigError):
        return HttpError(400, message)
    if isinstance(exc, QueueFullError):
        later = {"retry-after": str(RETRY_AFTER_SECONDS)}
        return HttpError(429, message, code="queue_full", headers=later)
    if isinstance(exc, EngineDeadError):
        return HttpError(503, message, code="engine_dead")
    if isinstance(exc, EngineClosedError):
        return HttpError(503, message, code="model_unloaded")
    if isinstance(exc, UnsupportedError):
        return HttpError(400, message, code="unsupported")
    if isinstance(exc, ModelLoadError):
        return HttpError(503, message, code="model_not_loaded")
    if isinstance(exc, DeadlineError):
        # clients would ask again by themselves, and wait as long again
        once = {"x-should-retry": "false"}
        return HttpError(504, message, code="deadline_exceeded", headers=once)
    if isinstance(exc, InferenceError):
        return HttpError(500, message, code="inference_failed")
    if isinstance(exc, ClientDisconnect):
        return HttpError(CLIENT_GONE, "the client left before its answer")
    logger.error("a request failed unexpectedly", exc_info=exc)
    return HttpError(500, f"internal error: {type(exc).__name__}; the server's log has more")


def error_body(exc: BaseException) -> dict[str, Any]:
    """Return OpenAI's error object for an exception, with the answer as far as it had come."""
    return _body(as_http_error(exc), exc)


def anthropic_error_body(exc: BaseException) -> dict[str, Any]:
    """Return Anthropic's error object for an exception."""
    error = as_http_error(exc)
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(exc: BaseException, scope: Scope) -> JSONResponse:
    """Return the response for an exception, in the shape of the API that was asked."""
    error = as_http_error(exc)
    path = route_path(scope)
    anthropic = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    body = anthropic_error_body(error) if anthropic else _body(error, exc)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def route_path(scope: Scope) -> str:
    """Return the path that was asked for, without that of the app this one is mounted in."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def error_type(status: int) -> str:
    """Return OpenAI's name for the kind of error a status stands for."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


async def read_json(request: Request, limit: int | None = None) -> dict[str, Any]:
    """Read a body that must be a JSON object, of at most `limit` bytes.

    None is the limit of the app's settings.

    Raises:
        HttpError: 413 it is longer, 400 it is no JSON object, or holds text that is no Unicode.
        ClientDisconnect: the client left meanwhile.
    """
    most: int = request.app.state.settings.max_body_bytes if limit is None else limit
    body = await read_body(request, most)
    try:
        whole = _whole if _LONG_NUMBER.search(body) else int  # a call for each takes its time
        data = json.loads(
            body, parse_constant=_refuse_constant, parse_float=_finite, parse_int=whole
        )
        if b"\\u" in body:  # half a surrogate pair passes as JSON and fails wherever it is encoded
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise HttpError(400, "the body is not UTF-8, or holds half of a surrogate pair") from None
    except ValueError as error:
        raise HttpError(400, f"the body is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise HttpError(400, f"the body must be a JSON object, not {_KINDS[type(data)]}")
    return data


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes.

    Raises:
        HttpError: 413 it is longer.
        ClientDisconnect: the client left meanwhile.
    """
    text = request.headers.get("content-length", "")
    announced = int(text) if text.isdecimal() else 0
    parts: list[bytes] = []
    size = 0
    if announced <= limit + _DISCARDED:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > limit + _DISCARDED:
                break
    request.state.body_bytes = size
    if max(size, announced) > limit:
        # what may still be on its way would be taken for the next request
        raise HttpError(
            413, f"the body has more than {limit} bytes", headers={"connection": "close"}
        )
    return b"".join(parts)


def known_model(model: Model, name: object) -> str | None:
    """Return the model a request names, None where it names none.

    Raises:
        HttpError: 404 there is no such model, 400 it is no name.
    """
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise HttpError(400, f'"model" ({name!r:.80}) must be the id of a model', param="model")
    try:
        model.inner(model_id=name)
    except EngineClosedError:
        return name  # known, and not loaded now
    except RequestError as error:
        raise HttpError(404, str(error), code="model_not_found", param="model") from None
    return name


_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _body(error: HttpError, exc: BaseException) -> dict[str, Any]:
    told: dict[str, Any] = {
        "message": error.message,
        "type": error_type(error.status),
        "param": error.param,
        "code": error.code,
    }
    partial = getattr(exc, "partial_response", None)
    if partial is not None and hasattr(partial, "to_dict"):
        told["partial_response"] = partial.to_dict()
    return {"error": told}


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # it could not be written as JSON again, in an answer or a prompt
        raise ValueError(f"{text:.80} is too large a number")
    return number


def _whole(text: str) -> int:
    """A whole number that a float can be made of, as is done with most."""
    if len(text) > sys.float_info.max_10_exp:
        raise ValueError(f"{text:.20}... is too large a number")
    return int(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
