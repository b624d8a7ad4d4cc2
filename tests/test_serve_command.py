"""`mistralrs-sdk serve`: flags, variables and a file become settings and models; a real process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from mistralrs_sdk import (
    AgentPermission,
    ConfigError,
    EmbeddingModelBuilder,
    MemoryGpuConfig,
    ModelBuilder,
    MultiModelBuilder,
    PagedAttentionMetaBuilder,
)
from mistralrs_sdk.cli import main, serve
from mistralrs_sdk.cli.serve_models import builder_of
from mistralrs_sdk.server import ServerSettings
from tests.model_helpers import tiny_folder


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *flags])


def config(folder: Path, text: str) -> str:
    file = folder / "serve.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_no_flag_leaves_every_setting_as_it_is():
    """But for the names it answers to on loopback, defaults are those of settings and builder."""
    args = parse("-m", "x")

    assert serve.settings_from(args, {}) == ServerSettings(allowed_hosts=())
    assert builder_of(args) == ModelBuilder("x").with_max_num_seqs(32).with_logging()


def test_flags_become_settings():
    """Each flag sets the setting of its name."""
    args = parse(
        *("-m", "x", "-p", "0", "--host", "::1", "--api-key", "k", "--max-body-mb", "1"),
        *("--cors-origin", "https://a", "--cors-origin", "https://b", "--drain-seconds", "2.5"),
        *("--keep-alive-seconds", "3", "--no-ui", "--no-docs", "--access-log-format", "json"),
        *("--access-log-health", "--disable-request-id-header", "--disable-metrics"),
        *(
            "--allow-diagnostics",
            "--allow-runtime-adapters",
            "--max-tool-rounds",
            "4",
            "--tool-dispatch-url",
            "http://t",
        ),
        *("--allowed-host", "c.example", "--agent-permission", "ask"),
    )

    assert serve.settings_from(args, {}) == ServerSettings(
        host="::1",
        port=0,
        api_key="k",
        cors_origins=("https://a", "https://b"),
        allowed_hosts=("c.example",),
        agent_permission=AgentPermission.ASK,
        max_body_bytes=2**20,
        keep_alive_seconds=3.0,
        drain_seconds=2.5,
        access_log="json",
        access_log_health=True,
        request_id_header=False,
        metrics=False,
        docs=False,
        web_page=False,
        allow_diagnostics=True,
        allow_runtime_adapters=True,
        max_tool_rounds=4,
        tool_dispatch_url="http://t",
    )
    assert serve.settings_from(parse("-m", "x", "--disable-access-log"), {}).access_log is None


def test_variables_stand_in_for_flags():
    """A key, the switch for adapters and mistral.rs' keep-alive interval; flags win."""
    environ = {
        "MISTRALRS_API_KEY": "secret",
        "MISTRALRS_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "KEEP_ALIVE_INTERVAL": "2500",
    }

    found = serve.settings_from(parse("-m", "x"), environ)
    flags = serve.settings_from(parse("-m", "x", "--api-key", "k"), environ)

    assert (found.api_key, found.allow_runtime_adapters) == ("secret", True)
    assert found.keep_alive_seconds == 2.5
    assert flags.api_key == "k"
    with pytest.raises(ConfigError, match="KEEP_ALIVE_INTERVAL"):
        serve.settings_from(parse("-m", "x"), {"KEEP_ALIVE_INTERVAL": "soon"})


def test_several_models_share_the_flags():
    """-m may be repeated; what embeds takes what concerns the machine."""
    built = builder_of(
        parse(
            *("-m", "a", "-m", "b", "--embedding-model-id", "e", "--default-model-id", "b"),
            *("--num-threads", "1", "--max-seqs", "4", "--cpu"),
        )
    )

    def chat(name: str) -> ModelBuilder:
        found = ModelBuilder(name).with_num_threads(1).with_max_num_seqs(4).with_force_cpu()
        return found.with_logging()

    embedder = EmbeddingModelBuilder("e").with_force_cpu().with_num_threads(1).with_logging()
    expected = MultiModelBuilder().add_model(chat("a")).add_model(chat("b")).add_model(embedder)
    assert built == expected.with_default_model("b")


def test_keys_of_the_file_are_flags(tmp_path):
    """With dashes or underscores, lists for what may be repeated; `tune` writes such a file."""
    file = config(
        tmp_path,
        'model-id = ["x"]\nisq = "4"\nmax_seqs = 8\nmixed-batches = false\ncpu = true\n'
        'cors-origin = ["https://a"]\npa-context-len = 4096\nport = 99\n',
    )

    args = parse("--config", file)

    paged = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.ContextSize(4096)).build()
    expected = ModelBuilder("x").with_max_num_seqs(8).with_isq("4").with_mixed_batches(False)
    expected = expected.with_force_cpu().with_paged_attn(paged)
    assert builder_of(args) == expected.with_logging()
    assert serve.settings_from(args, {}).cors_origins == ("https://a",)
    assert serve.settings_from(args, {}).port == 99


