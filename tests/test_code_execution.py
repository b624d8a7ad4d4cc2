"""Running the model's Python and commands: what is kept, what is bounded, what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mistralrs_sdk import (
    CalledFunction,
    CodeExecutionConfig,
    NetworkMode,
    SandboxPolicy,
    ShellConfig,
    ShellSkillMount,
    ToolCallContext,
)
from mistralrs_sdk.tools.callbacks import ToolError
from mistralrs_sdk.tools.child_process import MAX_OUTPUT, unconfined
from mistralrs_sdk.tools.code_tools import PythonTool, ResetTool, ShellTool
from mistralrs_sdk.tools.workspaces import Workspaces

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is run on Linux only")

confines = pytest.mark.skipif(
    sys.platform != "linux" or bool(unconfined(NetworkMode.LOOPBACK)),
    reason="this kernel cannot confine processes",
)


@pytest.fixture
async def workspaces(tmp_path, monkeypatch) -> AsyncIterator[Workspaces]:
    """They leave no folder and no process behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Workspaces(idle_seconds=60)
    yield made
    await made.aclose()
    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []


def processes_in(folder: Path) -> list[str]:
    """The command lines of what runs in a folder below this one, or runs for it."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                place = os.readlink(entry / "cwd").removesuffix(" (deleted)")
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line and Path(place).is_relative_to(folder):
                found.append(line)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for 10 seconds at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def place(session_id: str = "s") -> ToolCallContext:
    return ToolCallContext(session_id=session_id, request_id="r", round=0, tool_name="t")


async def python(
    workspaces: Workspaces, code: str, *, session: str = "s", **config
) -> dict[str, str]:
    tool = PythonTool(CodeExecutionConfig(**config), workspaces)
    call = CalledFunction("mistralrs_execute_python", json.dumps({"code": code}))
    return json.loads(await tool.run(call, place(session)))


async def shell(workspaces: Workspaces, command: str, *, session: str = "s", skills=(), **config):
    tool = ShellTool(ShellConfig(**config), workspaces, tuple(skills))
    call = CalledFunction("mistralrs_execute_shell", json.dumps({"command": command}))
    return json.loads(await tool.run(call, place(session)))


# Python


async def test_variables_are_kept_from_call_to_call(workspaces):
    """What a call leaves, the next one of the session finds; the last expression is the result."""
    first = await python(workspaces, "import math\nx = math.floor(2.5)\nprint('hi')")
    second = await python(workspaces, "x + 1")

    assert first == {"status": "success", "stdout": "hi\n"}
    assert second == {"status": "success", "result": "3"}


async def test_two_sessions_know_nothing_of_each_other(workspaces):
    """Neither variables nor files."""
    await python(workspaces, "x = 1; open('file', 'w').close()", session="one")
    other = await python(workspaces, "import os; os.listdir(), 'x' in globals()", session="two")

    assert other["result"] == "([], False)"


async def test_exception_comes_with_the_code_that_raised_it(workspaces):
    """A traceback of the code alone, and the session goes on."""
    answer = await python(workspaces, "x = 1\ndef f():\n    return x / 0\nf()")

    assert answer["status"] == "error"
    assert answer["exception"].endswith("ZeroDivisionError: division by zero\n")
    assert "return x / 0" in answer["exception"]
    assert "python_worker" not in answer["exception"]
    assert (await python(workspaces, "x"))["result"] == "1"


@pytest.mark.parametrize("code", ["x = (", "raise SystemExit(3)", "input()", "exit()"])
async def test_what_would_end_an_interpreter_does_not_end_the_session(code, workspaces):
    """Bad syntax, leaving and asking for input are exceptions like others."""
    await python(workspaces, "x = 7")

    answer = await python(workspaces, code)

    assert answer["status"] == "error"
    assert ".py" not in answer["exception"]  # nothing of what runs the code
    assert (await python(workspaces, "x"))["result"] == "7"


async def test_runaway_loop_is_ended_and_its_variables_are_gone(workspaces, tmp_path):
    """At the time limit; the model reads why, and what was printed so far."""
    await python(workspaces, "x = 1")

    with pytest.raises(ToolError, match=r"longer than 0\.5 s .* variables are gone.*so far"):
        await python(workspaces, "print('so far')\nwhile True: pass", timeout_secs=0.5)

    assert processes_in(tmp_path) == []
    assert (await python(workspaces, "'x' in globals()"))["result"] == "False"


async def test_processes_that_code_started_end_with_it(workspaces, tmp_path):
    """In a group and session of their own or not, with their parent alive or not."""
    code = (
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 1000 & setsid setsid sleep 1000 &'])\n"
        "while True: pass"
    )

    with pytest.raises(ToolError, match="longer than"):
        await python(workspaces, code, timeout_secs=1.0)

    assert processes_in(tmp_path) == []


async def test_code_that_forks_gives_one_answer(workspaces):
    """The copy ends with its call, and later calls are answered by the original."""
    first = await python(workspaces, "import os\nx = os.getpid()\n_ = os.fork()\n'one'")
    second = await python(workspaces, "os.getpid() == x")

    assert (first["result"], second["result"]) == ("'one'", "True")


async def test_fork_bomb_is_ended(workspaces, tmp_path):
    """Above the number of processes that are allowed all of them end."""
    policy = SandboxPolicy(max_procs=20, network="full")
    code = (
        "import os, time\nfor _ in range(60):\n    if os.fork() == 0: time.sleep(99)\ntime.sleep(9)"
    )

    with pytest.raises(ToolError, match=r"Python has ended|longer than"):
        await python(workspaces, code, sandbox_policy=policy, timeout_secs=10)

    assert processes_in(tmp_path) == []


async def test_big_output_is_cut_in_the_middle(workspaces):
    """Of 50 MB the first and the last are kept; nothing stalls."""
    answer = await python(workspaces, "print('a' * 50_000_000 + 'end')\n'r' * 1_000_000")

    assert len(answer["stdout"]) < MAX_OUTPUT + 100
    assert answer["stdout"].startswith("aaa")
    assert "bytes left out" in answer["stdout"]
    assert answer["stdout"].endswith("end\n")
    assert len(answer["result"]) < MAX_OUTPUT + 100


async def test_memory_is_bounded(workspaces):
    """More than the limit is a MemoryError of the code."""
    policy = SandboxPolicy(max_memory_mb=256, network="full")

    answer = await python(workspaces, "x = bytearray(2**29)", sandbox_policy=policy)

    assert "MemoryError" in answer["exception"]


async def test_code_longer_than_a_pipe_is_run(workspaces):
    """However long it is."""
    assert (await python(workspaces, f"len({'x' * 300_000!r})"))["result"] == "300000"


async def test_process_that_kills_itself_is_replaced(workspaces):
    """The call has no result, the next one starts anew."""
    with pytest.raises(ToolError, match="Python has ended"):
        await python(workspaces, "import os; os._exit(1)")

    assert (await python(workspaces, "1 + 1"))["result"] == "2"


async def test_session_whose_answers_are_cut_off_between_calls_is_replaced(workspaces):
    """At once: nobody waits for an answer that cannot come."""
    code = (
        "import os, threading, time\n"
        "def leave(): time.sleep(0.2); os.closerange(3, 100)\n"
        "threading.Thread(target=leave).start()"
    )
    await python(workspaces, code)
    await asyncio.sleep(0.5)

    assert (await python(workspaces, "1 + 1", timeout_secs=5))["result"] == "2"


async def test_answer_that_the_code_forged_ends_the_session(workspaces):
    """Whatever comes over the line of answers and is none, is no result."""
    attempt = "try: os.write(fd, b'[1]\\n')\n    except OSError: pass"
    code = f"import os\nfor fd in range(3, 1024):\n    {attempt}"

    with pytest.raises(ToolError, match="Python has ended"):
        await python(workspaces, code)


async def test_cancelling_leaves_no_process(workspaces, tmp_path):
    """In the middle of a call, with what the code has started."""
    code = "import subprocess; subprocess.Popen(['sleep', '1000'])\nwhile True: pass"
    task = asyncio.create_task(python(workspaces, code))
    await until(lambda: any("sleep" in line for line in processes_in(tmp_path)))

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert processes_in(tmp_path) == []


async def test_reset_forgets_the_variables_and_keeps_the_files(workspaces):
    """As the tool says."""
    await python(workspaces, "x = 1; open('file', 'w').close()")

    await ResetTool(CodeExecutionConfig(), workspaces).run(CalledFunction("r", "{}"), place())

    again = await python(workspaces, "import os; os.listdir(), 'x' in globals()")
    assert again["result"] == "(['file'], False)"


async def test_environment_holds_no_secrets(workspaces, monkeypatch):
    """Only what programs need, and what is let through by name."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MY_FLAG", "yes")
    policy = SandboxPolicy(network="full", extra_env=["MY_FLAG", "OTHER=1"])
    code = "import os; ' '.join(sorted(os.environ)), os.environ['HOME'] == os.getcwd()"

    plain = await python(workspaces, code)
    more = await python(workspaces, code, session="more", sandbox_policy=policy)

    assert "HF_TOKEN" not in plain["result"] + more["result"]
    assert "MY_FLAG" not in plain["result"]
    assert "MY_FLAG OTHER" in more["result"]
    assert plain["result"].endswith("True)")


