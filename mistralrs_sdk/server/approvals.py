"""Calls of tools that wait until a client decides: `POST /v1/agent/approvals/{approval_id}`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mistralrs_sdk import AgentToolApproval, AgentToolApprovalDecision, ConfigError
from mistralrs_sdk.server.errors import HttpError, read_json
from mistralrs_sdk.server.translation import check_keys, invalid, switch, text

APPROVAL_SECONDS = 300.0
"""How long a call waits; then it is denied."""

EVENT = "agentic_tool_approval_required"
"""The name of the event that asks."""

_DECISIONS = ("approve", "deny")


class WaitingCalls:
    """The calls that wait for a decision, by the id of their approval.

    Raises:
        ConfigError: `seconds` is not above 0.
    """

    def __init__(self, *, seconds: float = APPROVAL_SECONDS) -> None:
        if not seconds > 0:
            raise ConfigError(f"seconds ({seconds!r}) must be above 0: a call must wait somehow")
        self.seconds = seconds
        """How long each waits."""
        self._waiting: dict[str, asyncio.Future[AgentToolApprovalDecision]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def decision(self, approval: AgentToolApproval) -> AgentToolApprovalDecision:
        """Wait until somebody decides; what nobody decides about in time is denied."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[approval.approval_id] = future
        try:
            async with asyncio.timeout(self.seconds):
                return await future
        except TimeoutError:
            return AgentToolApprovalDecision.deny(
                f"the call of {approval.tool.label} was denied: nobody decided about it within "
                f"{self.seconds:g} s"
            )
        finally:
            self._waiting.pop(approval.approval_id, None)

    def settle(self, approval_id: str, decision: AgentToolApprovalDecision) -> bool:
        """Decide about a call; False if none waits under this id (any more)."""
        future = self._waiting.pop(approval_id, None)
        if future is None or future.done():
            return False
        future.set_result(decision)
        return True


class Asking:
    """Asks the client of one stream: what waits comes out between the items of its answer."""

    def __init__(self, waiting: WaitingCalls) -> None:
        self._waiting = waiting
        self._asked: asyncio.Queue[AgentToolApproval] = asyncio.Queue()

    async def ask(self, approval: AgentToolApproval) -> AgentToolApprovalDecision:
        """The callback of the request."""
        self._asked.put_nowait(approval)
        return await self._waiting.decision(approval)

    async def among(self, items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the items of an answer as they come, and the approvals that are asked for."""
        coming: asyncio.Task[Any] = asyncio.ensure_future(_next(items))
        asked = asyncio.ensure_future(self._asked.get())
        try:
            while True:
                await asyncio.wait({coming, asked}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    yield asked.result()
                    asked = asyncio.ensure_future(self._asked.get())
                    continue
                item = coming.result()
                if item is None:
                    return
                yield item
                coming = asyncio.ensure_future(_next(items))
        finally:
            for task in (coming, asked):
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(coming, asked, return_exceptions=True)


def routes(waiting: WaitingCalls) -> list[Route]:
    """The routes of this module."""

    async def decide(request: Request) -> JSONResponse:
        """Approve or deny a call that waits."""
        approval_id = request.path_params["approval_id"]
        if not waiting.settle(approval_id, _decision(await read_json(request))):
            raise HttpError(
                404,
                f"no call waits for the approval {approval_id!r:.80} (any more): it was decided "
                f"about, its client has left, or {waiting.seconds:g} s have passed",
                code="approval_not_found",
                param="approval_id",
            )
        return JSONResponse({"status": "resolved"})

    return [Route("/v1/agent/approvals/{approval_id}", decide, methods=["POST"])]


def approval_data(approval: AgentToolApproval) -> dict[str, Any]:
    """Return the data of the event that asks."""
    return {"type": EVENT, **attrs.asdict(approval), "arguments": _parsed(approval.arguments)}


def _decision(body: dict[str, Any]) -> AgentToolApprovalDecision:
    given = check_keys(body, known=("decision", "message", "remember_for_session"), refused={})
    what = given.get("decision")
    if what not in _DECISIONS:
        raise invalid("decision", f'({what!r:.80}) must be "approve" or "deny"')
    remember = switch("remember_for_session", given.get("remember_for_session", False))
    message = text("message", given["message"]) if "message" in given else None
    if what == "deny":
        if remember:
            raise invalid("remember_for_session", "has no effect on a denial: leave it out")
        return AgentToolApprovalDecision.deny(message)
    if message is not None:
        raise invalid("message", "has no effect on an approval: the model reads the tool's result")
    return AgentToolApprovalDecision(True, remember)


def _parsed(arguments: str) -> Any:
    """What the text says; the text itself where that could not be sent again as JSON."""
    try:
        data = json.loads(arguments)
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return data


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items, None)
