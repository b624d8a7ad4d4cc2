"""The tools with which the model runs Python and shell commands, and what answers their calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

import attrs

from mistralrs_sdk.chat.execution_options import ExecutionOptions, ShellSkillMount
from mistralrs_sdk.chat.tool_events import ToolCallContext, ToolKind, ToolSource
from mistralrs_sdk.chat.tools import CalledFunction, Function, Tool
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.tools.callbacks import ToolError, ToolGuard, arguments_of, result_text
from mistralrs_sdk.tools.child_process import unconfined
from mistralrs_sdk.tools.execution_config import (
    CodeExecutionConfig,
    ExecutionConfig,
    NetworkMode,
    ShellConfig,
)
from mistralrs_sdk.tools.workspaces import Workspaces

EXECUTE_PYTHON = "mistralrs_execute_python"
RESET_PYTHON = "mistralrs_reset_python_session"
EXECUTE_SHELL = "mistralrs_execute_shell"

_Config = TypeVar("_Config", CodeExecutionConfig, ShellConfig)


@attrs.frozen
class _BuiltIn(Generic[_Config]):
    """What the tools have in common."""

    source: ClassVar[ToolSource] = "built_in"

    config: _Config
    workspaces: Workspaces

    @property
    def guard(self) -> ToolGuard:
        """What the builder said about asking."""
        return ToolGuard(self.config.permission, self.config.approval_callback)


@attrs.frozen
class PythonTool(_BuiltIn[CodeExecutionConfig]):
    """Runs code in the conversation's session of Python."""

    kind: ClassVar[ToolKind] = "code_execution"

    def offered(self) -> Tool:
        """The tool as the model sees it."""
        description = (
            "Run Python code and return what it prints and the value of its last expression. "
            "Variables, imports and files in the current folder are kept from call to call. There "
            f"is no input. A call may take {self.config.timeout_secs:g} seconds; one that takes "
            "longer is ended and all variables are lost."
        )
        return _tool(EXECUTE_PYTHON, description, {"code": "The Python code."})

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Run the code of a call.

        Raises:
            ToolError: it took too long, or the process ended.
        """
        code = _text(call, "code")
        async with self.workspaces.use(context) as workspace:
            answer = await workspace.run_python(code, self.config)
        status = "error" if "exception" in answer else "success"
        return result_text({"status": status, **answer})


@attrs.frozen
class ResetTool(_BuiltIn[CodeExecutionConfig]):
    """Ends the conversation's session of Python, so that the next call starts with nothing."""

    kind: ClassVar[ToolKind] = "code_execution"

    def offered(self) -> Tool:
        """The tool as the model sees it."""
        description = "Forget all Python variables and imports, and end what they left running."
        return _tool(RESET_PYTHON, description, {})

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """End the session, if there is one."""
        async with self.workspaces.use(context) as workspace:
            await workspace.reset_python()
        return result_text({"status": "success"})


@attrs.frozen
class ShellTool(_BuiltIn[ShellConfig]):
    """Runs commands in the conversation's folder."""

    kind: ClassVar[ToolKind] = "shell"

    skills: tuple[ShellSkillMount, ...] = ()

    def offered(self) -> Tool:
        """The tool as the model sees it, with the skills of the request."""
        description = (
            "Run a shell command and return its exit code and what it prints. Each command is a "
            "shell of its own: files in the current folder are kept from call to call, variables "
            "and running programs are not. There is no input. A command may take "
            f"{self.config.timeout_secs:g} seconds."
        )
        if self.skills:
            listed = "; ".join(f"skills/{each.name}: {each.description}" for each in self.skills)
            description += f" Folders to use, each with what it is for: {listed}."
        return _tool(EXECUTE_SHELL, description, {"command": "The command."})

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Run the command of a call.

        Raises:
            ToolError: it took too long.
        """
        command = _text(call, "command")
        async with self.workspaces.use(context) as workspace:
            code, printed = await workspace.run_command(command, self.config, self.skills)
        return result_text({"exit_code": code, **printed})


BuiltInTool = PythonTool | ResetTool | ShellTool


def built_in_tools(
    wanted: ExecutionOptions,
    code: CodeExecutionConfig | None,
    shell: ShellConfig | None,
    workspaces: Workspaces,
) -> dict[str, BuiltInTool]:
    """The tools that a request opts in to, by name.

    Raises:
        RequestError: the model was not built for them.
    """
    tools: dict[str, BuiltInTool] = {}
    if wanted.code:
        if code is None:
            raise RequestError(_not_built_for("with_code_execution", "CodeExecutionConfig()"))
        tools[EXECUTE_PYTHON] = PythonTool(code, workspaces)
        tools[RESET_PYTHON] = ResetTool(code, workspaces)
    if wanted.shell is not None:
        if shell is None:
            raise RequestError(_not_built_for("with_shell_execution", "ShellConfig()"))
        if wanted.shell.skills and shell.working_directory is not None:
            raise RequestError(
                f"shell skills are copied into a folder that is removed, not into yours "
                f"(working_directory {str(shell.working_directory)!r}): leave one of the two out"
            )
        tools[EXECUTE_SHELL] = ShellTool(shell, workspaces, wanted.shell.skills)
    return tools


def what_it_means(configs: Iterable[tuple[str, ExecutionConfig]]) -> list[str]:
    """What to warn of for each of these; asks the kernel what it can do.

    Raises:
        ConfigError: a strict policy cannot be kept here.
    """
    warnings: list[str] = []
    for name, config in configs:
        policy = config.sandbox_policy
        if policy is None:
            warnings.append(
                f"{name} lets the model run what it writes with your rights: it can read, change "
                "and send whatever you can, and only time, output, memory and processes are "
                "limited. Give it a sandbox_policy, or a machine of its own"
            )
            continue
        found = unconfined(policy.network).items()
        gaps = ", ".join(f"{name} ({reason})" for name, reason in found)
        if gaps and policy.strict:
            raise ConfigError(
                f"{name}: this machine cannot confine {gaps}, and the sandbox_policy is "
                "strict: change the machine, or say strict=False to do without"
            )
        if gaps:
            warnings.append(
                f"{name} lets the model run what it writes, and this machine cannot confine "
                f"{gaps}: there it has your rights"
            )
        elif policy.network is NetworkMode.FULL:
            warnings.append(
                f"{name} lets the model run what it writes: its files are confined, its network "
                "is not"
            )
        else:
            warnings.append(
                f"{name} lets the model run what it writes: its files and its network are "
                "confined, which is less than a virtual machine"
            )
    return warnings


def _not_built_for(method: str, config: str) -> str:
    return (
        f"{method}(): the model was built without it: it is off until whoever builds the model "
        f"says ModelBuilder(...).{method}({config})"
    )


def _tool(name: str, description: str, arguments: dict[str, str]) -> Tool:
    properties = {
        argument: {"type": "string", "description": text} for argument, text in arguments.items()
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Tool(Function(name, description, parameters, strict=True))


def _text(call: CalledFunction, argument: str) -> str:
    value = arguments_of(call).get(argument)
    if not isinstance(value, str):
        raise ToolError(f"{call.name} needs {argument!r}, a string")
    return value