async def test_folder_of_the_user_stays(workspaces, tmp_path_factory):
    """`working_directory` is where code runs, and nobody removes it."""
    folder = tmp_path_factory.mktemp("mine")

    await python(workspaces, "open('kept', 'w').close()", working_directory=folder)
    await workspaces.aclose()

    assert (folder / "kept").is_file()


async def test_folder_is_removed_whatever_code_did_to_it(workspaces, tmp_path):
    """Also if rights were taken away; what a link leads to is not touched."""
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    outside.chmod(0o500)
    code = f"import os; os.makedirs('a/b'); os.symlink({str(outside)!r}, 'link'); os.chmod('a', 0)"

    await python(workspaces, code)
    workspaces.end_session("s")
    await workspaces.ended()

    assert list(tmp_path.iterdir()) == []
    assert outside.stat().st_mode & 0o777 == 0o500


async def test_session_that_nobody_uses_ends(tmp_path, monkeypatch):
    """After its idle time, process and folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workspaces = Workspaces(idle_seconds=0.1)
    await python(workspaces, "x = 1")
    assert processes_in(tmp_path)

    await asyncio.sleep(0.2)
    await workspaces.ended()

    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    await workspaces.aclose()


async def test_session_deleted_during_a_call_ends_no_later_one_of_its_name(tmp_path, monkeypatch):
    """The idle time of what was deleted says nothing about what has its name now."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workspaces = Workspaces(idle_seconds=0.1)
    async with workspaces.use(place()):
        workspaces.end_session("s")

    async with workspaces.use(place()) as later:
        await asyncio.sleep(0.2)
        answer = await later.run_python("1 + 1", CodeExecutionConfig())

    assert answer["result"] == "2"
    await workspaces.aclose()


