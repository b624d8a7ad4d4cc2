"""`POST /tokenize` and `/detokenize`, shaped as other servers have them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import RequestError
from mistralrs_sdk.server.errors import read_json
from mistralrs_sdk.server.sse import unless_disconnected
from mistralrs_sdk.server.targets import find_target

_TEXT = {"add_special_tokens"}
_CHAT = {"tools", "add_generation_prompt", "enable_thinking", "reasoning_effort"}
_FLAGS = ("add_special_tokens", "add_generation_prompt", "enable_thinking")


def routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def tokenize(request: Request) -> JSONResponse:
    """Return the ids of a text ("prompt"), or of messages as the template renders them."""
    asked = await read_json(request)
    target = await find_target(request, asked)  # an adapter's name will do: its model's tokens
    body = {key: value for key, value in asked.items() if value is not None}
    source = "messages" if "messages" in body else "prompt"
    allowed = _CHAT if source == "messages" else _TEXT
    _check_keys(body, allowed | {source, "model"})
    text = body.get(source)
    wanted = list if source == "messages" else str
    if not isinstance(text, wanted):
        raise RequestError(
            'give "prompt", a text, or "messages", a list of messages, to be tokenized'
        )
    model = request.app.state.model
    options = {key: body[key] for key in allowed & body.keys()}
    if not isinstance(options.get("tools", []), list):
        raise RequestError(f'"tools" ({options["tools"]!r:.80}) must be a list')
    for name in _FLAGS:
        if not isinstance(options.get(name, True), bool):
            raise RequestError(f'"{name}" ({options[name]!r:.80}) must be true or false')
    tokenizing = model.tokenize(text, **options, model_id=target.model_id)
    ids = await unless_disconnected(request, tokenizing)
    limit = model.max_sequence_length(model_id=target.model_id)
    return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids})


async def detokenize(request: Request) -> JSONResponse:
    """Return the text of token ids ("tokens")."""
    asked = await read_json(request)
    target = await find_target(request, asked)
    body = {key: value for key, value in asked.items() if value is not None}
    _check_keys(body, {"tokens", "skip_special_tokens", "model"})
    ids = body.get("tokens")
    if not isinstance(ids, list):
        raise RequestError(f'"tokens" ({ids!r:.80}) must be a list of token ids')
    skip = body.get("skip_special_tokens", False)
    if not isinstance(skip, bool):
        raise RequestError(f'"skip_special_tokens" ({skip!r:.80}) must be true or false')
    model = request.app.state.model
    decoding = model.detokenize(ids, skip_special_tokens=skip, model_id=target.model_id)
    return JSONResponse({"prompt": await unless_disconnected(request, decoding)})


def _check_keys(body: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(body.keys() - known)
    if unknown:
        raise RequestError(
            f"unknown or without effect here: {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(known))}"
        )
