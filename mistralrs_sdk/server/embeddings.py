"""`POST /v1/embeddings`: vectors as numbers or base64."""

from __future__ import annotations

import base64
import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import EmbeddingRequest, RequestError
from mistralrs_sdk.server.errors import read_json
from mistralrs_sdk.server.sse import unless_disconnected
from mistralrs_sdk.server.targets import find_target

_KNOWN = (
    *("input", "model", "encoding_format", "dimensions", "user"),
    *("truncate_sequence", "prompt_name"),
)


def routes() -> list[Route]:
    """The routes of this module."""
    return [Route("/v1/embeddings", create_embeddings, methods=["POST"])]


async def create_embeddings(request: Request) -> JSONResponse:
    """Embed texts or token ids in OpenAI's shape."""
    target = await find_target(request, await read_json(request))
    body = {key: value for key, value in target.body.items() if value is not None}
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(f'"encoding_format" ({form!r:.80}) must be "float" or "base64"')
    embedding = request.app.state.model.send_embedding_request(
        _asked(body), model_id=target.model_id
    )
    response = await unless_disconnected(request, embedding)
    if form == "float":
        return JSONResponse({**response.to_dict(), "model": target.shown})
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector)}
        for index, vector in enumerate(response.vectors)
    ]
    usage = {"prompt_tokens": response.prompt_tokens, "total_tokens": response.total_tokens}
    return JSONResponse({"object": "list", "data": data, "model": target.shown, "usage": usage})


def _asked(body: dict[str, Any]) -> EmbeddingRequest:
    unknown = sorted(body.keys() - set(_KNOWN))
    if unknown:
        raise RequestError(
            f"unknown in an embedding request: {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(_KNOWN)}"
        )
    given = body.get("input")
    builder = EmbeddingRequest.builder()
    if isinstance(given, str):
        builder = builder.add_prompt(given)
    elif isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        builder = builder.add_tokens(given)
    elif isinstance(given, list):
        for item in given:
            builder = (
                builder.add_prompt(item) if isinstance(item, str) else builder.add_tokens(item)
            )
    else:
        raise RequestError(
            f'"input" ({given!r:.80}) must be a text, a list of texts, token ids, or a list of '
            "those"
        )
    if "dimensions" in body:
        builder = builder.with_dimensions(body["dimensions"])
    if "truncate_sequence" in body:
        builder = builder.with_truncate_sequence(body["truncate_sequence"])
    return builder.with_prompt_name(body.get("prompt_name")).build()


def _base64(vector: Any) -> str:
    """A vector as OpenAI sends it: float32, little-endian."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
