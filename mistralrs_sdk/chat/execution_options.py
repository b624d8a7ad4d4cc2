"""What a request says about running the model's code and commands, and the methods that say it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from mistralrs_sdk.chat.messages import flag
from mistralrs_sdk.chat.tool_events import AgentPermission, require_permission
from mistralrs_sdk.errors import RequestError

_SKILL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def _skill_name(instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str) or _SKILL_NAME.fullmatch(value) is None:
        raise RequestError(
            f"name of a shell skill ({value!r}) must be letters, digits, '_', '-' and '.', at most "
            "64 of them: it is the name of a folder"
        )


def _skill_text(instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise RequestError(
            f"description of shell skill {instance.name!r} ({value!r}) must be a text: the model "
            "reads it to know what the skill is for"
        )


def _skill_folder(instance: Any, field: Any, value: Any) -> None:
    if not value.is_dir():
        raise RequestError(
            f"source_path of shell skill {instance.name!r} ({str(value)!r}) must be a folder"
        )


def _as_path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise RequestError(f"source_path of a shell skill ({value!r}) must be the path of a folder")
    return Path(value)


@attrs.frozen
class ShellSkillMount:
    """A folder that commands find a copy of, as `skills/<name>` in their working directory.

    Raises:
        RequestError: the name is no name of a folder, or there is no such folder.
    """

    name: str = attrs.field(validator=_skill_name)
    description: str = attrs.field(validator=_skill_text)
    """What the model is told it is for."""
    source_path: Path = attrs.field(converter=_as_path, validator=_skill_folder)


def _skills(given: Iterable[ShellSkillMount]) -> tuple[ShellSkillMount, ...]:
    skills = tuple(given)
    names = [skill.name if isinstance(skill, ShellSkillMount) else None for skill in skills]
    if None in names:
        raise RequestError(f"shell skills ({skills!r:.120}) must be ShellSkillMount values")
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two shell skills are called {name!r}: rename one")
    return skills


@attrs.frozen(kw_only=True)
class ShellOptions:
    """What commands of one request find beside an empty working directory.

    Raises:
        RequestError: two skills have the same name.
    """

    skills: tuple[ShellSkillMount, ...] = attrs.field(default=(), converter=_skills)


@attrs.frozen(kw_only=True)
class ExecutionOptions:
    """What of the model's code and commands one request lets run."""

    code: bool = False
    shell: ShellOptions | None = None
    """None: no commands."""
    code_permission: AgentPermission | None = None
    """For code, beside the request's permission for every tool: the stricter one counts."""


class ExecutionMethods:
    """The methods of a request that let the model's code and commands run."""

    __slots__ = ()

    execution: ExecutionOptions

    def with_code_execution(self, enable: bool = True) -> Self:
        """Let the model run Python, in a process that keeps its variables as long as the session.

        Default: it may not. Without a session it lasts as long as this request. The model must have
        been built with `ModelBuilder.with_code_execution`, else sending is a RequestError.
        """
        return self._execution(code=flag("code_execution", enable))

    def with_code_execution_permission(self, permission: AgentPermission | str) -> Self:
        """Run code at once (auto, the default), after asking (ask), or refuse it (deny).

        The strictest of this, `with_agent_permission` and what the model was built with counts.
        """
        return self._execution(code_permission=require_permission(permission))

    def with_shell_execution(self, enable: bool = True) -> Self:
        """Let the model run shell commands, each in a process of its own.

        Default: it may not. The model must have been built with
        `ModelBuilder.with_shell_execution`, else sending is a RequestError.
        """
        shell = (self.execution.shell or ShellOptions()) if flag("shell", enable) else None
        return self._execution(shell=shell)

    def with_shell_options(self, options: ShellOptions) -> Self:
        """As `with_shell_execution`, with these skills instead of those said before."""
        if not isinstance(options, ShellOptions):
            raise RequestError(f"shell options ({options!r:.80}) must be ShellOptions")
        return self._execution(shell=options)

    def with_shell_skill(
        self, name: str, description: str, source_path: str | os.PathLike[str]
    ) -> Self:
        """As `with_shell_execution`, where commands find a copy of this folder as `skills/<name>`.

        Raises:
            RequestError: there is no such folder, or a skill of that name.
        """
        skill = ShellSkillMount(name, description, Path(source_path))
        known = () if self.execution.shell is None else self.execution.shell.skills
        return self._execution(shell=ShellOptions(skills=(*known, skill)))

    def _execution(self, **changes: Any) -> Self:
        execution = attrs.evolve(self.execution, **changes)
        return attrs.evolve(self, execution=execution)  # type: ignore[misc]

    if TYPE_CHECKING:
        __attrs_attrs__: Any  # a request is an attrs class
