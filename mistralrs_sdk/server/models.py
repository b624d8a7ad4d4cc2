"""The models of a server: list, look, unload, load again, and quantise anew."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import MistralRsError, Model, ModelStatus
from mistralrs_sdk.server.errors import HttpError, known_model, read_json
from mistralrs_sdk.server.sse import unless_disconnected
from mistralrs_sdk.server.targets import label_model
from mistralrs_sdk.server.translation import check_keys


def routes() -> list[Route]:
    """The routes of this module."""
    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/unload", unload_model, methods=["POST"]),
        Route("/v1/models/reload", reload_model, methods=["POST"]),
        Route("/v1/models/status", model_status, methods=["POST"]),
        Route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"]),
        Route("/re_isq", re_isq, methods=["POST"]),
    ]


async def list_models(request: Request) -> JSONResponse:
    """List "default", then every model with its status, then the LoRA adapters."""
    return JSONResponse({"object": "list", "data": await _entries(request)})


async def retrieve_model(request: Request) -> JSONResponse:
    """Describe one model, by its id, another name it is known by, or an adapter's alias."""
    name = request.path_params["model_id"]
    entries = {entry["id"]: entry for entry in await _entries(request)}
    if name in entries:
        return JSONResponse(entries[name])
    model: Model = request.app.state.model
    known_model(model, name)
    same = [entry for entry in entries.values() if _is_same(model, entry["id"], name)]
    if same:
        return JSONResponse({**same[-1], "id": name})
    return JSONResponse(_entry(request, name, ModelStatus.UNLOADED))


async def unload_model(request: Request) -> JSONResponse:
    """Free a model's memory; the next request for it loads it again."""
    name = await _asked_model(request)
    await request.app.state.model.unload_model(name)
    return JSONResponse(_status(request, name))


async def reload_model(request: Request) -> JSONResponse:
    """Load a model that was unloaded, and wait for it."""
    name = await _asked_model(request)
    # leaving ends the waiting, not the load
    await unless_disconnected(request, request.app.state.model.reload_model(name))
    return JSONResponse(_status(request, name))


async def model_status(request: Request) -> JSONResponse:
    """Say whether a model is loaded, unloaded or reloading."""
    return JSONResponse(_status(request, await _asked_model(request)))


async def re_isq(request: Request) -> JSONResponse:
    """Quantise the weights of a running model to another type, and wait for it."""
    body = await read_json(request)
    check_keys(body, known=("ggml_type", "model"), refused={})
    model: Model = request.app.state.model
    model_id = known_model(model, body.get("model"))
    shown = label_model(request, model_id)
    wanted = body.get("ggml_type")
    if not isinstance(wanted, str | int) or isinstance(wanted, bool):
        raise HttpError(
            400,
            f'"ggml_type" ({wanted!r:.80}) must be a type such as "Q4K", or a number of bits',
            param="ggml_type",
        )
    await model.re_isq_model(wanted, model_id=model_id)
    return JSONResponse({"model": shown, "ggml_type": wanted})


async def _asked_model(request: Request) -> str:
    """The model that the body names under "model_id"."""
    body = await read_json(request)
    check_keys(body, known=("model_id",), refused={})
    name = body.get("model_id")
    if name is None:
        raise HttpError(400, '"model_id" is missing: give the id of a model', param="model_id")
    found = known_model(request.app.state.model, name)
    label_model(request, found)
    return str(found)


def _status(request: Request, name: str) -> dict[str, Any]:
    model: Model = request.app.state.model
    statuses = dict(model.list_models_with_status())
    canonical = model.get_default_model_id() if name == "default" else name
    status = statuses.get(canonical)
    if status is None:  # another name of one of them
        loaded = model.is_model_loaded(name)
        status = ModelStatus.LOADED if loaded else ModelStatus.UNLOADED
    return {"model_id": name, "status": status.value}


async def _entries(request: Request) -> list[dict[str, Any]]:
    model: Model = request.app.state.model
    statuses = model.list_models_with_status()
    default = model.get_default_model_id()
    entries = [_entry(request, id, status) for id, status in statuses]
    first = dict(entries[[id for id, _ in statuses].index(default)])
    adapters = []
    for id, status in statuses:
        if status is ModelStatus.LOADED:
            adapters += await _adapters(request, id)
    taken = {entry["id"] for entry in entries}
    if "default" not in taken:
        entries.insert(0, {**first, "id": "default"})
    return entries + [entry for entry in adapters if entry["id"] not in taken]


def _entry(request: Request, id: str, status: ModelStatus) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": id,
        "object": "model",
        "created": request.app.state.started,
        "owned_by": "local",
        "status": status.value,
    }
    model: Model = request.app.state.model
    if model.is_model_loaded(id):
        entry["max_model_len"] = model.max_sequence_length(model_id=id)
    return entry


async def _adapters(request: Request, model_id: str) -> list[dict[str, Any]]:
    try:
        infos = await request.app.state.model.list_lora_adapters(model_id=model_id)
    except MistralRsError:  # it embeds, or has gone meanwhile
        return []
    return [
        {
            "id": info.alias,
            "object": "model",
            "created": request.app.state.started,
            "owned_by": "local",
            "status": ModelStatus.LOADED.value,
            "parent": model_id,
        }
        for info in infos
    ]


def _is_same(model: Model, id: str, name: str) -> bool:
    try:
        return model.inner(model_id=id) is model.inner(model_id=name)
    except MistralRsError:  # not loaded
        return False


def now() -> int:
    """The time an app was made, which stands for when its models were."""
    return int(time.time())
