"""`serve --agent`: the flags of code and commands, and what they let clients do."""

from __future__ import annotations

import json
import sys

import httpx2
import pytest

from mistralrs_sdk import (
    CodeExecutionConfig,
    ConfigError,
    EmbeddingModelBuilder,
    McpClientConfig,
    ModelBuilder,
    MultiModelBuilder,
    SandboxPolicy,
    ShellConfig,
)
from mistralrs_sdk.cli import main, serve
from mistralrs_sdk.cli.agent_flags import with_agent_tools
from mistralrs_sdk.cli.serve_models import builder_of
from tests.test_model_tool_loop import builder as tool_builder
from tests.test_serve_command import config, parse
from tests.translated_apis import serving

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="code is run on Linux only")

OPT_IN = {"messages": "hello", "max_tokens": 150, "temperature": 0}
RESET = {"type": "function", "function": {"name": "mistralrs_reset_python_session"}}


def agent(*flags: str) -> ModelBuilder:
    """The builder that a model and these flags amount to."""
    args = parse("-m", "x", *flags)
    found = with_agent_tools(builder_of(args), args)
    assert isinstance(found, ModelBuilder)
    return found


@on_linux
def test_code_and_commands_are_off_until_switched_on():
    """Each by its flag, both by --agent; the bounds of a sandbox are there by default."""
    code = CodeExecutionConfig(sandbox_policy=SandboxPolicy())
    shell = ShellConfig(sandbox_policy=SandboxPolicy())

    found = [
        agent(*flags).tools
        for flags in ((), ("--enable-code-execution",), ("--enable-shell",), ("--agent",))
    ]

    assert [(tools.code, tools.shell) for tools in found] == [
        (None, None),
        (code, None),
        (None, shell),
        (code, shell),
    ]


@on_linux
def test_agent_flags_become_settings(tmp_path):
    """Each flag sets the setting of its name, the shared ones of both."""
    found = agent(
        *("--enable-code-execution", "--enable-shell"),
        *("--code-exec-python", sys.executable, "--code-exec-timeout", "5"),
        *("--code-exec-workdir", str(tmp_path), "--shell-path", "/bin/sh"),
        *("--shell-timeout", "7", "--shell-workdir", str(tmp_path), "--sandbox", "on"),
        *("--sb-max-memory-mb", "512", "--sb-max-cpu-secs", "9", "--sb-max-procs", "3"),
        *("--sandbox-network", "none"),
    ).tools

    policy = SandboxPolicy(
        max_memory_mb=512, max_cpu_secs=9, max_procs=3, network="none", strict=True
    )
    assert found.code == CodeExecutionConfig(
        python_path=sys.executable,
        timeout_secs=5,
        working_directory=tmp_path,
        sandbox_policy=policy,
    )
    assert found.shell == ShellConfig(
        shell_path="/bin/sh",
        timeout_secs=7,
        working_directory=tmp_path,
        sandbox_policy=policy,
    )


@on_linux
def test_the_sandbox_is_left_out_only_by_name():
    """--sandbox off is the one way to have none."""
    found = agent("--agent", "--sandbox", "off").tools

    assert found.code == CodeExecutionConfig()
    assert found.shell == ShellConfig()


@on_linux
def test_models_that_embed_run_nothing(tmp_path):
    """Those beside them do, also where a file says so; with none that chats the flag is refused."""
    file = config(tmp_path, 'model-id = ["a"]\nembedding-model-id = ["e"]\nenable-shell = true\n')
    args, alone = parse("--config", file), parse("--embedding-model-id", "e", "--agent")

    found = with_agent_tools(builder_of(args), args)

    assert isinstance(found, MultiModelBuilder)
    (_, chats), (_, embeds) = found.models
    assert isinstance(chats, ModelBuilder)
    assert chats.tools.shell == ShellConfig(sandbox_policy=SandboxPolicy())
    assert embeds == EmbeddingModelBuilder("e").with_logging()
    with pytest.raises(ConfigError, match="--agent has no effect: no model here chats"):
        with_agent_tools(builder_of(alone), alone)


@on_linux
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--code-exec-timeout", "5"), "--code-exec-timeout has no effect without"),
        (("--enable-shell", "--code-exec-workdir", "."), "--code-exec-workdir has no effect"),
        (("--enable-code-execution", "--shell-path", "sh"), "--shell-path has no effect"),
        (("--agent-permission", "deny"), "--agent-permission has no effect without"),
        (("--sandbox", "auto"), "--sandbox has no effect without"),
        (("--agent", "--sandbox", "off", "--sb-max-procs", "3"), "--sb-max-procs contradict"),
        (("--agent", "--sb-max-procs", "0"), r"--sandbox: max_procs \(0\)"),
        (("--agent", "--shell-timeout", "0"), r"--shell-\*: timeout_secs \(0.0\)"),
        (("--agent", "--shell-path", "/no/sh"), "no program"),
    ],
)
def test_an_agent_flag_without_effect_is_refused(flags, message):
    """The error names it and what it lacks or contradicts."""
    with pytest.raises(ConfigError, match=message):
        agent(*flags)


