"""Which model, and which adapter of it, a request is for."""

from __future__ import annotations

from typing import Any

import attrs
from starlette.requests import Request

from mistralrs_sdk import MistralRsError, Model
from mistralrs_sdk.server.errors import HttpError, known_model


@attrs.frozen
class Target:
    """The model a request is for."""

    model_id: str | None
    """For the methods of `Model`; None is the default one."""
    shown: str
    """What the answer calls it: as the request did, or by its id."""
    body: dict[str, Any]
    """The request; if it named an adapter as its model, that is under "adapter" now."""


async def find_target(request: Request, body: dict[str, Any]) -> Target:
    """Find the model that a body names; the name of an adapter of the default one will do.

    Raises:
        HttpError: 404 there is none of that name, 400 it is no name.
    """
    model: Model = request.app.state.model
    name = body.get("model")
    try:
        model_id = known_model(model, name)
    except HttpError as error:
        if error.status != 404 or not await _is_adapter(model, name):
            request.state.model = "unknown"  # a label for every wrong name would never end
            raise
        if body.get("adapter") not in (None, name):
            raise HttpError(
                400,
                f'"model" ({name!r}) is an adapter and "adapter" ({body["adapter"]!r:.80}) names '
                "another: give one",
                param="adapter",
            ) from None
        label_model(request, None)
        rest = {key: value for key, value in body.items() if key != "model"}
        return Target(None, str(name), {**rest, "adapter": name})
    shown = label_model(request, model_id)
    return Target(model_id, shown, body)


def label_model(request: Request, model_id: str | None) -> str:
    """Note for metrics and log which model a request is for; returns the name to show."""
    if model_id is None or model_id == "default":
        model_id = str(request.app.state.model.get_default_model_id())
    request.state.model = model_id
    return model_id


async def _is_adapter(model: Model, name: object) -> bool:
    if not model.is_model_loaded():
        return False
    try:
        return any(info.alias == name for info in await model.list_lora_adapters())
    except MistralRsError:  # the default model embeds, or has ended
        return False
