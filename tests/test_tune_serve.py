"""From `tune` to a server: the config that one process writes is what another one serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator

import httpx2

from tests.model_helpers import tiny_folder

COMMAND = (sys.executable, "-c", "import sys; from mistralrs_sdk.cli import main; sys.exit(main())")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


async def tuned(*flags: str) -> dict:
    """What `tune` says in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "tune", *flags, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRON,
    )
    printed, said = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode == 0, said.decode()
    return json.loads(printed)


@contextlib.asynccontextmanager
async def served(*flags: str) -> AsyncIterator[str]:
    """The address of `serve` in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "serve", "--port", "0", *flags), stderr=asyncio.subprocess.PIPE, env=ENVIRON
    )
    assert process.stderr is not None
    try:
        said = ""
        while not (match := re.search(r"http://\S+", said)):
            line = await asyncio.wait_for(process.stderr.readline(), timeout=60)
            assert line, f"it ended: {said}"
            said += line.decode()
        yield match.group()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_what_tune_recommends_is_what_then_runs(tmp_path):
    """The server that gets the config answers, and says that it runs with these settings."""
    file, place = tmp_path / "serve.toml", str(tiny_folder("llama_tied"))
    flags = ("--cpu", "--num-threads", "1", "--max-seqs", "3", "--pa-block-size", "16")

    told = await tuned("-m", place, *flags, "--emit-config", str(file))
    async with (
        served("--config", str(file)) as url,
        httpx2.AsyncClient(base_url=url, timeout=60) as http,
    ):
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = await http.post("/v1/chat/completions", json=asked | {"ignore_eos": True})
        (model,) = (await http.get("/v1/system/info")).json()["models"]

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    chosen = next(c for c in told["candidates"] if c["isq"] == told["recommended"])
    shown = {name: setting["value"] for name, setting in model["settings"].items()}
    assert shown["isq"] == str(told["recommended"])
    assert model["settings"]["weights"]["origin"].startswith(f"{chosen['weights']};")
    assert (shown["num_threads"], shown["max_num_seqs"], shown["device"]) == ("1", "3", "cpu")
    assert shown["max_model_len"] == str(chosen["context"])
    assert shown["KV cache"].startswith(f"{chosen['kv_tokens'] // 16} blocks of 16 ")
