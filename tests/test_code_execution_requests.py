"""Opting in to code and commands: who may, what is offered, who is asked, when it all ends."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys

import pytest

from mistralrs_sdk import (
    AgenticToolCallProgress,
    AgentPermission,
    AgentToolApprovalDecision,
    ChatCompletionRequest,
    CodeExecutionConfig,
    ConfigError,
    Constraint,
    ModelBuilder,
    RequestBuilder,
    RequestError,
    Runner,
    SandboxPolicy,
    ShellConfig,
    ShellOptions,
    ShellSkillMount,
    ToolChoice,
    UnsupportedError,
    Which,
    runner,
)
from mistralrs_sdk.answers.completions import completion_settings
from mistralrs_sdk.chat.requests import as_request
from mistralrs_sdk.tools import code_tools
from mistralrs_sdk.tools.loop import open_stream
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say
from tests.test_runner import FakeModel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is run on Linux only")

PYTHON, SHELL = "mistralrs_execute_python", "mistralrs_execute_shell"


def toolbox(**config) -> Toolbox:
    """Python and commands, both with these settings."""
    code, shell = CodeExecutionConfig(**config), ShellConfig(**config)
    return Toolbox(ToolSettings(code=code, shell=shell))


def ask() -> RequestBuilder:
    return RequestBuilder().add_message("user", "?")


def runs(code: str) -> Say:
    return Say(calls=[(PYTHON, json.dumps({"code": code}))])


async def results(rounds: Rounds, asked: RequestBuilder, box: Toolbox) -> list[str]:
    """What the model was given for each call."""
    async with await open_stream(rounds, asked, box) as stream:
        response = await stream.collect()
    return [record.result_content for record in response.agentic_tool_calls or ()]


def result_of(content: str) -> str:
    return json.loads(content)["result"]


async def test_request_that_does_not_opt_in_is_offered_nothing():
    """A model that could run code is one that does not, until asked."""
    rounds = Rounds(Say("a"))

    await open_stream(rounds, ask(), toolbox())

    assert rounds.asked[0].tools == ()


async def test_request_that_opts_in_is_offered_the_tools():
    """Those it asked for, with strict arguments."""
    rounds = Rounds(Say("a"), Say("b"))
    box = toolbox()

    await results(rounds, ask().with_code_execution(), box)
    await results(rounds, ask().with_shell_execution(), box)

    python, shell = ([tool.name for tool in asked.tools] for asked in rounds.asked)
    assert python == [PYTHON, "mistralrs_reset_python_session"]
    assert shell == [SHELL]
    assert all(tool.function.strict for asked in rounds.asked for tool in asked.tools)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (ask().with_code_execution(), "with_code_execution"),
        (ask().with_shell_execution(), "with_shell_execution"),
    ],
)
async def test_model_that_was_not_built_for_it_refuses(asked, name):
    """The message says what its builder would have to say."""
    with pytest.raises(RequestError, match=rf"ModelBuilder\(...\).{name}\("):
        await open_stream(Rounds(), asked, Toolbox())


async def test_constraint_and_code_contradict():
    """What must match something is no call."""
    asked = ask().with_code_execution().set_constraint(Constraint.Regex("a"))

    with pytest.raises(RequestError, match="constrained"):
        await open_stream(Rounds(), asked, toolbox())


async def test_variables_last_as_long_as_the_request():
    """Without a session: over its rounds, and not into the next request."""
    box = toolbox()
    rounds = Rounds(runs("x = 1"), runs("x + 1"), Say("2"), runs("'x' in globals()"), Say("no"))
    asked = ask().with_code_execution()

    first = await results(rounds, asked, box)
    second = await results(rounds, asked, box)
    await box.aclose()

    assert result_of(first[1]) == "2"
    assert result_of(second[0]) == "False"


async def test_variables_last_as_long_as_the_session():
    """Over its requests, until it is deleted; another session has its own."""
    box = toolbox()
    asked = ask().with_code_execution()
    here, there = asked.with_session_id("here"), asked.with_session_id("there")
    look = runs("'x' in globals()")

    await results(Rounds(runs("x = 1"), Say("a")), here, box)
    (kept,) = await results(Rounds(look, Say("a")), here, box)
    (other,) = await results(Rounds(look, Say("a")), there, box)
    box.sessions.delete("here")
    (gone,) = await results(Rounds(look, Say("a")), here, box)
    await box.aclose()

    assert [result_of(each) for each in (kept, other, gone)] == ["True", "False", "False"]


async def test_result_that_is_no_unicode_does_not_end_the_request():
    """Half of a surrogate pair is shown as a question mark: no prompt can hold it."""
    box = toolbox()
    rounds = Rounds(runs(r"raise ValueError('\udcff')"), Say("a"))

    (told,) = await results(rounds, ask().with_code_execution(), box)
    await box.aclose()

    assert "ValueError: ?" in told


async def test_stream_shows_code_like_other_tools():
    """A call that begins, and its end with the reason if there is no result."""
    box = toolbox(timeout_secs=0.3)
    rounds = Rounds(runs("1"), runs("while True: pass"), Say("a"))
    async with await open_stream(rounds, ask().with_code_execution(), box) as stream:
        items = [item async for item in stream]
    await box.aclose()

    events = [item for item in items if isinstance(item, AgenticToolCallProgress)]
    assert [(event.tool_name, event.phase) for event in events] == [
        (PYTHON, "calling"),
        (PYTHON, "complete"),
    ] * 2
    assert events[1].error is None
    assert "longer than 0.3 s" in events[3].error


async def test_leaving_the_stream_ends_the_code(tmp_path, monkeypatch):
    """No process and no folder is left once it is closed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box = toolbox()
    rounds = Rounds(runs("open('begun', 'w').close()\nwhile True: pass"))
    async with await open_stream(rounds, ask().with_code_execution(), box) as stream:
        assert (await anext(stream)).phase == "calling"
        async with asyncio.timeout(20):
            while not list(tmp_path.glob("*/begun")):
                await asyncio.sleep(0.02)

    assert list(tmp_path.iterdir()) == []
    await box.aclose()


