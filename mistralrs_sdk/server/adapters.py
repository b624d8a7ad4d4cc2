"""LoRA adapters over HTTP: list them, and where the server allows it load and unload them."""

from __future__ import annotations

from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import (
    AdapterError,
    LoraAdapterInfo,
    LoraAdapterLoadPolicy,
    Model,
    ModelLoadError,
)
from mistralrs_sdk.server.errors import HttpError, known_model, read_json
from mistralrs_sdk.server.sse import unless_disconnected
from mistralrs_sdk.server.targets import label_model
from mistralrs_sdk.server.translation import check_keys

_CONFLICTS = (
    *("runtime_unavailable", "already_loaded", "generation_mismatch"),
    *("adapter_limit", "byte_limit"),
)
"""What is wrong with the state of the server, not with the request."""

_UNLOADING = ("lora_name", "expected_generation", "model")
_LOADING = (*_UNLOADING, "lora_path", "revision", "load_inplace")


def routes(*, may_change: bool) -> list[Route]:
    """The routes of this module; those that change something only if they may."""
    listing = [Route("/v1/lora_adapters", list_adapters, methods=["GET"])]
    if not may_change:
        return listing
    return [
        *listing,
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    ]


async def list_adapters(request: Request) -> JSONResponse:
    """List the adapters of a model (`?model=`), what they take, and the limits."""
    model: Model = request.app.state.model
    model_id = known_model(model, request.query_params.get("model"))
    label_model(request, model_id)
    try:
        status = await model.lora_adapter_status(model_id=model_id)
    except AdapterError as error:
        raise _told(error) from error
    return JSONResponse(
        {
            "object": "list",
            "data": [_entry(info) for info in status.adapters],
            "generations": [attrs.asdict(each) for each in status.generations],
            "resident_bytes": status.resident_bytes,
            "limits": attrs.asdict(status.limits),
        }
    )


async def load_adapter(request: Request) -> JSONResponse:
    """Load an adapter under a name, in place of another of that name if that is asked for."""
    body = await read_json(request)
    check_keys(body, known=_LOADING, refused={})
    alias, model_id = _named(request, body)
    source = body.get("lora_path")
    if not isinstance(source, str) or not source:
        raise HttpError(
            400,
            f'"lora_path" ({source!r:.80}) must be a folder or a Hugging Face id',
            param="lora_path",
        )
    revision = _text(body, "revision")
    model: Model = request.app.state.model
    try:
        loading = model.load_lora_adapter(
            alias, source, revision=revision, policy=_policy(body), model_id=model_id
        )
        info = await unless_disconnected(request, loading)
    except AdapterError as error:
        raise _told(error) from error
    except ModelLoadError as error:  # the adapter's files are at fault
        raise HttpError(400, str(error), code="adapter_not_loaded", param="lora_path") from error
    return JSONResponse(_entry(info))


async def unload_adapter(request: Request) -> JSONResponse:
    """Take an adapter's name away; requests that run go on with it."""
    body = await read_json(request)
    check_keys(body, known=_UNLOADING, refused={})
    alias, model_id = _named(request, body)
    generation = _text(body, "expected_generation")
    model: Model = request.app.state.model
    try:
        info = await model.unload_lora_adapter(alias, generation=generation, model_id=model_id)
    except AdapterError as error:
        raise _told(error) from error
    return JSONResponse(_entry(info))


def _named(request: Request, body: dict[str, Any]) -> tuple[str, str | None]:
    alias = body.get("lora_name")
    if not isinstance(alias, str) or not alias:
        raise HttpError(
            400, f'"lora_name" ({alias!r:.80}) must be the name of an adapter', param="lora_name"
        )
    model_id = known_model(request.app.state.model, body.get("model"))
    label_model(request, model_id)
    return alias, model_id


def _policy(body: dict[str, Any]) -> LoraAdapterLoadPolicy | None:
    in_place = body.get("load_inplace")
    if in_place is not None and not isinstance(in_place, bool):
        raise HttpError(
            400, f'"load_inplace" ({in_place!r:.80}) must be true or false', param="load_inplace"
        )
    expected = _text(body, "expected_generation")
    if expected is not None:
        return LoraAdapterLoadPolicy.CompareAndSwap(expected)
    return LoraAdapterLoadPolicy.Upsert() if in_place else None


def _text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise HttpError(400, f'"{key}" ({value!r:.80}) must be a text', param=key)
    return value


def _told(error: AdapterError) -> HttpError | AdapterError:
    if error.kind in _CONFLICTS:
        return HttpError(409, str(error), code=error.kind)
    return error


def _entry(info: LoraAdapterInfo) -> dict[str, Any]:
    return {"lora_name": info.alias, "lora_path": info.source, **attrs.asdict(info)}
