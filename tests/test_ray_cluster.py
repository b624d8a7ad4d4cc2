"""Two replicas on a one-node Ray cluster, asked by OpenAI's client; skipped without Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx2
import openai
import pytest

from tests.checkpoint_files import change_json
from tests.model_helpers import is_running
from tests.ray_cluster import ROOT
from tests.tiny_models import tiny_checkpoint

pytest.importorskip("ray.serve", exc_type=ImportError)

pytestmark = pytest.mark.timeout(240)  # a cluster starts in half a minute, or more if it is busy

MESSAGES: Any = [{"role": "user", "content": "hello"}]
LONG = 1500


@attrs.frozen
class Cluster:
    """A running program of `tests.ray_cluster`."""

    process: subprocess.Popen[str]
    folder: Path
    url: str

    def alive(self) -> list[int]:
        """The processes of replicas that have a model."""
        found = [int(file.name) for file in self.folder.iterdir() if file.name.isdecimal()]
        return sorted(pid for pid in found if is_running(pid))

    def says(self, word: str) -> None:
        """Wait for a line; whatever else is printed is passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"the cluster ended before it was {word}")

    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's client, which asks each thing once."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("replicas")
    model = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))
    change_json(model / "config.json", max_position_embeddings=4096)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.ray_cluster", str(folder), str(model), str(port)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    with process:
        try:
            cluster = Cluster(process, folder, f"http://127.0.0.1:{port}")
            cluster.says("ready")
            yield cluster
        finally:
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


async def until(true: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.1)


async def stream(client: openai.AsyncOpenAI, begun: asyncio.Event, count: int) -> str:
    """The text of one streamed answer; raises if it has no end."""
    chunks = await client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        max_tokens=count,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, reason = "", None
    async for chunk in chunks:
        begun.set()
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "length", "an answer that was cut off looked whole"
    return text


async def test_two_replicas_answer_the_official_client(cluster):
    """A chat, the list of models, and a stream: each as from one server."""
    assert len(cluster.alive()) == 2
    async with cluster.client() as client:
        models = [model.id async for model in await client.models.list()]
        whole = await client.chat.completions.create(
            model="default", messages=MESSAGES, max_tokens=20, temperature=0
        )
        begun = asyncio.Event()
        streamed = await stream(client, begun, 20)

    assert "default" in models
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 20
    assert streamed.startswith(whole.choices[0].message.content or "")


async def test_a_session_stays_with_its_replica(cluster):
    """The second turn finds the first in the cache, whichever replica that is."""
    prompt: Any = [{"role": "user", "content": "a conversation " * 20}]
    async with cluster.client() as client:
        for session in ("one", "two", "three", "four"):
            cached = [
                (
                    await client.chat.completions.create(
                        model="default",
                        messages=[{"role": "system", "content": session}, *prompt],
                        max_tokens=2,
                        extra_headers={"x-session-id": session},
                    )
                ).usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
                for _ in range(2)
            ]
            assert cached[1] > 0 == cached[0]


async def test_a_stream_that_is_left_is_aborted(cluster):
    """Closing the connection reaches the engine: nothing runs in any replica soon after."""
    async with cluster.client() as client, httpx2.AsyncClient(base_url=cluster.url) as http:
        chunks = await client.chat.completions.create(
            model="default",
            messages=MESSAGES,
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"x-session-id": "left"},
        )
        await anext(aiter(chunks))
        assert await running(http) == 1
        await chunks.close()
        start = time.monotonic()
        while await running(http):
            assert time.monotonic() - start < 2
            await asyncio.sleep(0.05)


async def running(http: httpx2.AsyncClient) -> float:
    """Sequences that run in the replica of that session."""
    metrics = (await http.get("/metrics", headers={"x-session-id": "left"})).text
    found = [line for line in metrics.splitlines() if line.startswith("mistralrs_")]
    (line,) = [line for line in found if line.split("{")[0] == "mistralrs_sequences_running"]
    return float(line.split()[-1])


async def test_a_killed_replica_loses_its_own_streams_only(cluster):
    """They end with an error; those of the other one end whole, and new ones find a place."""
    victim, survivor = cluster.alive()
    async with cluster.client() as client:
        begun = [asyncio.Event() for _ in range(16)]
        tasks = [asyncio.create_task(stream(client, event, LONG)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(victim, signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        whole = [outcome for outcome in outcomes if isinstance(outcome, str)]
        lost = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        after = await asyncio.gather(*(stream(client, asyncio.Event(), 20) for _ in range(8)))

    assert whole
    assert lost
    assert len(set(whole)) == 1
    assert all(isinstance(error, openai.APIError | httpx2.TransportError) for error in lost), lost
    assert all(whole[0].startswith(text) for text in after)
    await until(lambda: len(cluster.alive()) == 2)
    assert survivor in cluster.alive()


async def test_a_replica_whose_engine_died_is_replaced(cluster):
    """The process lives, but its health check fails: Ray starts another one."""
    broken, other = cluster.alive()
    (cluster.folder / f"{broken}.die").touch()
    async with cluster.client() as client:
        for _ in range(12):  # an engine breaks when it is asked
            try:
                await stream(client, asyncio.Event(), 4)
            except openai.APIError:
                continue

        await until(lambda: not is_running(broken) and len(cluster.alive()) == 2)
        assert other in cluster.alive()
        await asyncio.gather(*(stream(client, asyncio.Event(), 20) for _ in range(8)))


async def test_a_stream_that_runs_at_the_end_comes_to_its_end(cluster):
    """Told to end, replicas take nothing new, finish what runs, and close their models."""
    pids = cluster.alive()
    assert cluster.process.stdin is not None
    async with cluster.client() as client:
        begun = asyncio.Event()
        task = asyncio.create_task(stream(client, begun, 2 * LONG))
        await begun.wait()
        cluster.process.stdin.write("\n")
        cluster.process.stdin.flush()
        text = await task

    await asyncio.to_thread(cluster.says, "ended")
    assert text
    assert all((cluster.folder / f"{pid}.closed").exists() for pid in pids)
    await until(lambda: not cluster.alive())


def test_the_example_runs_as_it_stands(cluster, tmp_path):
    """A cluster of its own, started after the other one has ended: both would share its port."""
    assert cluster.process.wait(60) == 0
    example = ROOT / "examples" / "advanced" / "ray_serve.py"
    model = tiny_checkpoint("llama", tmp_path)

    done = subprocess.run(
        [sys.executable, str(example), str(model)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"^2 replicas, HEALTHY\nFrance: .*\nItaly: ", done.stdout, re.DOTALL)