async def test_nothing_runs_once_the_model_is_closed(workspaces):
    """A late call is told so."""
    await workspaces.aclose()

    with pytest.raises(ToolError, match="closed"):
        await python(workspaces, "1")


# Commands


async def test_command_gives_its_exit_code_and_both_outputs(workspaces):
    """As a shell tells them; there is no input to wait for."""
    answer = await shell(workspaces, "echo out; echo err >&2; cat; exit 3")

    assert answer == {"exit_code": 3, "stdout": "out\n", "stderr": "err\n"}


async def test_files_are_kept_between_commands_and_shared_with_python(workspaces):
    """One folder for each session."""
    await shell(workspaces, "echo 42 > answer")

    assert (await python(workspaces, "open('answer').read()"))["result"] == "'42\\n'"
    assert (await shell(workspaces, "ls", session="other"))["exit_code"] == 0


async def test_what_a_command_leaves_running_ends_with_it(workspaces, tmp_path):
    """In the background, detached or not: the command returns and nothing is left."""
    begun = time.monotonic()

    answer = await shell(
        workspaces, "sleep 1000 & setsid sleep 1000 & setsid -f sleep 1000; echo a"
    )

    assert answer == {"exit_code": 0, "stdout": "a\n"}
    assert time.monotonic() - begun < 10
    assert processes_in(tmp_path) == []


