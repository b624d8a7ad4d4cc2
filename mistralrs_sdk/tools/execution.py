"""The calls of one round: approved one after the other, executed side by side."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable

import attrs

from mistralrs_sdk.chat.tool_events import (
    AgenticToolCallRecord,
    AgentPermission,
    AgentToolApproval,
    AgentToolApprovalDecision,
    AgentToolMetadata,
    ApprovalCallback,
    ToolCallContext,
)
from mistralrs_sdk.chat.tools import ToolCallResponse
from mistralrs_sdk.tools.callbacks import ToolError, ToolExecutor, call_here_or_in_thread

MAX_PARALLEL_CALLS = 16
"""Calls of one round that are executed at once; the others wait."""

logger = logging.getLogger(__name__)


@attrs.frozen
class ToolOutcome:
    """A call with its result, or the reason why there is none."""

    call: ToolCallResponse
    result: str
    error: str | None = None

    @property
    def content(self) -> str:
        """What the model reads."""
        return self.result if self.error is None else f"Error: {self.error}"

    def record(self, round: int) -> AgenticToolCallRecord:
        """The entry of `agentic_tool_calls`."""
        return AgenticToolCallRecord(
            round=round,
            tool_call_id=self.call.id,
            name=self.call.function.name,
            arguments=self.call.function.arguments,
            result_content=self.content,
        )


@attrs.define
class Approvals:
    """Who decides about calls, and what was decided for good."""

    permission: AgentPermission = AgentPermission.AUTO
    callback: ApprovalCallback | None = None
    remembered: set[str] = attrs.field(factory=set)
    """Names of tools that are not asked about any more."""

    async def refusal(
        self, call: ToolCallResponse, executor: ToolExecutor, context: ToolCallContext
    ) -> str | None:
        """Why the call may not run, or None. An approval that fails is a denial."""
        name = call.function.name
        if self.permission is AgentPermission.AUTO or name in self.remembered:
            return None
        if self.permission is AgentPermission.DENY or self.callback is None:
            return f"the call of {name} was denied: this request may execute no tools"
        external = executor.source == "external"
        approval = AgentToolApproval(
            approval_id=str(uuid.uuid4()),
            session_id=context.session_id,
            round=context.round,
            tool=AgentToolMetadata(
                source=executor.source, kind="external" if external else "custom", label=name
            ),
            arguments=call.function.arguments,
        )
        try:
            decision = await call_here_or_in_thread(self.callback, approval)
        except (Exception, SystemExit):
            logger.warning("the approval of a call of %s failed", name, exc_info=True)
            return f"the call of {name} was denied: asking for approval failed"
        if not isinstance(decision, AgentToolApprovalDecision):
            decision = AgentToolApprovalDecision(decision is True)
        if not decision.approved:
            return decision.message or f"the call of {name} was denied by the user"
        if decision.remember_for_session:
            self.remembered.add(name)
        return None


async def run_calls(
    calls: Iterable[tuple[ToolCallResponse, ToolExecutor | str]],
    *,
    round: int,
    session_id: str | None = None,
    approvals: Approvals,
    timeout: float | None,
    emit: Callable[[ToolCallResponse | ToolOutcome], None],
    max_parallel: int = MAX_PARALLEL_CALLS,
) -> list[ToolOutcome]:
    """Execute calls, each with its executor or the reason why there is none; keeps their order.

    Nothing a tool does raises here: what fails becomes an outcome with an error. `timeout` is in
    seconds and for each call; MCP servers have their own. `emit` gets a call when it begins and
    its outcome when it ends. Cancelling cancels the calls; worker threads are left to themselves.
    """
    places = asyncio.Semaphore(max_parallel)

    async def run(
        call: ToolCallResponse, executor: ToolExecutor | str, context: ToolCallContext
    ) -> ToolOutcome:
        async with places:
            emit(call)
            if isinstance(executor, str):
                outcome = ToolOutcome(call, "", executor)
            else:
                outcome = await _run_one(call, executor, context, timeout=timeout)
            emit(outcome)
        return outcome

    tasks: list[asyncio.Task[ToolOutcome]] = []
    async with asyncio.TaskGroup() as group:
        for call, executor in calls:
            context = ToolCallContext(
                session_id=session_id, round=round, tool_name=call.function.name
            )
            if not isinstance(executor, str):
                executor = await approvals.refusal(call, executor, context) or executor
            tasks.append(group.create_task(run(call, executor, context)))
    return [task.result() for task in tasks]


async def _run_one(
    call: ToolCallResponse,
    executor: ToolExecutor,
    context: ToolCallContext,
    *,
    timeout: float | None,
) -> ToolOutcome:
    name = call.function.name
    limit = asyncio.timeout(None if executor.source == "mcp" else timeout)
    try:
        async with limit:
            return ToolOutcome(call, await executor.run(call.function, context))
    except ToolError as error:
        return ToolOutcome(call, "", str(error))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _failed(call, error)  # the tool's own doing
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return ToolOutcome(call, "", f"{name} gave no result within {timeout:g} s")
        return _failed(call, error)


def _failed(call: ToolCallResponse, error: BaseException) -> ToolOutcome:
    logger.warning("the tool %s failed", call.function.name, exc_info=error)
    return ToolOutcome(call, "", f"{type(error).__name__}: {error}")