async def test_closing_the_model_ends_the_code(tmp_path, monkeypatch):
    """Sessions' processes and folders, also those in the middle of a call."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box = toolbox()
    asked = ask().with_code_execution()
    await results(Rounds(runs("x = 1"), Say("a")), asked.with_session_id("idle"), box)
    busy = asked.with_session_id("busy")
    stream = await open_stream(Rounds(runs("while True: pass")), busy, box)
    assert (await anext(stream)).phase == "calling"

    await box.aclose()

    assert list(tmp_path.iterdir()) == []
    await stream.aclose()


# Permission


def deciding(decision, seen: list):
    def decide(approval):
        seen.append(approval)
        return decision

    return decide


async def test_approval_names_the_kind_of_tool_and_shows_the_code():
    """Who decides knows what would run."""
    seen: list = []
    refuse = deciding(AgentToolApprovalDecision.deny("not today"), seen)
    asked = ask().with_code_execution().with_agent_approval_callback(refuse)

    told = await results(Rounds(runs("1"), Say("a")), asked, toolbox())

    assert told == ["Error: not today"]
    assert (seen[0].tool.source, seen[0].tool.kind) == ("built_in", "code_execution")
    assert json.loads(seen[0].arguments) == {"code": "1"}


async def test_request_cannot_relax_what_the_model_was_built_with():
    """The strictest permission counts: a client cannot let run what the server asks about."""
    seen: list = []
    box = toolbox(permission="ask", approval_callback=deciding(False, seen))
    asked = ask().with_code_execution().with_agent_permission("auto")
    asked = asked.with_code_execution_permission("auto")

    told = await results(Rounds(runs("1"), Say("a")), asked, box)

    assert len(seen) == 1
    assert told[0].startswith("Error: the call of mistralrs_execute_python was denied")


async def test_request_may_be_stricter_about_code_alone():
    """`with_code_execution_permission` holds for code; commands run."""
    asked = ask().with_code_execution().with_shell_execution()
    asked = asked.with_code_execution_permission(AgentPermission.DENY)
    command = (SHELL, json.dumps({"command": "echo a"}))
    rounds = Rounds(Say(calls=[(PYTHON, '{"code": "1"}'), command]), Say("a"))
    box = toolbox()

    denied, ran = await results(rounds, asked, box)
    await box.aclose()

    assert "denied" in denied
    assert json.loads(ran)["stdout"] == "a\n"


async def test_denial_is_not_undone_by_an_earlier_approval():
    """What was approved for the session is denied where all is."""
    approve = deciding(AgentToolApprovalDecision.approve_for_session(), [])
    asked = ask().with_code_execution().with_session_id("s")
    box = toolbox()

    await results(Rounds(runs("1"), Say("a")), asked.with_agent_approval_callback(approve), box)
    told = await results(Rounds(runs("1"), Say("a")), asked.with_agent_permission("deny"), box)
    await box.aclose()

    assert "denied" in told[0]


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        (ask().with_code_execution().with_code_execution_permission("ask"), {}),
        (ask().with_code_execution(), {"permission": "ask"}),
        (ask().with_shell_execution(), {"permission": "ask"}),
    ],
)
async def test_asking_needs_somebody_to_ask(asked, config):
    """It is said before anything is generated."""
    with pytest.raises(RequestError, match="nobody to ask"):
        await open_stream(Rounds(), asked, toolbox(**config))


# Builders and requests as values


async def test_build_warns_what_it_means(caplog, monkeypatch):
    """With all rights, confined, and where the kernel cannot confine."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(code_tools, "unconfined", lambda network: {})
    await Toolbox(ToolSettings(code=CodeExecutionConfig())).start()
    await Toolbox(ToolSettings(shell=ShellConfig(sandbox_policy=SandboxPolicy()))).start()
    monkeypatch.setattr(code_tools, "unconfined", lambda network: {"files": "no Landlock"})
    await Toolbox(ToolSettings(code=CodeExecutionConfig(sandbox_policy=SandboxPolicy()))).start()

    rights, confined, gap = (record.getMessage() for record in caplog.records)
    assert "with your rights" in rights
    assert "less than a virtual machine" in confined
    assert "cannot confine files (no Landlock)" in gap


