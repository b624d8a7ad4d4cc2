"""What the README and docs/serving.md say of serving runs as it stands, on a small model."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import attrs
import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from mistralrs_sdk.cli import serve
from mistralrs_sdk.cli.mcp_file import read_mcp_config
from mistralrs_sdk.cli.serve_models import builder_of
from tests.model_helpers import tiny_builder, tiny_folder
from tests.test_model_tool_loop import TEMPLATE, builder, switch
from tests.test_serve_command import config, parse, process
from tests.test_server_approvals import ASKED, named_events
from tests.translated_apis import serving

ROOT = Path(__file__).resolve().parents[1]
PAGE = "http://127.0.0.1:1234"
"""Where the documents have the server."""
ENVIRON = {"KEY": "s3cret"}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@attrs.frozen
class Block:
    """A block of code, and the lines it stands in."""

    place: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, each in one line and without comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"\s+#.*", "", line) for line in joined.splitlines())
        return [line for line in lines if line.strip()]


def blocks(file: str, *, section: str | None = None) -> list[Block]:
    """The blocks of a document, or of one section of it."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if section is not None:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        Block(f"{Path(file).stem}-{number}", match[1], match[2])
        for number, match in enumerate(found)
    ]


BLOCKS = [*blocks("README.md", section="Over HTTP"), *blocks("docs/serving.md")]


def of(language: str, word: str = "") -> list[Any]:
    """The blocks in a language that hold a word, as parameters."""
    found = [each for each in BLOCKS if each.language == language and word in each.text]
    return [pytest.param(each, id=each.place) for each in found]


def programs(block: Block) -> list[str]:
    return [shlex.split(command)[0] for command in block.commands]


SHELLS = [each for each in BLOCKS if each.language in ("", "sh")]
SERVED = [each for each in SHELLS if "mistralrs-sdk" in programs(each)]
ASKING = [each for each in SHELLS if set(programs(each)) == {"curl"}]


def test_every_block_is_tried():
    """One of a kind that no test here knows would stand there untried."""
    assert {each.language for each in BLOCKS} <= {"", "sh", "python", "json", "toml"}
    assert len(SERVED) >= 4
    for each in SHELLS:
        known = {"pip", "mistralrs-sdk", "curl", "schemathesis", "python"}
        assert set(programs(each)) <= known, each.place
        assert each in SERVED or each in ASKING or set(programs(each)) == {"python"}


def curl(command: str, url: str, **environ: str) -> str:
    """What a command prints, sent to where the server really is; it must succeed."""
    line = command.replace(PAGE, url).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **ENVIRON, **environ},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.asynccontextmanager
async def started(command: str, folder: Path) -> AsyncIterator[str]:
    """The command's own flags in a real process, but for the model, the port and the key."""
    words = [ENVIRON.get(word.removeprefix("$"), word) for word in shlex.split(command)[2:]]
    model, more = "demo", ["--disable-access-log"]
    if "--enable-code-execution" in words:  # the demo model's template knows no tools
        model, template = str(tiny_folder()), folder / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        more += ["--chat-template", str(template)]
    for flag, value in (("-m", model), ("--port", "0")):
        if flag in words:
            words[words.index(flag) + 1] = value
    async with process(*words, *more) as (_, url):
        yield url


