"""What a server tells of itself and its machine, and the commands it runs for clients."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mistralrs_sdk import Model, MultiModelBuilder, __version__
from mistralrs_sdk.server import ServerSettings, system
from tests.model_helpers import tiny_builder, tiny_folder
from tests.translated_apis import serving

ALLOWED = ServerSettings(access_log=None, allow_diagnostics=True)
DOCTOR, TUNE, INFO = "/v1/system/doctor", "/v1/models/tune", "/v1/system/info"
ECHO = "import json, sys; print(json.dumps({'argv': sys.argv[1:]}))"


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    builder = MultiModelBuilder().add_model_with_alias("one", tiny_builder())
    async with await builder.add_model_with_alias("two", tiny_builder()).build() as built:
        yield built


@pytest.fixture
async def http(model) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        serving(model, ALLOWED) as url,
        httpx2.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def instead(monkeypatch) -> Callable[[str], None]:
    """Run this code instead of the commands."""

    def use(code: str) -> None:
        monkeypatch.setattr(system, "COMMAND", (sys.executable, "-c", code))

    return use


async def test_the_settings_of_every_model_are_told(http, model):
    """With where each came from; an unloaded model has none."""
    await model.unload_model("two")
    told = (await http.get(INFO)).json()

    one, two = told["models"]
    assert told["version"] == __version__
    assert told["default_model"] == "one"
    assert told["cpus"] >= 1
    assert (one["id"], one["status"]) == ("one", "loaded")
    assert one["settings"]["max_num_seqs"] == {"value": "32", "origin": "default"}
    assert one["settings"]["num_threads"] == {"value": "1", "origin": "user"}
    assert (two["id"], two["status"], two["settings"]) == ("two", "unloaded", None)
    assert one["mcp_tools"] == two["mcp_tools"] == []


async def test_commands_run_only_where_the_server_lets_them(model):
    """They take a core for seconds, and tune reads whatever is named."""
    async with serving(model) as url, httpx2.AsyncClient(base_url=url) as http:
        statuses = [(await http.post(path, json={})).status_code for path in (DOCTOR, TUNE)]
        info = await http.get(INFO)

    assert statuses == [404, 405]  # a model may be called tune
    assert info.status_code == 200


async def test_tune_is_the_command(http):
    """The candidates of a model in a folder, and the command that serves the best."""
    asked = {"model_id": str(tiny_folder()), "cpu": True, "max_seq_len": 64, "profile": "fast"}

    told = (await http.post(TUNE, json=asked)).json()

    stored = told["candidates"][0]
    assert told["profile"] == "fast"
    assert (stored["isq"], stored["fits"], stored["context"]) == (None, True, 64)
    assert told["command"].startswith("mistralrs-sdk serve -m ")


async def test_a_command_gets_flags_that_cannot_be_others(http, instead):
    """Each value is in one word with its flag, whatever it looks like."""
    instead(ECHO)
    asked = {
        "model_id": "--emit-config=/etc/passwd",
        "dtype": "f32",
        "max_batch_size": 4,
        "hf_revision": "-q",
        "cpu": False,
    }

    told = [(await http.post(TUNE, json=asked)).json(), (await http.post(DOCTOR)).json()]

    assert told[0]["argv"] == [
        *("tune", "--model-id=--emit-config=/etc/passwd", "--dtype=f32", "--hf-revision=-q"),
        *("--max-seqs=4", "--json"),
    ]
    assert told[1]["argv"] == ["doctor", "--json"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "model_id"),
        ({"model_id": 3}, "model_id"),
        ({"model_id": ""}, "model_id"),
        ({"model_id": "x", "max_seq_len": 0}, "max_seq_len"),
        ({"model_id": "x", "cpu": "yes"}, "cpu"),
        ({"model_id": "x", "token_source": "env:SECRET"}, "token_source"),
        ({"model_id": "x", "requested_isq": "q4k"}, "requested_isq"),
        ({"model_id": "x", "max_num_images": 2}, "max_num_images"),
        ({"model_id": "x", "colour": "red"}, "colour"),
        ({"model_id": "x\0"}, None),
    ],
)
async def test_a_wrong_request_to_tune_is_refused(http, instead, wrong, param):
    """Before anything is started."""
    instead("raise SystemExit(9)")
    answer = await http.post(TUNE, json=wrong)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_what_a_command_says_against_a_request_is_told(http):
    """A model that is not there, and a profile that there is not."""
    missing = await http.post(TUNE, json={"model_id": "./no-such-folder"})
    profile = await http.post(TUNE, json={"model_id": "x", "profile": "cheap"})

    assert (missing.status_code, profile.status_code) == (400, 400)
    assert "no-such-folder" in missing.json()["error"]["message"]
    assert "cheap" in profile.json()["error"]["message"]
    assert missing.json()["error"]["code"] == "tune_failed"


async def test_a_finding_that_is_a_failure_is_an_answer(http, instead):
    """doctor then ends with 1, and has said what is wrong."""
    instead("print('{\"checks\": []}'); raise SystemExit(1)")

    answer = await http.post(DOCTOR)

    assert (answer.status_code, answer.json()) == (200, {"checks": []})


async def test_a_command_that_dies_is_500(http, instead):
    """With how it ended."""
    instead("import os; os.abort()")

    answer = await http.post(DOCTOR)

    assert answer.status_code == 500
    assert "doctor ended with status -6" in answer.json()["error"]["message"]


async def test_a_command_that_hangs_is_ended(http, instead, monkeypatch):
    """After a limit, with all it started: 504."""
    instead("import time; time.sleep(60)")
    monkeypatch.setattr(system, "DIAGNOSIS_SECONDS", 0.2)

    answer = await http.post(DOCTOR)

    assert answer.status_code == 504


async def test_a_command_ends_with_its_client(http, instead, tmp_path: Path):
    """Nobody waits for it any more, nor for what it started itself."""
    file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); "
    inner = f"{child}time.sleep(60)"
    instead(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])")
    with pytest.raises(httpx2.TimeoutException):
        await http.post(DOCTOR, timeout=httpx2.Timeout(5, read=1.5))

    until = time.monotonic() + 10
    while not file.exists() or is_running(int(file.read_text())):
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


async def test_commands_run_one_after_the_other(http, instead, tmp_path: Path):
    """Two at once would measure each other."""
    code = (
        f"import json, os, time; os.mkdir({str(tmp_path / 'here')!r}); time.sleep(0.1); "
        f"os.rmdir({str(tmp_path / 'here')!r}); print(json.dumps({{}}))"
    )
    instead(code)

    answers: list[Any] = await asyncio.gather(*(http.post(DOCTOR) for _ in range(3)))

    assert [answer.status_code for answer in answers] == [200] * 3


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