async def test_strict_policy_that_cannot_be_kept_fails_the_build(monkeypatch):
    """Rather than running with more rights than were wanted."""
    monkeypatch.setattr(code_tools, "unconfined", lambda network: {"files": "no Landlock"})
    config = CodeExecutionConfig(sandbox_policy=SandboxPolicy(strict=True))

    with pytest.raises(ConfigError, match=r"no Landlock.*strict"):
        await Toolbox(ToolSettings(code=config)).start()


def test_builder_that_runs_code_stays_a_value():
    """Off by default, shown, equal, hashable and pickled."""
    builder = ModelBuilder("model").with_code_execution().with_shell_execution(ShellConfig())

    assert ModelBuilder("model").tools.code is ModelBuilder("model").tools.shell is None
    assert "with_code_execution(CodeExecutionConfig(" in repr(builder)
    assert "with_shell_execution(ShellConfig(" in repr(builder)
    assert pickle.loads(pickle.dumps(builder)) == builder
    assert hash(builder) == hash(pickle.loads(pickle.dumps(builder)))


def test_values_of_variables_are_never_shown():
    """They may be secrets; their names are not."""
    policy = SandboxPolicy(extra_env=["KEY=sk-secret", "TZ"])

    assert "('KEY=...', 'TZ')" in repr(policy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CodeExecutionConfig(timeout_secs=0),
        lambda: CodeExecutionConfig(permission="maybe"),
        lambda: CodeExecutionConfig(working_directory="no/such/folder"),
        lambda: CodeExecutionConfig(approval_callback="me"),
        lambda: ShellConfig(sandbox_policy="strict"),
        lambda: SandboxPolicy(max_procs=0),
        lambda: SandboxPolicy(network="some"),
        lambda: SandboxPolicy(extra_env=["=1"]),
        lambda: SandboxPolicy(extra_fs_read="/one"),
        lambda: ModelBuilder("m").with_code_execution(CodeExecutionConfig(python_path="no-such")),
        lambda: ModelBuilder("m").with_shell_execution(CodeExecutionConfig()),
    ],
)
def test_bad_settings_are_refused_where_they_are_written(make):
    """A ConfigError, not a surprise in the middle of an answer."""
    with pytest.raises(ConfigError):
        make()


