"""`PythonSession`: a process that runs pieces of Python and keeps their variables."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Self

from mistralrs_sdk.tools import python_worker
from mistralrs_sdk.tools.callbacks import ToolError
from mistralrs_sdk.tools.child_process import MAX_OUTPUT, ChildProcess
from mistralrs_sdk.tools.execution_config import CodeExecutionConfig

_WORKER = os.path.abspath(python_worker.__file__)
_MAX_ANSWER = 16 * MAX_OUTPUT
"""Bytes of an answer: the worker cuts its texts, so more is not from the worker."""


class PythonSession:
    """Python of the model in a process of its own; `aclose()` must follow, whatever happens."""

    def __init__(self, process: ChildProcess, *, requests_fd: int, answers_fd: int) -> None:
        self._process = process
        self._requests_fd = requests_fd
        self._answers_fd = answers_fd
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, str] | None] | None = None
        self._received = bytearray()
        self._lost = self._closed = False
        os.set_blocking(requests_fd, False)
        os.set_blocking(answers_fd, False)
        self._loop.add_reader(answers_fd, self._receive)

    @classmethod
    async def start(cls, config: CodeExecutionConfig, directory: Path) -> Self:
        """Start the process; what fails in that shows in the first `run`."""
        with contextlib.ExitStack() as undo:
            taken, requests = os.pipe()
            answers, given = os.pipe()
            for fd in (taken, requests, answers, given):
                undo.callback(os.close, fd)
            process = await ChildProcess.start(
                [config.program(), "-I", "-u", _WORKER, str(taken), str(given), str(MAX_OUTPUT)],
                directory=directory,
                policy=config.sandbox_policy,
                also_read=[_WORKER],
                pass_fds=(taken, given),
            )
            undo.pop_all()
        os.close(taken)
        os.close(given)
        return cls(process, requests_fd=requests, answers_fd=answers)

    @property
    def is_usable(self) -> bool:
        """Whether it can take another call."""
        return not (self._lost or self._closed or self._process.has_ended)

    async def run(self, code: str, *, timeout: float) -> dict[str, str]:
        """Run code; returns what of stdout, stderr, result and exception there is.

        Whatever ends it early ends the process.

        Raises:
            ToolError: it took longer than `timeout` seconds, or the process is gone.
        """
        self._answer = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._send(json.dumps({"code": code}).encode() + b"\n")
                answer = await self._answer
        except TimeoutError:
            await self.aclose()
            raise ToolError(
                f"the code took longer than {timeout:g} s and was ended; its variables are gone"
                + self._printed()
            ) from None
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._answer = None
        if answer is None:
            await self.aclose()
            raise ToolError("Python has ended, and its variables are gone" + self._printed())
        printed = {"stdout": self._process.output.take(), "stderr": self._process.errors.take()}
        return {key: text for key, text in {**printed, **answer}.items() if text}

    async def aclose(self) -> None:
        """End the process with everything it has started. Harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._answers_fd)
            os.close(self._requests_fd)
            os.close(self._answers_fd)
            self._settle(None)
        await self._process.aclose()

    def _printed(self) -> str:
        printed = self._process.output.take() + self._process.errors.take()
        return f". It printed: {printed}" if printed else ""

    async def _send(self, data: bytes) -> None:
        """Write it piece by piece: code may be longer than a pipe holds."""
        while data and not self._closed:
            try:
                data = data[os.write(self._requests_fd, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except BrokenPipeError:
                self._settle(None)
                return

    def _receive(self) -> None:
        try:
            data = os.read(self._answers_fd, 2**16)
        except BlockingIOError:
            return
        self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if newline:
            self._received = rest
            self._settle(_read_answer(line))
        elif not data or len(self._received) > _MAX_ANSWER:
            self._lost = True  # maybe between two calls
            self._loop.remove_reader(self._answers_fd)
            self._settle(None)

    def _settle(self, answer: dict[str, str] | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)


def _read_answer(line: bytes | bytearray) -> dict[str, str] | None:
    """What the worker wrote; None if it was not the worker."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    valid = isinstance(answer, dict) and all(isinstance(text, str) for text in answer.values())
    return answer if valid else None
