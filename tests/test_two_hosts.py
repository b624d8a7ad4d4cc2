"""Two network namespaces as two machines, with nothing shared but a cable; they need root.

They start many processes and take a minute, so they run only where TWO_HOSTS_TESTS is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint_files import config_for, write_folder

pytestmark = pytest.mark.skipif(
    not os.environ.get("TWO_HOSTS_TESTS"), reason="TWO_HOSTS_TESTS is not set"
)

ROOT = Path(__file__).parent.parent
HOSTS = ("mrs-one", "mrs-two")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PROGRAM = """
import asyncio, sys
import mistralrs_sdk
from mistralrs_sdk import MemoryGpuConfig, ModelBuilder, PagedAttentionMetaBuilder
from tests.model_helpers import continue_ids, endless, prompt

paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(4096)).build()
builder = ModelBuilder(sys.argv[1]).with_force_cpu().with_num_threads(1).with_paged_attn(paged)
builder = builder.with_dtype("f32").with_tensor_parallel(int(sys.argv[2]))

async def main():
    async with await builder.build() as model:
        print(*await continue_ids(model, prompt(20), 12), flush=True)
        if len(sys.argv) == 3:
            return
        try:
            while True:
                await model.send_chat_request(endless())
        except mistralrs_sdk.MistralRsError as error:
            print(type(error).__name__, flush=True)

try:
    if not mistralrs_sdk.serve_rank(builder):
        asyncio.run(main())
except mistralrs_sdk.MistralRsError as error:
    print(type(error).__name__, flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them; skipped where the system does not allow it."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = []
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            made.append(host)
        ip("link", "add", "mrs-a", "netns", HOSTS[0], "type", "veth", "peer", "mrs-b", "netns",
           HOSTS[1])  # fmt: skip
        for host, address, end in zip(HOSTS, ADDRESSES, ("mrs-a", "mrs-b"), strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", host, "link", "set", end, "up")
            ip("-n", host, "link", "set", "lo", "up")
    except (OSError, subprocess.SubprocessError) as error:
        for host in made:
            ip("netns", "del", host)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield
    for host in HOSTS:
        ip("netns", "del", host)


@pytest.fixture
def run() -> Iterator:
    """Starts the program; what still runs at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, host: str | None = None, **environ: str) -> subprocess.Popen[str]:
        inside = [] if host is None else ["ip", "netns", "exec", host]
        process = subprocess.Popen(
            [*inside, sys.executable, "-c", PROGRAM, *arguments],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_machines_give_the_tokens_of_one_and_notice_a_cut_cable(hosts, run, tmp_path):
    """torchrun's variables, one rank per machine; without the network both end within seconds."""
    folder = str(write_folder(tmp_path, config_for("qwen2")))
    alone = run(folder, "1")
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    meeting |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    ranks = [
        run(folder, "2", "endless", host=host, RANK=str(rank), **meeting)
        for rank, host in enumerate(HOSTS)
    ]
    expected = line(alone)

    assert len(expected.split()) == 12
    assert line(ranks[0]) == expected
    ip("-n", HOSTS[1], "link", "set", "mrs-b", "down")
    started = time.monotonic()
    assert line(ranks[0]) == "EngineDeadError"
    assert time.monotonic() - started < 8
    assert line(ranks[1]) == "EngineDeadError"


def test_one_process_per_machine_starts_the_ranks_there(hosts, run, tmp_path):
    """mistral.rs' variables: a head and a worker with two ranks each make four."""
    folder = str(write_folder(tmp_path, config_for("qwen2", num_key_value_heads=1)))
    alone = run(folder, "1")
    size = {"MISTRALRS_MN_GLOBAL_WORLD_SIZE": "4", "MISTRALRS_MN_LOCAL_WORLD_SIZE": "2"}
    head = run(
        folder,
        "4",
        host=HOSTS[0],
        MISTRALRS_MN_HEAD_NUM_WORKERS="1",
        MISTRALRS_MN_HEAD_PORT="29512",
        **size,
    )
    worker = run(
        folder,
        "4",
        host=HOSTS[1],
        MISTRALRS_MN_WORKER_ID="0",
        MISTRALRS_MN_WORKER_SERVER_ADDR=f"{ADDRESSES[0]}:29512",
        **size,
    )

    assert line(head) == line(alone)
    assert worker.wait(20) == 0