@pytest.mark.parametrize(
    ("flags", "mcp"),
    [
        (("--tool-dispatch-url", "http://t"), None),
        ((), McpClientConfig(servers=[])),
        pytest.param(("--agent",), None, marks=on_linux),
        pytest.param(("--agent",), McpClientConfig(servers=[]), marks=on_linux),
    ],
)
def test_the_permission_is_a_setting_of_the_server(flags, mcp):
    """Whatever runs here, code or other tools; it changes no model."""
    args = parse("-m", "x", *flags, "--agent-permission", "deny")
    built = with_agent_tools(builder_of(args, mcp=mcp), args)
    args.agent_permission = None

    assert built == with_agent_tools(builder_of(args, mcp=mcp), args)
    assert serve.settings_from(args, {}).agent_permission == "auto"
    args.agent_permission = "deny"
    assert serve.settings_from(args, {}).agent_permission == "deny"


@pytest.mark.parametrize(
    "flags",
    [
        ("--enable-search",),
        ("--search-embedding-model", "embedding-gemma"),
        ("--skills-dir", "skills"),
        ("--sandbox-profile", "minimal"),
    ],
)
def test_agent_flags_that_nothing_here_does_are_refused_by_name(tmp_path, capsys, flags):
    """On the command line and in a file, with what to do instead."""
    name = flags[0].removeprefix("--")
    value = json.dumps(flags[1]) if len(flags) > 1 else "true"

    for given in (flags, ("--config", config(tmp_path, f"{name} = {value}\n"))):
        with pytest.raises(SystemExit, match="2"):
            parse("-m", "x", "--agent", *given)
        assert f"--{name}: it is not supported" in capsys.readouterr().err


@on_linux
def test_the_command_builds_what_its_agent_flags_say(monkeypatch):
    """What it serves is the builder that they changed."""
    served = []

    async def note(builder, settings, place):
        served.append(builder)

    monkeypatch.setattr(serve, "_serve", note)

    assert main(["serve", "-m", "x", "--port", "0", "--enable-shell", "--api-key", "k"]) == 0
    assert served == [agent("--enable-shell")]


@on_linux
def test_running_code_without_a_key_is_warned_of(capsys):
    """On loopback too; louder without a sandbox, and for pages that are let in."""
    for more, warned, louder in (
        ((), True, False),
        (("--sandbox", "off"), True, True),
        (("--cors-origin", "*"), True, False),
        (("--api-key", "k"), False, False),
    ):
        main(["serve", "-m", "./no-such-folder", "--port", "0", "-q", "--enable-shell", *more])

        said = capsys.readouterr().err
        assert ("--enable-shell lets the model run" in said) is warned
        assert ("with all your rights" in said) is louder
        assert ("pages of * too" in said) is ("--cors-origin" in more)


@pytest.mark.parametrize("what", ["enable_shell", "enable_code_execution"])
async def test_clients_cannot_switch_on_what_the_operator_did_not(what):
    """A body that asks for it is a 400, and nothing is computed."""
    async with (
        await tool_builder().build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        answer = await http.post("/v1/chat/completions", json={**OPT_IN, what: True})
        started = (await model.metrics()).completed

    assert answer.status_code == 400
    assert "the model was built without it" in answer.json()["error"]["message"]
    assert sum(started.values()) == 0


@on_linux
async def test_code_runs_for_clients_that_opt_in():
    """With the flag and the request's key, and not without the key; commands stay off."""
    args = parse("-m", "x", "--enable-code-execution")
    built = with_agent_tools(tool_builder(), args)
    called = {**OPT_IN, "enable_code_execution": True, "tool_choice": RESET}
    async with (
        await built.build() as model,
        serving(model) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        asked = [called, OPT_IN, {**OPT_IN, "enable_shell": True}]
        found = [await http.post("/v1/chat/completions", json=body) for body in asked]

    assert [answer.status_code for answer in found] == [200, 200, 400]
    (ran,) = found[0].json()["agentic_tool_calls"]
    assert json.loads(ran["result_content"]) == {"status": "success"}
    assert not found[1].json().get("agentic_tool_calls")
