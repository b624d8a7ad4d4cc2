"""The HTTP server: `create_app(model)` makes an ASGI app; needs the extra `server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mistralrs_sdk.server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from mistralrs_sdk import Model

__all__ = ["ServerSettings", "create_app"]


def create_app(model: Model, *, settings: ServerSettings | None = None) -> Starlette:
    """Return an ASGI app that serves a model over HTTP, as OpenAI's and Anthropic's APIs.

    Run it with any ASGI server in the event loop the model was built in, or mount it in another
    app. It does not close the model. `settings` defaults to `ServerSettings()`; what concerns
    listening (host, port, draining) is for who runs it.

    Raises:
        ImportError: the extra is not installed.
    """
    try:
        from mistralrs_sdk.server.app import create_app as make
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "prometheus_client"):
            raise
        raise ImportError(
            f"the server needs {error.name}: pip install 'mistralrs_sdk[server]'"
        ) from error
    return make(model, settings=settings)
