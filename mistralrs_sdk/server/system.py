"""The machine and the settings over HTTP, and `doctor` and `tune` where the server allows them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import sys
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import EngineClosedError, Model, RequestError, __version__
from mistralrs_sdk.server.errors import HttpError, read_json
from mistralrs_sdk.server.sse import unless_disconnected
from mistralrs_sdk.server.translation import check_keys, invalid, switch, text, whole

COMMAND = (sys.executable, "-c", "import sys; from mistralrs_sdk.cli import main; sys.exit(main())")
"""What runs a command of `mistralrs-sdk`, the arguments being added."""

DIAGNOSIS_SECONDS = 600.0
"""How long such a command may take."""

_TEXT_FLAGS = {
    "model_id": "model-id",
    "dtype": "dtype",
    "profile": "profile",
    "hf_revision": "hf-revision",
}
_NUMBER_FLAGS = {"max_seq_len": "max-model-len", "max_batch_size": "max-seqs"}
"""Keys of a request to tune, and the flags of the command that they are."""

_REFUSED = {
    "max_image_length": "models here read text",
    "max_num_images": "models here read text",
    "requested_isq": "all types are compared; see the one you want among the candidates",
    "token_source": "the token of the server is used",
}


def routes(*, may_diagnose: bool) -> list[Route]:
    """The routes of this module; those that start a process only if they may."""
    found = [Route("/v1/system/info", show_info, methods=["GET"])]
    if not may_diagnose:
        return found
    turn = asyncio.Lock()  # two at once would measure each other

    async def doctor(request: Request) -> JSONResponse:
        """Check the machine, as the command does."""
        return JSONResponse(await unless_disconnected(request, _report(turn, "doctor")))

    async def tune(request: Request) -> JSONResponse:
        """Compare ways to keep a model's weights, as the command does."""
        flags = _tune_flags(await read_json(request))
        return JSONResponse(await unless_disconnected(request, _report(turn, "tune", *flags)))

    return [
        *found,
        Route("/v1/system/doctor", doctor, methods=["POST"]),
        Route("/v1/models/tune", tune, methods=["POST"]),
    ]


async def show_info(request: Request) -> JSONResponse:
    """Return what runs here: versions, CPUs, and settings and MCP tools of models in memory."""
    model: Model = request.app.state.model
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return JSONResponse(
        {
            "version": __version__,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "cpus": allowed,
            "default_model": model.get_default_model_id(),
            "models": [
                {
                    "id": id,
                    "status": status.value,
                    "settings": _settings(model, id),
                    "mcp_tools": _mcp_tools(model, id),
                }
                for id, status in model.list_models_with_status()
            ],
        }
    )


def _settings(model: Model, id: str) -> dict[str, dict[str, str]] | None:
    """Each setting with its value and where it came from; None: it is not loaded."""
    try:
        lines = model.describe(model_id=id).splitlines()
    except EngineClosedError:
        return None
    rows = [[*re.split(r"\s{2,}", line, maxsplit=2), "", ""] for line in lines]
    return {name: {"value": value, "origin": origin} for name, value, origin, *_ in rows}


def _mcp_tools(model: Model, id: str) -> list[dict[str, Any]]:
    try:
        return [attrs.asdict(tool) for tool in model.list_mcp_tools(model_id=id)]
    except (EngineClosedError, RequestError):  # it is not loaded, or embeds
        return []


def _tune_flags(body: dict[str, Any]) -> list[str]:
    """The flags of the command, each with its value in one word: no value can become a flag."""
    known = (*_TEXT_FLAGS, *_NUMBER_FLAGS, "cpu")
    given = check_keys(body, known=known, refused=_REFUSED)
    if not given.get("model_id"):
        raise invalid("model_id", "is missing: give a Hugging Face id, a folder or a .gguf file")
    named = {**_TEXT_FLAGS, **_NUMBER_FLAGS}
    flags = [
        f"--{flag}={(text if key in _TEXT_FLAGS else whole)(key, given[key])}"
        for key, flag in named.items()
        if key in given
    ]
    if any("\0" in flag for flag in flags):
        raise HttpError(400, "a text holds a zero byte, which no file and no model has in its name")
    return [*flags, *(["--cpu"] if switch("cpu", given.get("cpu", False)) else [])]


async def _report(turn: asyncio.Lock, command: str, *flags: str) -> dict[str, Any]:
    """What a command printed as JSON.

    It runs in a process of its own: it sets numbers of threads, takes memory, and may die of a
    kernel for another CPU. The process ends with whoever waits for it.
    """
    async with turn:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, command, *flags, "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # what it starts itself ends with it
        )
        try:
            async with asyncio.timeout(DIAGNOSIS_SECONDS):
                printed, said = await process.communicate()
        except TimeoutError:
            late = f"{command} gave no result within {DIAGNOSIS_SECONDS:g} s"
            raise HttpError(504, late, code="deadline_exceeded") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if printed:  # of doctor, a failure that was found is a result too
        return json.loads(printed)
    lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    reason = lines[-1].partition("error: ")[2] or lines[-1]
    if process.returncode in (1, 2):
        raise HttpError(400, reason, code=f"{command}_failed")
    raise HttpError(
        500, f"{command} ended with status {process.returncode}: {reason}", code=f"{command}_failed"
    )
