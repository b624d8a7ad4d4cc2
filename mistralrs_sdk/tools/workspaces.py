"""`Workspaces`: the folders and processes of the conversations in which the model's code runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from mistralrs_sdk.chat.execution_options import ShellSkillMount
from mistralrs_sdk.chat.tool_events import ToolCallContext
from mistralrs_sdk.tools.callbacks import ToolError
from mistralrs_sdk.tools.child_process import ChildProcess
from mistralrs_sdk.tools.execution_config import CodeExecutionConfig, ShellConfig
from mistralrs_sdk.tools.python_session import PythonSession

logger = logging.getLogger(__name__)

_Key = tuple[str, str]


class Workspace:
    """What belongs to one conversation: a folder, a session of Python, commands that run."""

    def __init__(self) -> None:
        self.uses = 0
        self.expiry: asyncio.TimerHandle | None = None
        self._python: PythonSession | None = None
        self._one_by_one = asyncio.Lock()
        """Calls of one session of Python wait for each other."""
        self._commands: set[ChildProcess] = set()
        self._folder: Path | None = None
        self._making = asyncio.Lock()
        self._closed = False

    async def run_python(self, code: str, config: CodeExecutionConfig) -> dict[str, str]:
        """Run code after what ran before it in this conversation; see `PythonSession.run`.

        Raises:
            ToolError: there is no result.
        """
        async with self._one_by_one:
            session = self._python
            if session is None or not session.is_usable:
                await self._end_python()
                directory = config.working_directory or await self._own_folder()
                self._check_open()
                session = self._python = await PythonSession.start(config, directory)
            if self._closed:  # meanwhile
                await self._end_python()
                self._check_open()
            return await session.run(code, timeout=config.timeout_secs)

    async def reset_python(self) -> None:
        """Let the next code start with nothing, after what runs has ended."""
        async with self._one_by_one:
            await self._end_python()

    async def run_command(
        self, command: str, config: ShellConfig, skills: tuple[ShellSkillMount, ...]
    ) -> tuple[int, dict[str, str]]:
        """Run a shell command; returns its exit code, and what of stdout and stderr there is.

        Whatever it leaves running is ended with it.

        Raises:
            ToolError: it took too long.
        """
        directory = config.working_directory or await self._own_folder(skills)
        self._check_open()
        process = await ChildProcess.start(
            [config.program(), "-c", command], directory=directory, policy=config.sandbox_policy
        )
        self._commands.add(process)
        try:
            self._check_open()  # it may have ended meanwhile
            async with asyncio.timeout(config.timeout_secs):
                code = await process.wait()
        except TimeoutError:
            await process.aclose()
            printed = process.output.take() + process.errors.take()
            raise ToolError(
                f"the command took longer than {config.timeout_secs:g} s and was ended"
                + (f". It printed: {printed}" if printed else "")
            ) from None
        finally:
            self._commands.discard(process)
            printed = {"stdout": process.output.take(), "stderr": process.errors.take()}
            await process.aclose()
        self._check_open()
        return code, {key: text for key, text in printed.items() if text}

    async def aclose(self) -> None:
        """End what runs and remove the folder. Harmless when repeated."""
        self._closed = True
        if self.expiry is not None:
            self.expiry.cancel()
        ending = [process.aclose() for process in self._commands]
        await asyncio.gather(self._end_python(), *ending)
        async with self._making:
            folder, self._folder = self._folder, None
            if folder is not None:
                await anyio.to_thread.run_sync(_remove, folder)

    async def _end_python(self) -> None:
        session, self._python = self._python, None
        if session is not None:
            await session.aclose()

    async def _own_folder(self, skills: tuple[ShellSkillMount, ...] = ()) -> Path:
        async with self._making:
            self._check_open()
            if self._folder is None:
                self._folder = await anyio.to_thread.run_sync(_new_folder)
            for skill in skills:
                await anyio.to_thread.run_sync(_copy_skill, skill, self._folder)
            return self._folder

    def _check_open(self) -> None:
        if self._closed:
            raise ToolError("the session has ended")


class Workspaces:
    """The workspace of each session, and of each request without one, of one model."""

    def __init__(self, *, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._open: dict[_Key, Workspace] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def use(self, context: ToolCallContext) -> AsyncGenerator[Workspace, None]:
        """The workspace that a call belongs to; it does not expire while it is in use.

        Raises:
            ToolError: the model is closed.
        """
        if self._closed:
            raise ToolError("the model is closed")
        key = _key(context)
        workspace = self._open.get(key)
        if workspace is None:
            workspace = self._open[key] = Workspace()
        workspace.uses += 1
        if workspace.expiry is not None:
            workspace.expiry.cancel()
        try:
            yield workspace
        finally:
            workspace.uses -= 1
            if workspace.uses == 0 and self._open.get(key) is workspace:
                loop = asyncio.get_running_loop()
                workspace.expiry = loop.call_later(self._idle_seconds, self._end, key)

    def end_session(self, session_id: str) -> None:
        """Begin to end what runs in a session, and forget its folder."""
        self._end(("session", session_id))

    def end_request(self, request_id: str) -> None:
        """Begin to end what runs for a request without a session, and forget its folder."""
        self._end(("request", request_id))

    async def aclose(self) -> None:
        """End everything, let nothing begin any more, and wait until all has ended."""
        self._closed = True
        for key in list(self._open):
            self._end(key)
        while self._closing:
            await asyncio.wait(self._closing)

    async def ended(self) -> None:
        """Wait until what began to end has ended."""
        if self._closing:
            await asyncio.wait(self._closing)

    def _end(self, key: _Key) -> None:
        workspace = self._open.pop(key, None)
        if workspace is not None:
            task = asyncio.get_running_loop().create_task(workspace.aclose())
            self._closing.add(task)
            task.add_done_callback(self._note_closed)

    def _note_closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a working directory was not cleaned up", exc_info=error)


def _key(context: ToolCallContext) -> _Key:
    if context.session_id is not None:
        return "session", context.session_id
    return "request", context.request_id or ""


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="mistralrs_sdk-")).resolve()


def _copy_skill(skill: ShellSkillMount, folder: Path) -> None:
    """Put a copy at `skills/<name>`, and nowhere else whatever links code has put there.

    What is there already stays.

    Raises:
        ToolError: something is in the way.
    """
    if os.path.lexists(folder / "skills" / skill.name):
        return
    made = _new_folder()
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, made, ignore_errors=True)
        copy = shutil.copytree(skill.source_path, made / skill.name, symlinks=True)
        copy.chmod(0o700)  # a folder that may not be written to cannot be moved
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            top = os.open(folder, flags)
            undo.callback(os.close, top)
            with contextlib.suppress(FileExistsError):
                os.mkdir("skills", 0o700, dir_fd=top)
            skills = os.open("skills", flags, dir_fd=top)
            undo.callback(os.close, skills)
            os.rename(copy, skill.name, dst_dir_fd=skills)
        except OSError as error:
            raise ToolError(f"skills/{skill.name} cannot be put in place: {error}") from error


def _remove(folder: Path) -> None:
    """Remove a folder, also where its owner took away their own rights."""
    folder.chmod(0o700)
    for place, below, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in below):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("the working directory %s cannot be removed: remove it yourself", folder)