def test_other_systems_are_refused(monkeypatch):
    """What cannot be ended for certain is not begun."""
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(UnsupportedError, match="needs Linux"):
        ModelBuilder("model").with_code_execution()


def test_what_the_kernel_could_not_keep_apart_is_refused_by_name():
    """A field of mistral.rs that has no part here."""
    with pytest.raises(UnsupportedError, match="session_workdir"):
        SandboxPolicy(session_workdir="x")


def test_skills_let_commands_run(tmp_path):
    """One at a time or all at once; a name is there once and a folder is one."""
    skill = ShellSkillMount("a", "Does a.", tmp_path)
    asked = ask().with_shell_skill("a", "Does a.", tmp_path)

    assert asked == ask().with_shell_options(ShellOptions(skills=[skill]))
    assert asked.execution.shell.skills == (skill,)
    with pytest.raises(RequestError, match="'a': rename one"):
        asked.with_shell_skill("a", "Again.", tmp_path)
    with pytest.raises(RequestError, match="must be a folder"):
        ask().with_shell_skill("b", "Is not there.", tmp_path / "b")
    with pytest.raises(RequestError, match="name of a folder"):
        ask().with_shell_skill("../b", "Elsewhere.", tmp_path)


async def test_skills_are_not_put_into_a_folder_of_the_user(tmp_path):
    """Two settings that contradict."""
    asked = ask().with_shell_skill("a", "Does a.", tmp_path)

    with pytest.raises(RequestError, match="leave one of the two out"):
        await open_stream(Rounds(), asked, toolbox(working_directory=tmp_path))


def test_openai_shaped_requests_opt_in_by_key():
    """mistral.rs' keys; false asks for nothing."""
    asked = as_request(
        {"messages": "?", "enable_code_execution": True, "code_execution_permission": "deny"}
    )
    off = as_request({"messages": "?", "enable_code_execution": False, "enable_shell": False})

    assert asked.execution.code
    assert asked.execution.code_permission == "deny"
    assert not off.execution.code
    assert off.execution.shell is None
    assert as_request({"messages": "?", "enable_shell": True}).execution.shell == ShellOptions()


def test_requests_of_the_runner_opt_in_by_field(tmp_path):
    """The names of the `mistralrs` package."""
    skill = ShellSkillMount("a", "Does a.", tmp_path)
    asked = ChatCompletionRequest(
        "?", enable_code_execution=True, code_execution_permission="ask", shell_skills=[skill]
    ).builder()

    assert asked.execution.code
    assert asked.execution.code_permission == "ask"
    assert asked.execution.shell.skills == (skill,)
    assert ChatCompletionRequest("?").builder().execution.shell is None


def test_raw_prompt_runs_no_code():
    """A setting that would do nothing is refused."""
    with pytest.raises(RequestError, match=r"execution .* no effect on a raw prompt"):
        completion_settings(RequestBuilder().with_code_execution())


def test_runner_takes_both_configs(monkeypatch):
    """They are what the methods of the builder take."""
    fake = FakeModel()
    monkeypatch.setattr(runner, "BlockingModel", fake)
    code, shell = CodeExecutionConfig(timeout_secs=5), ShellConfig()

    Runner(Which.Plain("x"), code_execution_config=code, shell_config=shell)

    built = ModelBuilder("x").with_code_execution(code).with_shell_execution(shell)
    assert fake.builder == built


async def test_call_may_be_required():
    """As of any tool, by its name."""
    asked = ask().with_code_execution().set_tool_choice(ToolChoice.named(PYTHON))
    box = toolbox()

    told = await results(Rounds(runs("6 * 7"), Say("42")), asked, box)
    await box.aclose()

    assert result_of(told[0]) == "42"


async def test_arguments_that_are_no_code_are_told_to_the_model():
    """As for other tools, the request goes on."""
    box = toolbox()

    told = await results(
        Rounds(Say(calls=[(PYTHON, '{"x": 1}')]), Say("a")), ask().with_code_execution(), box
    )

    assert told == ["Error: mistralrs_execute_python needs 'code', a string"]