def test_the_command_line_wins_over_the_file(tmp_path):
    """Wherever the flag stands."""
    file = config(tmp_path, 'model-id = "x"\nport = 99\n')

    for flags in (("--port", "7", "--config", file), ("--config", file, "--port", "7")):
        assert serve.settings_from(parse(*flags), {}).port == 7


def test_tables_of_the_file_are_models_with_flags_of_their_own(tmp_path):
    """An id each; what a table does not say, the file says for all."""
    file = config(
        tmp_path,
        'max-seqs = 4\nnum-threads = 1\ndefault-model-id = "large"\n'
        '[[models]]\nid = "small"\nmodel-id = "a"\n'
        '[[models]]\nid = "large"\nmodel-id = "b"\nisq = "8"\nmax-seqs = 2\n'
        '[[models]]\nmodel-id = "e"\nkind = "embedding"\nmax-seqs = 16\n',
    )

    small = ModelBuilder("a").with_max_num_seqs(4).with_num_threads(1).with_logging()
    large = ModelBuilder("b").with_max_num_seqs(2).with_num_threads(1).with_isq("8").with_logging()
    embedder = EmbeddingModelBuilder("e").with_num_threads(1).with_max_num_seqs(16).with_logging()
    expected = MultiModelBuilder().add_model_with_alias("small", small)
    expected = expected.add_model_with_alias("large", large).add_model(embedder)
    assert builder_of(parse("--config", file)) == expected.with_default_model("large")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "no TOML"),
        ("nonsense = 1", "'nonsense' is no flag"),
        ('config = "x"', "'config' is no flag"),
        ('port = "soon"', "invalid int"),
        ("port = true", "needs a value"),
        ("cpu = 3", "must be true or false"),
        ("models = 3", "must be tables"),
    ],
)
def test_a_wrong_file_is_a_usage_error(tmp_path, capsys, text, message):
    """The program leaves with 2 and says what is wrong in which file."""
    with pytest.raises(SystemExit, match="2"):
        parse("--config", config(tmp_path, text))

    error = capsys.readouterr().err
    assert message in error
    assert "serve.toml" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nid = 3", "id"),
        ('[[models]]\nmodel-id = "x"\nkind = "image"', "kind"),
        ('[[models]]\nid = "x"', "model-id"),
        ('[[models]]\nmodel-id = "x"\nport = 3', "port"),
        ('[[models]]\nmodel-id = "x"\nkind = "embedding"\nprefix-cache-n = 0', "prefix-cache-n"),
        ("port = 3", "no model to serve"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    """The error names the table and the key."""
    with pytest.raises(ConfigError, match=message):
        builder_of(parse("--config", config(tmp_path, text)))


def test_a_port_that_is_taken_is_found_before_a_model_is_loaded(capsys):
    """The model is not even looked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        code = main(["serve", "-m", "no/such-model", "--port", port])

    assert code == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_opening_wide_without_a_key_is_warned_of(capsys):
    """Before anything is loaded; with a key there is no warning."""
    for key in ((), ("--api-key", "k")):
        flags = ("--host", "0.0.0.0", "--port", "0", "-q", *key)
        main(["serve", "-m", "./no-such-folder", *flags])

        assert ("no API key" in capsys.readouterr().err) is (not key)


@contextlib.asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The command as people start it, and the address it says it listens on."""
    code = "import sys; from mistralrs_sdk.cli import main; sys.exit(main())"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "serve", "--port", "0", "--num-threads", "1", *flags),
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    assert found.stderr is not None
    try:
        said = ""
        while not (match := re.search(r"http://\S+", said)):
            line = await asyncio.wait_for(found.stderr.readline(), timeout=60)
            assert line, f"it ended: {said}"
            said += line.decode()
        yield found, match.group()
    finally:
        if found.returncode is None:
            found.kill()
        await found.communicate()


async def test_a_process_answers_drains_and_leaves():
    """SIGTERM in the middle of a stream: the stream ends properly, new clients are refused, and
    the program leaves with 0."""
    asked = {"messages": "hello", "stream": True, "ignore_eos": True, "max_tokens": 400}
    async with (
        process("-m", str(tiny_folder())) as (program, url),
        httpx2.AsyncClient(base_url=url, timeout=60) as http,
    ):
        async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            program.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        code = await asyncio.wait_for(program.wait(), timeout=30)

    assert json.loads(first.removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert code == 0