async def test_slow_command_is_ended(workspaces, tmp_path):
    """At its time limit, with what it printed so far."""
    with pytest.raises(ToolError, match=r"longer than 0\.5 s and was ended. It printed: a"):
        await shell(workspaces, "echo a; sleep 1000", timeout_secs=0.5)

    assert processes_in(tmp_path) == []


async def test_command_that_ignores_signals_is_ended(workspaces, tmp_path):
    """What can be ignored is not what ends it."""
    command = "trap '' HUP INT TERM; while true; do sleep 0.01; done"

    with pytest.raises(ToolError, match="longer than"):
        await shell(workspaces, command, timeout_secs=0.5)

    assert processes_in(tmp_path) == []


async def test_shell_fork_bomb_is_ended(workspaces, tmp_path):
    """Every process of it, with the reason in what the model reads."""
    policy = SandboxPolicy(max_procs=20, network="full")

    answer = await shell(workspaces, "f() { f | f & }; f; sleep 20", sandbox_policy=policy)

    assert answer["exit_code"] != 0 or "fork" in answer.get("stderr", "")
    assert processes_in(tmp_path) == []


async def test_endless_output_is_read_and_cut(workspaces):
    """A command that floods is ended by its time, not by memory."""
    with pytest.raises(ToolError, match="bytes left out") as caught:
        await shell(workspaces, "yes", timeout_secs=0.5)

    assert len(str(caught.value)) < MAX_OUTPUT + 300


async def test_shell_that_does_not_start_says_why(workspaces, tmp_path_factory):
    """A program that cannot be run gives the reason, not a silent code."""
    program = tmp_path_factory.mktemp("bin") / "sh"
    program.write_text("#!/no/such/shell\n")
    program.chmod(0o700)

    answer = await shell(workspaces, "x", shell_path=str(program))

    assert answer["exit_code"] == 126
    assert f"cannot run {program}" in answer["stderr"]


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
async def test_command_that_no_program_can_be_given_says_why(command, workspaces):
    """The text of an argument ends at a zero byte, and is UTF-8."""
    answer = await shell(workspaces, command)

    assert answer["exit_code"] == 126
    assert answer["stderr"].startswith("cannot run /bin/sh: ")


async def test_nothing_is_left_if_this_process_is_killed(tmp_path):
    """Whoever keeps the command notices, and ends it."""
    script = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from mistralrs_sdk.tools.child_process import ChildProcess\n"
        "async def main():\n"
        "    command = ['/bin/sh', '-c', 'setsid sleep 1000 & sleep 1000']\n"
        "    await ChildProcess.start(command, directory=Path(sys.argv[1]), policy=None)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path))
    await until(lambda: sum("sleep" in line for line in processes_in(tmp_path)) >= 2)

    parent.kill()
    await parent.wait()

    await until(lambda: processes_in(tmp_path) == [])


async def test_code_that_kills_its_keeper_dies_with_it(workspaces, tmp_path):
    """The call has no result, and the next one starts anew."""
    with pytest.raises(ToolError, match="Python has ended"):
        await python(workspaces, "import os, time; os.kill(os.getppid(), 9); time.sleep(9)")

    assert processes_in(tmp_path) == []
    assert (await python(workspaces, "1 + 1"))["result"] == "2"


async def test_skills_are_copies(workspaces, tmp_path_factory):
    """Commands find them, and what they change is not the original."""
    folder = tmp_path_factory.mktemp("skill")
    (folder / "run.sh").write_text("echo skilled")
    skill = ShellSkillMount("greet", "Greets.", folder)

    answer = await shell(
        workspaces, "sh skills/greet/run.sh; rm skills/greet/run.sh", skills=[skill]
    )

    assert answer["stdout"] == "skilled\n"
    assert (folder / "run.sh").exists()
    offered = ShellTool(ShellConfig(), workspaces, (skill,)).offered()
    assert "skills/greet: Greets." in (offered.function.description or "")


async def test_skill_is_not_copied_along_a_link(workspaces, tmp_path_factory):
    """Code that put a link where skills belong does not choose where they are written."""
    folder, outside = tmp_path_factory.mktemp("skill"), tmp_path_factory.mktemp("outside")
    (folder / "run.sh").write_text("echo skilled")
    await shell(workspaces, f"ln -s {outside} skills")

    with pytest.raises(ToolError, match="skills/greet cannot be put in place"):
        await shell(workspaces, "true", skills=[ShellSkillMount("greet", "Greets.", folder)])

    assert list(outside.iterdir()) == []