@needs_curl
@pytest.mark.real_model
@pytest.mark.timeout(180)
@pytest.mark.parametrize("block", [pytest.param(each, id=each.place) for each in SERVED])
async def test_the_server_starts_as_it_says_and_answers_what_is_asked(demo_model, tmp_path, block):
    """Every extra it installs exists; every request to it succeeds."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked, command = [], ""
    for each in block.commands:
        match shlex.split(each):
            case ["pip", "install", wanted]:
                name, _, extra = wanted.rstrip("]").partition("[")
                assert name == "mistralrs_sdk"
                assert extra in optional["project"]["optional-dependencies"]
            case ["mistralrs-sdk", "serve", *_]:
                command = each
            case ["schemathesis", "run", url, *_]:
                asked.append(f"curl {url.replace(':8765', ':1234')}")
            case ["curl", *_]:
                asked.append(each)
    # where a block starts a server only, what the next one asks goes there
    asked = asked or [each for other in ASKING for each in other.commands if "$ID" not in each]

    async with started(command, tmp_path) as url:
        answers = [await asyncio.to_thread(curl, each, url) for each in asked]

    assert answers
    for answer in map(json.loads, answers):
        assert answer.get("choices") or answer.get("paths")


@needs_curl
async def test_a_call_that_waits_is_decided_about_as_it_says():
    """The one command with an id, sent while a stream asks."""
    (command,) = [each for block in ASKING for each in block.commands if "$ID" in each]
    printed = ""
    async with (
        await builder().with_tool(switch).build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
        http.stream("POST", "/v1/chat/completions", json=ASKED) as stream,
    ):
        async for name, data in named_events(stream):
            if name == "agentic_tool_approval_required":
                printed = await asyncio.to_thread(curl, command, url, ID=data["approval_id"])

    assert json.loads(printed) == {"status": "resolved"}


@pytest.mark.parametrize("block", of("python", "openai"))
async def test_the_official_client_is_used_as_it_says(block):
    """The lines after the imports, as a person would paste them."""
    async with await tiny_builder().build() as model, serving(model) as url:
        code = block.text.replace(PAGE, url)
        names: dict[str, Any] = {"openai": openai}
        await asyncio.to_thread(exec, compile(code, block.place, "exec"), names)
        names["client"].close()


@pytest.mark.parametrize("block", of("python", "create_app"))
async def test_the_app_is_mounted_as_it_says(block):
    """It answers under the path it was mounted at, to who has the key."""
    async with await tiny_builder().build() as model:
        names: dict[str, Any] = {"Starlette": Starlette, "Mount": Mount, "model": model, "key": "k"}
        exec(compile(block.text, block.place, "exec"), names)
        transport = httpx2.ASGITransport(app=names["app"])
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            answers = [
                await http.get("/llm/v1/models", headers=headers)
                for headers in ({}, {"authorization": "Bearer k"})
            ]

    assert [answer.status_code for answer in answers] == [401, 200]


@pytest.mark.parametrize("block", of("json"))
def test_the_file_of_mcp_servers_is_read(tmp_path, block):
    """Each server it names is one."""
    file = tmp_path / "mcp.json"
    file.write_text(block.text, encoding="utf-8")

    read = read_mcp_config(file)

    assert [each.name for each in read.servers] == [
        each["name"] for each in json.loads(block.text)["servers"]
    ]


@pytest.mark.parametrize("block", of("toml"))
def test_the_file_of_flags_is_taken(tmp_path, block):
    """Its models, and what it says of the server."""
    args = parse("--config", config(tmp_path, block.text))
    given = tomllib.loads(block.text)

    assert serve.settings_from(args, {}).port == given["port"]
    assert len(builder_of(args).models) == len(given["models"])  # type: ignore[union-attr]


LOADS = [
    pytest.param(command, id=f"{each.place}-{number}")
    for each in SHELLS
    for number, command in enumerate(each.commands)
    if command.startswith("python ")
]


@pytest.mark.parametrize("command", LOADS)
def test_the_load_test_takes_what_it_says(demo_model, monkeypatch, command):
    """Up to where its work begins, which has a test of its own."""
    script, *flags = shlex.split(command)[1:]
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    module = importlib.import_module(Path(script).stem)
    begun = []

    def run(work: Coroutine[Any, Any, int]) -> int:
        work.close()
        begun.append(work.__name__)
        return 0

    monkeypatch.setattr(module, "run_server", run)
    monkeypatch.setattr(sys, "argv", [script, *flags])

    assert module.main() == 0
    assert begun == ["overhead" if "--overhead" in flags else "hold_up"]
