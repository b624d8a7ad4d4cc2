"""Settings of running the model's code and commands: where, how long, and within which bounds."""

from __future__ import annotations

import enum
import math
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk.chat.tool_events import AgentPermission, ApprovalCallback, require_permission
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.unsupported import unsupported


class NetworkMode(enum.StrEnum):
    """What a confined process reaches: nothing, itself over 127.0.0.1, or everything."""

    NONE = "none"
    LOOPBACK = "loopback"
    Loopback = LOOPBACK  # mistral.rs' name
    FULL = "full"
    Full = FULL


def _at_least_one(instance: Any, field: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{field.name} ({value!r}) must be a whole number of at least 1")


def _seconds(instance: Any, field: Any, value: Any) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if not valid or not 0 < value < math.inf:
        raise ConfigError(f"{field.name} ({value!r}) must be a number of seconds above 0")


def _mode(value: Any) -> NetworkMode:
    try:
        return NetworkMode(value)
    except ValueError:
        known = ", ".join(NetworkMode)
        raise ConfigError(f"network ({value!r}) must be one of {known}") from None


def _permission(value: Any) -> AgentPermission:
    try:
        return require_permission(value)
    except RequestError as error:
        raise ConfigError(str(error).removeprefix("agent_")) from None


def _paths(values: Any) -> tuple[str, ...]:
    if isinstance(values, str | os.PathLike):
        raise ConfigError(f"paths ({values!r}) must be a list of them")
    return tuple(os.path.abspath(value) for value in values)


def _names(values: Any) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ConfigError(f"extra_env ({values!r}) must be a list of NAME or NAME=value")
    return tuple(values)


def _variables(instance: Any, field: Any, value: tuple[Any, ...]) -> None:
    for each in value:
        if not isinstance(each, str) or not each.partition("=")[0]:
            raise ConfigError(f"extra_env ({each!r}) must be NAME or NAME=value")


def _without_values(variables: tuple[str, ...]) -> str:
    split = (each.partition("=") for each in variables)
    return repr(tuple(name + ("=..." if given else "") for name, given, _ in split))


def _directory(value: Any) -> Path | None:
    return None if value is None else Path(os.path.abspath(value))


def _is_directory(instance: Any, field: Any, value: Path | None) -> None:
    if value is not None and not value.is_dir():
        raise ConfigError(f"working_directory ({str(value)!r}) must be a folder that is there")


def _callable(instance: Any, field: Any, value: Any) -> None:
    if value is not None and not callable(value):
        raise ConfigError(f"approval_callback ({value!r}) must be callable")


@attrs.frozen(kw_only=True)
class SandboxPolicy:
    """Bounds of the processes that run for the model; a config that has one confines them, too.

    Confined: they write only below their working directory, read only that, the system's and
    Python's own files, signal none but each other, and have the network that `network` says. That
    is Landlock and namespaces of the Linux kernel; `docs/tools.md` says what it does not keep out.

    Raises:
        ConfigError: a number is below 1, or a value is of another kind.
        UnsupportedError: `session_workdir` is given.
    """

    max_memory_mb: int = attrs.field(default=2048, validator=_at_least_one)
    """MiB of address space of each process."""
    max_cpu_secs: int = attrs.field(default=600, validator=_at_least_one)
    """Seconds of processor time of each process."""
    max_procs: int = attrs.field(default=64, validator=_at_least_one)
    """Processes at once, of one command or one session of Python; more end all of them."""
    max_open_fds: int = attrs.field(default=1024, validator=_at_least_one)
    """Open files of each process."""
    max_file_sz_mb: int = attrs.field(default=256, validator=_at_least_one)
    """MiB of each file; how many there are is not bounded."""
    network: NetworkMode = attrs.field(default=NetworkMode.LOOPBACK, converter=_mode)
    extra_fs_read: tuple[str, ...] = attrs.field(default=(), converter=_paths)
    """Files and folders that may be read, too."""
    extra_fs_write: tuple[str, ...] = attrs.field(default=(), converter=_paths)
    """Files and folders that may be read and changed, too."""
    extra_env: tuple[str, ...] = attrs.field(
        default=(), converter=_names, validator=_variables, repr=_without_values
    )
    """Variables beside the few there are: NAME lets this process' value through, or NAME=value.

    Values are never shown.
    """
    strict: bool = False
    """Fail `build()` where the kernel cannot confine as asked, instead of warning."""
    session_workdir: Any = unsupported()


def _policy(instance: Any, field: Any, value: Any) -> None:
    if value is not None and not isinstance(value, SandboxPolicy):
        raise ConfigError(f"sandbox_policy ({value!r:.80}) must be a SandboxPolicy, or None")


def _program(name: str, value: str) -> str:
    found = shutil.which(value)
    if found is None:
        raise ConfigError(f"{name} ({value!r}) is no program that can be run")
    return os.path.abspath(found)


@attrs.frozen(kw_only=True)
class _WhereAndWhether:
    """What both configs say."""

    working_directory: Path | None = attrs.field(
        default=None, converter=_directory, validator=_is_directory
    )
    """A folder of yours for all sessions, which stays; None: one for each, which is removed."""
    sandbox_policy: SandboxPolicy | None = attrs.field(default=None, validator=_policy)
    """None: its default limits, but with all your rights to files and the network."""
    permission: AgentPermission = attrs.field(default=AgentPermission.AUTO, converter=_permission)
    """Whether calls run at once, after asking, or not; a request may be stricter only."""
    approval_callback: ApprovalCallback | None = attrs.field(default=None, validator=_callable)
    """Who is asked where the request names nobody."""


@attrs.frozen(kw_only=True)
class CodeExecutionConfig(_WhereAndWhether):
    """How Python of the model is run: `ModelBuilder(...).with_code_execution(this)`.

    Raises:
        ConfigError: there is no such program or folder, or a value is out of range.
    """

    python_path: str | None = None
    """The interpreter; None: the one that runs this."""
    timeout_secs: float = attrs.field(default=60, validator=_seconds)
    """Seconds for each call; one that takes longer ends the process, and its variables are gone."""

    def program(self) -> str:
        """The interpreter's path.

        Raises:
            ConfigError: there is none.
        """
        return _program("python_path", self.python_path or sys.executable)


@attrs.frozen(kw_only=True)
class ShellConfig(_WhereAndWhether):
    """How commands of the model are run: `ModelBuilder(...).with_shell_execution(this)`.

    Raises:
        ConfigError: there is no such program or folder, or a value is out of range.
    """

    shell_path: str = "/bin/sh"
    """Gets each command after `-c`."""
    timeout_secs: float = attrs.field(default=600, validator=_seconds)
    """Seconds for each command."""

    def program(self) -> str:
        """The shell's path.

        Raises:
            ConfigError: there is none.
        """
        return _program("shell_path", self.shell_path)


ExecutionConfig = CodeExecutionConfig | ShellConfig
"""How one of the two is run."""


def strictest(permissions: Iterable[AgentPermission | None]) -> AgentPermission:
    """The permission that lets the least run; None says nothing."""
    order = list(AgentPermission)
    return max((p for p in permissions if p is not None), key=order.index, default=order[0])
