"""A server on a real socket, and models to put behind it, for the APIs that are translated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn

from mistralrs_sdk import MemoryGpuConfig, Model, ModelBuilder, PagedAttentionMetaBuilder
from mistralrs_sdk.server import ServerSettings, create_app
from tests.checkpoint_files import change_json
from tests.scripted_rounds import Say, ScriptedStream
from tests.tiny_models import tiny_checkpoint

LONG = 20_000
"""Tokens the context of `long_model` holds: more than any test waits for."""


@contextlib.asynccontextmanager
async def serving(model: Model, settings: ServerSettings | None = None) -> AsyncIterator[str]:
    """Serve a model; gives the URL."""
    app = create_app(model, settings=settings or ServerSettings(access_log=None))
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", log_level="warning")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await app.state.responses.aclose()
        server.should_exit = True
        await task


async def long_model(folder: Path) -> Model:
    """A tiny model that talks until it is stopped, if it is asked to ignore its end."""
    path = tiny_checkpoint("llama", folder)
    change_json(path / "config.json", max_position_embeddings=LONG)
    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(LONG))
    builder = ModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("f32")
    return await builder.with_paged_attn(paged.build()).build()


def answering(model: Model, say: Say, monkeypatch: Any) -> list[Any]:
    """Let a model answer as it is told; returns what it is asked, as that comes."""
    asked: list[Any] = []

    async def stream(request: Any, *, model_id: str | None = None) -> ScriptedStream:
        asked.append(request)
        return ScriptedStream(say, "chat-1")

    monkeypatch.setattr(model, "stream_chat_request", stream)
    return asked
