"""Tools that another process answers over HTTP, at a dispatch URL."""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.request
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import attrs

from mistralrs_sdk.chat.tool_events import ToolCallContext, ToolKind, ToolSource
from mistralrs_sdk.chat.tools import CalledFunction
from mistralrs_sdk.tools.callbacks import NO_GUARD, ToolError, ToolGuard, arguments_of

MAX_RESULT_BYTES = 8 * 2**20
"""What a dispatch URL may answer with."""


@attrs.frozen
class DispatchedTool:
    """Posts calls to a URL: `{"name", "arguments"}` there, text or `{"content"}` back."""

    source: ClassVar[ToolSource] = "external"
    kind: ClassVar[ToolKind] = "external"

    url: str
    timeout: float | None = None
    """Seconds without a byte after which a call fails; None: never."""
    guard: ToolGuard = NO_GUARD

    async def run(self, call: CalledFunction, context: ToolCallContext) -> str:
        """Post the call and return what the URL answers.

        Raises:
            ToolError: the URL cannot be reached or answers with an error.
        """
        body = json.dumps({"name": call.name, "arguments": arguments_of(call)}).encode()
        answer = await anyio.to_thread.run_sync(
            functools.partial(_post, self.url, body, timeout=self.timeout),
            abandon_on_cancel=True,
            limiter=anyio.CapacityLimiter(1),
        )
        return _content(answer)


def _post(url: str, body: bytes, *, timeout: float | None) -> str:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            content = response.read(MAX_RESULT_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(500).decode(errors="replace")
        raise ToolError(f"the tool's server answered {error.code}: {reason}") from None
    except OSError as error:  # URLError is one, and so is a timeout
        raise ToolError(f"the tool's server cannot be reached: {error}") from error
    if len(content) > MAX_RESULT_BYTES:
        raise ToolError(f"the tool's server answered with more than {MAX_RESULT_BYTES} bytes")
    return content.decode(errors="replace")


def _content(answer: str) -> str:
    try:
        data: Any = json.loads(answer)
    except json.JSONDecodeError:
        return answer
    if isinstance(data, dict) and "content" in data:
        data = data["content"]
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