async def test_skill_that_nobody_may_write_to_is_copied(workspaces, tmp_path_factory):
    """As those of a read-only store are."""
    folder = tmp_path_factory.mktemp("skill")
    (folder / "run.sh").write_text("echo skilled")
    folder.chmod(0o500)

    answer = await shell(
        workspaces,
        "sh skills/greet/run.sh",
        skills=[ShellSkillMount("greet", "Greets.", folder)],
    )

    assert answer["stdout"] == "skilled\n"


# Confined


@confines
async def test_confined_code_writes_only_in_its_folder(workspaces, tmp_path_factory):
    """And reads only that and the system's files."""
    outside = tmp_path_factory.mktemp("private")
    (outside / "secret").write_text("token")
    code = (
        "def attempt(path, mode):\n"
        "    try: open(path, mode).close(); return True\n"
        "    except PermissionError: return False\n"
        f"private = {str(outside)!r}\n"
        "[attempt('mine', 'w'), attempt('/etc/hosts', 'r'), attempt(private + '/secret', 'r'),\n"
        " attempt(private + '/new', 'w'), attempt('/etc/new', 'w')]"
    )

    strict = await python(workspaces, code, sandbox_policy=SandboxPolicy())
    policy = SandboxPolicy(extra_fs_read=[outside])
    more = await python(workspaces, code, session="more", sandbox_policy=policy)

    assert strict["result"] == "[True, True, False, False, False]"
    assert more["result"] == "[True, True, True, False, False]"


@confines
async def test_confined_code_cannot_read_the_environment_of_this_process(workspaces):
    """Nor signal it: what it was not given it cannot take."""
    code = (
        f"import os\nthis = {os.getpid()}\n"
        "def attempt(do):\n"
        "    try: do(); return True\n"
        "    except PermissionError: return False\n"
        "[attempt(lambda: open(f'/proc/{this}/environ').read()), attempt(lambda: os.kill(this, 0))]"
    )

    confined = await python(workspaces, code, sandbox_policy=SandboxPolicy())

    assert confined["result"] == "[False, False]"


@confines
@pytest.mark.parametrize(
    ("network", "reached"),
    [("none", "[False, False]"), ("loopback", "[True, False]"), ("full", "[True, True]")],
)
async def test_network_is_what_the_policy_says(network, reached, workspaces):
    """Nothing, itself, or this machine's listeners, too."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = (
        "import socket\n"
        "def reaches(port):\n"
        "    try: socket.create_connection(('127.0.0.1', port), 2).close(); return True\n"
        "    except OSError: return False\n"
        "own = socket.socket(); own.bind(('127.0.0.1', 0)); own.listen()\n"
        f"[reaches(own.getsockname()[1]), reaches({port})]"
    )
    if network == "none":
        code = code.replace("own.bind(('127.0.0.1', 0)); ", "")

    async with server:
        answer = await python(
            workspaces, code, sandbox_policy=SandboxPolicy(network=NetworkMode(network))
        )

    assert answer.get("result") == reached, answer


@confines
@pytest.mark.parametrize("network", list(NetworkMode))
async def test_confined_root_has_the_rights_of_nobody(network, workspaces):
    """No devices, and no higher limits: both would lead out of the folder and the bounds."""
    answer = await shell(
        workspaces,
        "grep -h '^Cap\\(Inh\\|Prm\\|Eff\\|Amb\\)' /proc/self/status; mknod disk b 7 0",
        sandbox_policy=SandboxPolicy(network=network),
    )

    assert set(answer["stdout"].split()[1::2]) == {"0" * 16}
    assert answer["exit_code"] != 0


@confines
async def test_confined_processes_end_all_the_same(workspaces, tmp_path):
    """The keeper stands outside."""
    with pytest.raises(ToolError, match="longer than"):
        await shell(
            workspaces,
            "setsid sleep 1000 & sleep 1000",
            sandbox_policy=SandboxPolicy(),
            timeout_secs=0.5,
        )

    assert processes_in(tmp_path) == []
